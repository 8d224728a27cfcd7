"""Base classes of pruners, the decisions that they return, and successive halving, which several pruners share."""

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
        value: the trial's best or last value, depending on the pruner; None if no value was compared.
        cutoff: the value that `value` was compared with; None if there was no comparison.
        peers: number of other trials that determine the cutoff.
        rung: the rung of successive halving, from 0; None if the decision was not at a rung.
        bracket: Hyperband's bracket, from 0; None without Hyperband.
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

    def to_record(self) -> dict[str, object]:
        """Return all fields except `prune` and `reason` as JSON values; NaN and infinities become text."""
        fields = {key: value for key, value in asdict(self).items() if value is not None}
        del fields["prune"], fields["reason"]
        return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


class DecisionDetails(TypedDict, total=False):
    """Fields of :class:`Decision` that describe the comparison with other trials."""

    value: float
    cutoff: float | None
    peers: int
    rung: int
    bracket: int | None


@dataclass(frozen=True)
class PruningContext:
    """The evaluated trial: its values, and the settings that give these values a meaning.

    Attributes:
        pruner: the pruner's name in the spec.
        study: the study's name.
        number: the trial's number.
        metric: the metric's name; the name of the first metric in a multi-objective study.
        maximize: whether higher values of the metric are better.
        epochs: number of epochs of a full trial.
        values: values of the metric by epoch, from 0; not empty.
        reported: values of objectives and constrained metrics in the last epoch, by name.
        objective_values: values of all objectives at the best epoch so far by the first metric.
        maximize_each: per objective, whether higher values are better; empty in a single-objective study.
    """

    pruner: str
    study: str
    number: int
    metric: str
    maximize: bool
    epochs: int
    values: Mapping[int, float]
    reported: Mapping[str, float] = field(default_factory=dict)
    objective_values: Sequence[float] = ()
    maximize_each: Sequence[bool] = ()

    @property
    def is_multi_objective(self) -> bool:
        """Whether the study has several objectives."""
        return bool(self.maximize_each)

    @property
    def step(self) -> int:
        """The last reported epoch, from 0."""
        return max(self.values)

    @property
    def value(self) -> float:
        """The value of the last reported epoch."""
        return self.values[self.step]

    def is_worse(self, value: float, cutoff: float) -> bool:
        """Return whether `value` is worse than `cutoff`, and not equal."""
        return value < cutoff if self.maximize else value > cutoff

    def keep(self, **details: Unpack[DecisionDetails]) -> Decision:
        """Return the decision to continue the trial."""
        return Decision(prune=False, pruner=self.pruner, epoch=self.step, **details)

    def prune(self, why: str, **details: Unpack[DecisionDetails]) -> Decision:
        """Return the decision to prune the trial."""
        reason = f"{self.pruner} pruner at epoch {self.step + 1} of {self.epochs}: {why}"
        return Decision(prune=True, reason=reason, pruner=self.pruner, epoch=self.step, **details)

    def format_comparison(self, value: float, cutoff: float, *, best: bool = False) -> str:
        """Return a text such as ``"best accuracy 0.8871 is below 0.9132"``, with ``above`` if lower is better."""
        metric = f"best {self.metric}" if best else self.metric
        return f"{metric} {value:.6g} is {'below' if self.maximize else 'above'} {cutoff:.6g}"


class OtherTrials(Protocol):
    """Access to the other trials of the study, for the decision on one trial; each call may query the database."""

    def get_finished_trials(self) -> Sequence[FrozenTrial]:
        """Return the COMPLETE trials of the study."""
        ...

    def count_reached_rungs(self) -> int:
        """Return the number of rungs at which the evaluated trial has recorded a value."""
        ...

    def record_rung_value(self, rung: int, value: RungValue) -> None:
        """Record the evaluated trial's value at a rung; in a multi-objective study, the values of all objectives."""
        ...

    def read_rung_values(self, rung: int) -> list[tuple[int, RungValue]]:
        """Return (number, value) of each other trial, in any state, that has recorded a value at a rung."""
        ...

    def read_fold_values(self, epoch: int, trial: FrozenTrial | None = None) -> list[float]:
        """Return the values of the metric in each fold at an epoch; without `trial`, those of the evaluated trial."""
        ...


def is_due(case: PruningContext, *, n_warmup_steps: int, interval_steps: int) -> bool:
    """Return whether the last epoch is the first reported step of its interval after the warm-up, by Optuna's rule.

    Args:
        case: the trial with its values by step.
        n_warmup_steps: number of warm-up steps, after which the first interval starts.
        interval_steps: number of steps of an interval.
    """
    start = (case.step - n_warmup_steps) // interval_steps * interval_steps + n_warmup_steps
    return case.step >= n_warmup_steps and max((s for s in case.values if s != case.step), default=-1) < start


