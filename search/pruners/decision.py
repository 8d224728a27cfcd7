"""What a pruner is asked, what it may look at, and what it decided on what grounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Protocol, TypedDict, Unpack

if TYPE_CHECKING:
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
