"""Base classes of pruners, and the decisions that they return."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, Self, TypedDict, Unpack

from hpsearch.search.spec.kinds import RegisteredOptions

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.trial import FrozenTrial


RungValue = float | list[float]  # the value of a trial at a rung, or the values of several metrics


@dataclass(frozen=True)
class Decision:
    """The decision of a pruner after one epoch.

    Attributes:
        prune: whether to prune the trial.
        reason: reason of pruning, in one line; empty if the trial continues.
        pruner: the pruner's name in the spec.
        epoch: the evaluated epoch, from 0.
        value: the trial's best or last value, depending on the pruner.
        cutoff: the value that `value` was compared with; None without a comparison.
        peers: number of other trials that determine the cutoff.
        rung: the rung of successive halving, from 0.
        bracket: Hyperband's bracket, from 0.
    """

    prune: bool
    reason: str = ""
    pruner: str = ""
    epoch: int | None = None
    value: float | None = None
    cutoff: float | None = None
    peers: int = 0
    rung: int | None = None
    bracket: int | None = None

    def record(self) -> dict[str, object]:
        """Return the details other than the reason as JSON values; NaN and infinities become text."""
        fields = {key: value for key, value in asdict(self).items() if value is not None}
        del fields["prune"], fields["reason"]
        return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


class DecisionDetails(TypedDict, total=False):
    """Fields of :class:`Decision` that describe its comparison."""

    value: float
    cutoff: float | None
    peers: int
    rung: int
    bracket: int | None


@dataclass(frozen=True)
class PruningContext:
    """The values of the evaluated trial, and the meaning of these values.

    Attributes:
        pruner: the pruner's name in the spec.
        study: the study's name.
        number: the trial's number.
        metric: the metric's name.
        maximize: whether higher is better.
        epochs: epochs of a full trial.
        values: the metric by epoch, from 0; not empty.
        reported: objectives and constrained metrics of the last epoch, by name.
        vector: the objectives at the best epoch so far by the first metric.
        maximized: per objective, whether higher is better; empty with a single metric.
    """

    pruner: str
    study: str
    number: int
    metric: str
    maximize: bool
    epochs: int
    values: Mapping[int, float]
    reported: Mapping[str, float] = field(default_factory=dict)
    vector: Sequence[float] = ()
    maximized: Sequence[bool] = ()

    @property
    def is_multi_objective(self) -> bool:
        """Whether the study has several objectives."""
        return bool(self.maximized)

    @property
    def step(self) -> int:
        """The last epoch, from 0."""
        return max(self.values)

    @property
    def last(self) -> float:
        """The value of the last epoch."""
        return self.values[self.step]

    def is_worse(self, value: float, cutoff: float) -> bool:
        """Return whether `value` is worse than `cutoff`; equal is not."""
        return value < cutoff if self.maximize else value > cutoff

    def keep(self, **details: Unpack[DecisionDetails]) -> Decision:
        """Return the decision to continue the trial."""
        return Decision(prune=False, pruner=self.pruner, epoch=self.step, **details)

    def prune(self, why: str, **details: Unpack[DecisionDetails]) -> Decision:
        """Return the decision to prune the trial."""
        reason = f"{self.pruner} pruner at epoch {self.step + 1} of {self.epochs}: {why}"
        return Decision(prune=True, reason=reason, pruner=self.pruner, epoch=self.step, **details)

    def format_comparison(self, value: float, cutoff: float, *, best: bool = False) -> str:
        """Return ``"best accuracy 0.8871 is below 0.9132"``, or ``above`` where lower is better."""
        metric = f"best {self.metric}" if best else self.metric
        return f"{metric} {value:.6g} is {'below' if self.maximize else 'above'} {cutoff:.6g}"


class OtherTrials(Protocol):
    """The other trials of the study, for the decision on one trial; each call may query the database."""

    def get_finished_trials(self) -> Sequence[FrozenTrial]:
        """Return the COMPLETE trials."""
        ...

    def count_reached_rungs(self) -> int:
        """Return the number of rungs at which the trial has recorded a value."""
        ...

    def record_rung_value(self, rung: int, value: RungValue) -> None:
        """Record the trial's value, or its values of several metrics, at a rung."""
        ...

    def read_rung_values(self, rung: int) -> list[tuple[int, RungValue]]:
        """Return number and value of all other trials, in any state, that have recorded one at a rung."""
        ...


def is_first_of_interval(values: Mapping[int, float], step: int, *, n_warmup_steps: int, interval_steps: int) -> bool:
    """Return whether `step`, which is past the warm-up, is the first one reported in its interval (Optuna's rule)."""
    start = (step - n_warmup_steps) // interval_steps * interval_steps + n_warmup_steps
    return max((s for s in values if s != step), default=-1) < start