@dataclass(frozen=True)
class Halving:
    """Successive halving, in one bracket of Hyperband or without brackets.

    Attributes:
        min_resource, reduction_factor, min_early_stopping_rate, bootstrap_count: options of Optuna's pruner.
        bracket: the bracket of Hyperband, from 0; None without brackets.
        is_peer: function that returns whether the trial with a number is in the same bracket.
    """

    min_resource: int
    reduction_factor: int
    min_early_stopping_rate: int
    bootstrap_count: int
    bracket: int | None = None
    is_peer: Callable[[int], bool] = lambda _: True

    def get_epoch(self, rung: int) -> int:
        """Return the epoch, from 0, at which a trial reaches a rung."""
        epochs: int = self.min_resource * self.reduction_factor ** (self.min_early_stopping_rate + rung)
        return epochs

    def decide(self, case: PruningContext, peers: OtherTrials) -> Decision:
        """Return the decision on a trial at the rungs that its last epoch reaches.

        If the decision is repeated for the same epoch after the death of a worker, the trial is compared at the same
        rungs again. (Optuna's pruner would not prune the trial.)
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
        """Return the decision at a rung.

        Trials are compared by the last value; in multi-objective studies, by Pareto fronts (Schmucker et al. 2021).
        """
        value, several = case.value, case.is_multi_objective
        details: DecisionDetails = {"value": value, "rung": rung, "bracket": self.bracket}
        if math.isnan(value) and not several:
            return case.prune(f"{case.metric} is NaN", **details)
        # The value is recorded before other values are read, so that of two concurrent trials, at least one is compared
        # with the other.
        peers.record_rung_value(rung, list(case.objective_values) if several else value)
        others = [at for number, at in peers.read_rung_values(rung) if self.is_peer(number)]
        details["peers"] = len(others)
        reached = len(others) + 1
        place = f"rung {rung}" if self.bracket is None else f"rung {rung} of bracket {self.bracket}"
        if reached <= self.bootstrap_count:
            why = f"{place} prunes the first {self.bootstrap_count} trials (bootstrap_count); this is number {reached}"
            return case.prune(why, **details)
        # The first trials at a rung do not wait for other trials, so they are kept unless they are worse than others.
        promoted = max(1, reached // self.reduction_factor)
        if several:
            # The evaluated trial is the last vector, so that of two equal trials the earlier trial is kept.
            from hpsearch.storage.rungs.fronts import sort_by_front, to_losses  # loads SQLAlchemy

            vectors = [*(at for at in others if isinstance(at, list)), case.objective_values]
            rank = sort_by_front(to_losses(vectors, case.maximize_each)).index(len(vectors) - 1) + 1
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
    """Check that trials of `epochs` reach the first rung.

    Raises:
        ValueError: `min_resource` exceeds the epochs of a trial.
    """
    if min_resource > epochs:
        raise ValueError(f"pruner.min_resource {min_resource} exceeds --epochs {epochs}; lower pruner.min_resource")


class RungSchedule(NamedTuple):
    """Schedule of the rungs at which trials pause.

    Attributes:
        epochs: per rung, the number of epochs after which a trial reaches the rung.
        reduction_factor: of the trials at a rung, one in `reduction_factor` is promoted.
        min_complete: minimum number of trials that train to completion.
    """

    epochs: tuple[int, ...]
    reduction_factor: int
    min_complete: int


class PrunerSpec(RegisteredOptions):
    """A pruner and its options."""

    family: ClassVar[str] = "pruner"
    # Whether the pruner ends trials early.
    can_prune: ClassVar[bool] = True
    # Whether trials continue from checkpoints of other trials.
    shares_checkpoints: ClassVar[bool] = False

    def get_metric_name(self) -> str | None:
        """Return the name of the metric in the options; None if the pruner uses the study's metric."""
        return None

    def fit_to_epochs(self, epochs: int) -> Self:
        """Return the options for trials of `epochs`, with computed values filled in, so that all processes share them.

        Raises:
            ValueError: the options do not fit `epochs`.
        """
        return self

    def check_folds(self, folds: int | None) -> None:
        """Check that the pruner supports the number of folds of a trial; None if trials have no folds.

        Raises:
            ValueError: it needs folds, or more folds.
        """

    def check_settings(self, *, n_trials: int, sampler: str, given: Sequence[str]) -> None:
        """Check that the pruner supports the other settings of a study.

        Args:
            n_trials: budget in trials.
            sampler: name of the sampler.
            given: options of the study that some pruners do not support, such as ``--timeout``.

        Raises:
            ValueError: a setting is not available with the pruner; the message has the setting and the remedy.
        """

    def build(self) -> BasePruner:
        """Return the pruner object for the Optuna study.

        It makes no decisions: `decide` does. Optuna's samplers use it to find the Hyperband bracket of a trial.
        """
        from optuna.pruners import NopPruner

        return NopPruner()

    @abstractmethod
    def decide(self, case: PruningContext, peers: OtherTrials) -> Decision:
        """Return the decision on a trial after its last reported epoch; safe to repeat."""

    def get_halving(self, study: str, number: int) -> Halving | None:
        """Return the successive halving for a trial; None if the pruner does not use successive halving."""
        return None

    def get_rung_schedule(self, epochs: int) -> RungSchedule | None:
        """Return the schedule of the rungs at which trials of `epochs` pause; None if trials do not pause."""
        return None
