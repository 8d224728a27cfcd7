"""Base classes of pruners, and the decisions that they return."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, Self, TypedDict, Unpack

from hpsearch.search.spec.kinds import Kind

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.trial import FrozenTrial


Noted = float | list[float]  # what a trial comes to at a rung, by one metric or by several


@dataclass(frozen=True)
class Decision:
    """A verdict after one epoch.

    Attributes:
        prune: whether the trial is to end here.
        reason: why it is to end, in one line for a person; empty where it goes on.
        pruner: the pruner's name in the spec.
        epoch: the epoch that was judged, from 0.
        value: what was compared, in the metric's unit: the trial's best or its last value, as the pruner has it.
        cutoff: what the value was compared with; None where nothing was.
        peers: how many other trials the cut-off comes from.
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
        """Return what there is to say beside the reason, ready for JSON: no number in it is NaN or infinite."""
        fields = {key: value for key, value in asdict(self).items() if value is not None}
        del fields["prune"], fields["reason"]
        return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


class Grounds(TypedDict, total=False):
    """What a decision was made from: fields of :class:`Decision`."""

    value: float
    cutoff: float | None
    peers: int
    rung: int
    bracket: int | None


@dataclass(frozen=True)
class Case:
    """What is judged: a trial's values by epoch (not empty), and what they mean.

    Attributes:
        pruner: the pruner's name in the spec.
        study: the study's name.
        number: the trial's.
        metric: the metric's name.
        maximize: whether higher is better.
        epochs: how many epochs a full trial has.
        values: the metric by epoch, from 0.
        reported: all metrics that are optimised or have bounds, of the last epoch, by their names.
        vector: what the trial comes to so far, of all metrics that are optimised: of its best epoch by the first.
        maximized: of each of these, whether higher is better; empty where there is one.
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
    def several(self) -> bool:
        """Whether more than one metric is optimised."""
        return bool(self.maximized)

    @property
    def step(self) -> int:
        """The last epoch, from 0."""
        return max(self.values)

    @property
    def last(self) -> float:
        """The value of the last epoch."""
        return self.values[self.step]

    def worse(self, value: float, cutoff: float) -> bool:
        """Whether `value` is worse than `cutoff`; equal is not."""
        return value < cutoff if self.maximize else value > cutoff

    def on(self, **grounds: Unpack[Grounds]) -> Decision:
        """Return the decision to go on."""
        return Decision(prune=False, pruner=self.pruner, epoch=self.step, **grounds)

    def prune(self, why: str, **grounds: Unpack[Grounds]) -> Decision:
        """Return the decision to prune, with its reason."""
        reason = f"{self.pruner} pruner at epoch {self.step + 1} of {self.epochs}: {why}"
        return Decision(prune=True, reason=reason, pruner=self.pruner, epoch=self.step, **grounds)

    def compared(self, value: float, cutoff: float, *, best: bool = False) -> str:
        """Return ``"best accuracy 0.8871 is below 0.9132"``, or ``above`` where lower is better."""
        what = f"best {self.metric}" if best else self.metric
        return f"{what} {value:.6g} is {'below' if self.maximize else 'above'} {cutoff:.6g}"


class Peers(Protocol):
    """What a pruner may ask of the study while it judges one trial; each answer may be a query."""

    def finished(self) -> Sequence[FrozenTrial]:
        """Return the COMPLETE trials."""
        ...

    def reached(self) -> int:
        """Return how many rungs the trial has noted a value at."""
        ...

    def note(self, rung: int, value: Noted) -> None:
        """Note the trial's value at a rung, or those of several metrics."""
        ...

    def at_rung(self, rung: int) -> list[tuple[int, Noted]]:
        """Return number and value of all other trials, in whatever state, that noted one at a rung."""
        ...


def first_of_interval(values: Mapping[int, float], step: int, *, n_warmup_steps: int, interval_steps: int) -> bool:
    """Whether `step`, which is past the warm-up, is the first one reported in its interval (Optuna's rule)."""
    start = (step - n_warmup_steps) // interval_steps * interval_steps + n_warmup_steps
    return max((s for s in values if s != step), default=-1) < start