@dataclass(frozen=True)
class Halving:
    """Successive halving with its options, in one bracket of Hyperband or without brackets.

    `is_peer` returns whether the trial of a number is in the same bracket.
    """

    min_resource: int
    reduction_factor: int
    min_early_stopping_rate: int
    bootstrap_count: int
    bracket: int | None = None
    is_peer: Callable[[int], bool] = lambda _: True

    def get_epoch(self, rung: int) -> int:
        """Return the epoch, from 0, at which a rung is reached."""
        epochs: int = self.min_resource * self.reduction_factor ** (self.min_early_stopping_rate + rung)
        return epochs

    def judge(self, case: PruningContext, peers: OtherTrials) -> Decision:
        """Return the decision on a trial at the rungs that its last epoch reaches.

        A repeated call for the same epoch, after the death of a worker, compares the trial at the same rungs again.
        (Optuna's pruner would keep the trial.)
        """
        before = max((s for s in case.values if s != case.step), default=-1)
        rung = min(peers.count_reached_rungs(), self._count_due(before))
        decision = case.keep(bracket=self.bracket)
        while case.step >= self.get_epoch(rung):
            decision = self._judge_at_rung(rung, case, peers)
            if decision.prune:
                break
            rung += 1
        return decision

    def _count_due(self, step: int) -> int:
        """Return the number of rungs that a trial has reached after epoch `step`."""
        rung = 0
        while step >= self.get_epoch(rung):
            rung += 1
        return rung

    def _judge_at_rung(self, rung: int, case: PruningContext, peers: OtherTrials) -> Decision:
        """Return the decision at a rung: by the last value, or by Pareto fronts (Schmucker et al. 2021)."""
        value, several = case.last, case.is_multi_objective
        details: DecisionDetails = {"value": value, "rung": rung, "bracket": self.bracket}
        if math.isnan(value) and not several:
            return case.prune(f"{case.metric} is NaN", **details)
        # Recorded before the others are read, so that of two concurrent trials at least one sees the other.
        peers.record_rung_value(rung, list(case.vector) if several else value)
        others = [at for number, at in peers.read_rung_values(rung) if self.is_peer(number)]
        details["peers"] = len(others)
        reached = len(others) + 1
        place = f"rung {rung}" if self.bracket is None else f"rung {rung} of bracket {self.bracket}"
        if reached <= self.bootstrap_count:
            why = f"is number {reached} at {place}, which promotes none of the first {self.bootstrap_count}"
            return case.prune(why, **details)
        # The first trials of a rung are kept unless they are worse than others; they do not wait for more trials.
        promoted = max(1, reached // self.reduction_factor)
        if several:
            # The trial is the last vector, so that the earlier one of two equal trials is kept.
            from hpsearch.storage.rungs.fronts import sort_by_front, to_losses  # loads SQLAlchemy

            vectors = [at for at in others if isinstance(at, list)]
            rank = sort_by_front(to_losses([*vectors, case.vector], case.maximized)).index(len(vectors)) + 1
            if rank <= promoted:
                return case.keep(**details)
            why = f"rank {rank} of {reached} by Pareto fronts at {place}, which promotes the best {promoted}"
            return case.prune(why, **details)
        values = [at for at in others if not isinstance(at, list)]
        cutoff = details["cutoff"] = sorted([*values, value], reverse=case.maximize)[promoted - 1]
        if not case.is_worse(value, cutoff):
            return case.keep(**details)
        peers_text = f"best {promoted} of {reached} trials at {place} reach"
        return case.prune(f"{case.format_comparison(value, cutoff)}, which the {peers_text}", **details)


def check_min_resource(min_resource: int, epochs: int) -> None:
    """Check that trials reach the first rung.

    Raises:
        ValueError: `min_resource` exceeds the epochs of a trial.
    """
    if min_resource > epochs:
        raise ValueError(f"pruner.min_resource {min_resource} exceeds epochs {epochs}: no trial reaches it; lower it")


class RungSchedule(NamedTuple):
    """Schedule of the rungs at which trials pause.

    Attributes:
        epochs: epochs after which each rung is reached.
        reduction_factor: one of this number of trials at a rung is promoted.
        min_complete: minimum number of trials that train to completion.
    """

    epochs: tuple[int, ...]
    reduction_factor: int
    min_complete: int


class PrunerSpec(RegisteredOptions):
    """A pruner and its options."""

    family: ClassVar[str] = "pruner"
    unsupported: ClassVar[Mapping[str, str]] = {
        "wilcoxon": "its test needs independent measurements, such as folds, and epochs of one training are not "
        "independent; use 'median' or 'patient'"
    }

    # Whether the pruner ends trials early.
    can_prune: ClassVar[bool] = True

    def get_metric_name(self) -> str | None:
        """Return the metric that the options name; None for the study's metric."""
        return None

    def fit_to_epochs(self, epochs: int) -> Self:
        """Return the options, completed for trials of `epochs`, so that all processes use the same values.

        Raises:
            ValueError: the options do not fit `epochs`.
        """
        return self

    def build(self) -> BasePruner:
        """Return the pruner of the Optuna study, from which samplers get the bracket; `judge` makes the decisions."""
        from optuna.pruners import NopPruner

        return NopPruner()

    @abstractmethod
    def judge(self, case: PruningContext, peers: OtherTrials) -> Decision:
        """Return the decision on a trial after its last reported epoch; repeatable."""

    def get_halving(self, study: str, number: int) -> Halving | None:
        """Return the successive halving of a trial; None if the pruner does not use it."""
        return None

    def get_rung_schedule(self, epochs: int) -> RungSchedule | None:
        """Return the rungs at which trials of `epochs` pause; None if trials do not pause."""
        return None