@dataclass(frozen=True)
class Halving:
    """Successive halving with its options, in one bracket of Hyperband or without any.

    `is_peer` says of a trial's number whether it is in the same bracket.
    """

    min_resource: int
    reduction_factor: int
    min_early_stopping_rate: int
    bootstrap_count: int
    bracket: int | None = None
    is_peer: Callable[[int], bool] = lambda _: True

    def epoch_of(self, rung: int) -> int:
        """Return the epoch, from 0, at which a rung is reached."""
        epochs: int = self.min_resource * self.reduction_factor ** (self.min_early_stopping_rate + rung)
        return epochs

    def judge(self, case: Case, peers: Peers) -> Decision:
        """Take the trial through the rungs that its last epoch reaches.

        A trial judged again at the same epoch, because its worker died in between, goes through the same rungs again.
        (Optuna's pruner would let it pass.)
        """
        rung = min(peers.reached(), self._due(max((s for s in case.values if s != case.step), default=-1)))
        decision = case.on(bracket=self.bracket)
        while case.step >= self.epoch_of(rung):
            decision = self._at(rung, case, peers)
            if decision.prune:
                break
            rung += 1
        return decision

    def _due(self, step: int) -> int:
        """Return how many rungs a trial has reached after epoch `step`."""
        rung = 0
        while step >= self.epoch_of(rung):
            rung += 1
        return rung

    def _at(self, rung: int, case: Case, peers: Peers) -> Decision:
        """Judge the trial at a rung: with several metrics by fronts (Schmucker et al. 2021), else by its last value."""
        value, several = case.last, case.several
        grounds: Grounds = {"value": value, "rung": rung, "bracket": self.bracket}
        if math.isnan(value) and not several:
            return case.prune(f"{case.metric} is not a number", **grounds)
        # Noted before the others are read: of two trials that arrive at once, at least one sees the other.
        peers.note(rung, list(case.vector) if several else value)
        others = [at for number, at in peers.at_rung(rung) if self.is_peer(number)]
        grounds["peers"] = len(others)
        reached = len(others) + 1
        there = f"rung {rung}" if self.bracket is None else f"rung {rung} of bracket {self.bracket}"
        if reached <= self.bootstrap_count:
            why = f"is number {reached} at {there}, which promotes none of the first {self.bootstrap_count}"
            return case.prune(why, **grounds)
        # The first of a rung go on, unless better ones are there: none is held back to wait for others.
        promoted = max(1, reached // self.reduction_factor)
        if several:
            # Last, so that of equal ones the earlier goes on.
            from hpsearch.storage.rungs.fronts import losses_of, order  # loads SQLAlchemy

            vectors = [at for at in others if isinstance(at, list)]
            rank = order(losses_of([*vectors, case.vector], case.maximized)).index(len(vectors)) + 1
            if rank <= promoted:
                return case.on(**grounds)
            why = f"rank {rank} of {reached} by fronts at {there}, where the best {promoted} go on"
            return case.prune(why, **grounds)
        values = [at for at in others if not isinstance(at, list)]
        cutoff = grounds["cutoff"] = sorted([*values, value], reverse=case.maximize)[promoted - 1]
        if not case.worse(value, cutoff):
            return case.on(**grounds)
        reach = f"best {promoted} of {reached} trials at {there} reach"
        return case.prune(f"{case.compared(value, cutoff)}, which the {reach}", **grounds)


def require_reachable(min_resource: int, epochs: int) -> None:
    """Refuse a first rung that no trial would ever reach."""
    if min_resource > epochs:
        raise ValueError(
            f"pruner.min_resource {min_resource} is more than epochs {epochs}: no trial would ever reach it; lower it"
        )


class Promotion(NamedTuple):
    """Rungs at which trials wait.

    Attributes:
        epochs: after how many each is reached.
        factor: of how many that reach it one goes on.
        complete: how many trials are trained to their end at least.
    """

    epochs: tuple[int, ...]
    factor: int
    complete: int


class PrunerSpec(Kind):
    """A pruner and its options."""

    family: ClassVar[str] = "pruner"
    refused: ClassVar[Mapping[str, str]] = {
        "wilcoxon": "its test takes the steps of a trial for independent measurements, as of folds, and the epochs of "
        "one training are not; use 'median', or 'patient'"
    }

    # Whether trials end before their time at all.
    prunes: ClassVar[bool] = True

    def names_metric(self) -> str | None:
        """The metric that its options name; None where it is the study's."""
        return None

    def for_epochs(self, epochs: int) -> Self:
        """Return the options for full trials of so many epochs, with nothing left open.

        Left open, each process would derive its own.

        Raises:
            ValueError: they do not fit; one line says why.
        """
        return self

    def build(self) -> BasePruner:
        """Return the pruner of Optuna's study: samplers ask Hyperband's for a trial's bracket; verdicts are our own."""
        from optuna.pruners import NopPruner

        return NopPruner()

    @abstractmethod
    def judge(self, case: Case, peers: Peers) -> Decision:
        """Decide about a trial after its last reported epoch, as often as one likes."""

    def halving(self, study: str, number: int) -> Halving | None:
        """Return the successive halving that a trial of a study goes through; None where there is none."""
        return None

    def promotion(self, epochs: int) -> Promotion | None:
        """Return the rungs at which trials of so many epochs wait; None where no trial does."""
        return None
