"""The session of a run, which saves, restores, logs and reports; with several ranks, only rank 0 uses the session."""

from __future__ import annotations

import enum
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.reproducibility.checkpoint import RunFiles
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord


@dataclass(frozen=True)
class Verdict:
    """The result of a report: `CONTINUE`, `PRUNE`, `STOP` or `PAUSE`.

    After `STOP`, for a preemption or a graceful shutdown, the run resumes later from its checkpoint. After `PAUSE`, the
    run resumes when the trial is promoted or the budget allows further epochs. The comparison of verdicts ignores their
    reasons.

    Attributes:
        name: name of the verdict.
        reason: data about the decision, which the session passes to the caller of `fit`.
    """

    name: str
    reason: object = field(default=None, compare=False)

    CONTINUE: ClassVar[Verdict]
    PRUNE: ClassVar[Verdict]
    STOP: ClassVar[Verdict]
    PAUSE: ClassVar[Verdict]

    def with_reason(self, reason: object) -> Verdict:
        """Return the same verdict with a reason."""
        return Verdict(self.name, reason)


Verdict.CONTINUE, Verdict.PRUNE = Verdict("continue"), Verdict("prune")
Verdict.STOP, Verdict.PAUSE = Verdict("stop"), Verdict("pause")


class Curve:
    """The learning curve of an attempt: one record per epoch, and the best epoch by the validation metric.

    Args:
        metric: metric that selects the best epoch.
        maximize: whether higher values of the metric are better.
        keep_last: whether the last epoch counts as the best, as in a refit, which has no unbiased metric.
        known: metric by epoch, as earlier attempts reported it; these values do not change.

    Attributes:
        history: the records.
        best: `epoch`, `value`, `metrics` and `model` (weights) of the best epoch; empty before the first epoch.
        values: metric by epoch, including earlier attempts.
    """

    def __init__(
        self, metric: str, *, maximize: bool, keep_last: bool = False, known: Mapping[int, float] | None = None
    ) -> None:
        self.metric, self.maximize, self._keep_last = metric, maximize, keep_last
        self.history: list[EpochRecord] = []
        self.best: dict[str, Any] = {}
        self.values = dict(known or {})

    @property
    def metric_key(self) -> str:
        """The name of the metric in a record."""
        return f"val_{self.metric}"

    @property
    def next_epoch(self) -> int:
        """The epoch to train next."""
        return len(self.history)

    @property
    def epochs_since_best(self) -> int:
        """Number of epochs since the best epoch."""
        return len(self.history) - 1 - int(self.best["epoch"]) if self.best else 0

    def add(self, record: EpochRecord, weights: Callable[[], Any]) -> bool:
        """Add an epoch; return whether its weights were kept, as the best so far or by `keep_last`."""
        self._append(record)
        value = record.metrics[self.metric_key]
        if self.best and not self._keep_last and not self._is_better(value, self.best["value"]):
            return False
        self.best = {"epoch": record.epoch, "value": value, "metrics": record.metrics, "model": weights()}
        return True

    def find_best_up_to(self, epoch: int) -> EpochRecord:
        """Return the record of the best epoch up to `epoch`; of several equal epochs, the earliest."""
        best = self.history[0]
        for record in self.history[1 : epoch + 1]:
            if self._is_better(record.metrics[self.metric_key], best.metrics[self.metric_key]):
                best = record
        return best

    def _append(self, record: EpochRecord) -> None:
        self.history.append(record)
        self.values.setdefault(record.epoch, record.metrics[self.metric_key])

    def _is_better(self, value: float, other: float) -> bool:
        return value > other if self.maximize else value < other

    def state_dict(self) -> dict[str, Any]:
        """Return the curve as plain values and tensors."""
        history = [{"epoch": r.epoch, "timestamp": r.timestamp, "metrics": dict(r.metrics)} for r in self.history]
        return {"history": history, "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the curve that `state_dict` returned."""
        self.history, self.best = [], state["best"]
        for record in state["history"]:
            self._append(EpochRecord(**record))


class MidEpochAction(enum.Enum):
    """The action after an optimizer step within an epoch."""

    NONE = "nothing"
    SAVE = "save"
    SAVE_AND_STOP = "leave"  # there is no time to finish the epoch


class Session(Protocol):
    """The interface between a run and the trial that it belongs to."""

    @property
    def run_dir(self) -> Path | None:
        """Directory for the run's configuration, log, metrics and plots; None writes no files."""

    @property
    def curve(self) -> Curve | None:
        """The learning curve that the run extends; None if the run creates its own."""

    @property
    def shards(self) -> Path | None:
        """Folder for sharded checkpoints of the ranks; None keeps each checkpoint in one file."""

    def restore(self) -> dict[str, Any] | None:
        """Return the state of the last checkpoint; None if there is none."""

    def save(self, state: dict[str, Any], *, best: bool) -> None:
        """Save the state after an epoch, before the report.

        The tensors belong to the run, so write or copy them before returning.

        Args:
            state: content of the checkpoint; `promotable(state)` returns the part that a promotion needs.
            best: whether the epoch is the best so far.
        """

    def mid_epoch_action(self, left: Callable[[], float]) -> MidEpochAction:
        """Return whether the run must save or stop within the epoch. The run calls this after each optimizer step.

        Args:
            left: function that estimates the remaining seconds of the epoch, including validation and checkpoint.
        """

    def save_mid_epoch(self, state: dict[str, Any]) -> None:
        """Save the state within an epoch, like `save`. The epoch has no metrics yet."""

    def report(self, record: EpochRecord) -> Verdict:
        """Report the metrics of an epoch and return whether the run continues. A repeated report has no effect.

        A restored run reports all its epochs again, so that no epoch is lost if a process dies between save and
        report. A session returns CONTINUE for an epoch that it already has.
        """

    def log(self, path: Path) -> None:
        """Log a file of the run, such as configuration, metrics, log or plots."""


class LocalSession:
    """Session with checkpoints in a directory: `last.pt`, its predecessors, and `best.pt`. It never stops a run.

    Args:
        run_dir: the directory, which only this user may be able to change.
        keep: number of checkpoints to keep for resuming, including `last.pt`. With two or more, a run can resume if
            one file is truncated.
        interval: minimum seconds between checkpoints, for short epochs. The last epoch is always saved. A killed run
            loses only the epochs after the last checkpoint.
        snapshot_every: epochs between permanent checkpoints, such as `epoch-0009.pt`; None writes none of these.
        save_every: seconds between mid-epoch checkpoints; None writes no mid-epoch checkpoints.
        synced: whether saved files survive a power failure; if False, they survive only the end of the process.

    Raises:
        ObjectiveError: a number is out of range.
    """

    curve: Curve | None = None

    def __init__(
        self,
        run_dir: Path,
        *,
        keep: int = 2,
        interval: float = 0.0,
        snapshot_every: int | None = None,
        save_every: float | None = None,
        synced: bool = True,
    ) -> None:
        for name, value, low in (("keep", keep, 1), ("interval", interval, 0), ("snapshot_every", snapshot_every, 1)):
            if value is not None and value < low:
                raise ObjectiveError(f"{name} must be at least {low}, not {value}")
        if save_every is not None and not save_every > 0:
            raise ObjectiveError(f"save_every must be above 0 seconds, not {save_every}")
        self.files = RunFiles(run_dir, keep=keep, snapshot_every=snapshot_every, synced=synced)
        self.run_dir = self.files.run_dir
        self.shards = self.files.shards
        self._interval, self._save_every = interval, save_every
        self._saved_at = -math.inf

    def restore(self) -> dict[str, Any] | None:
        """Return the newest valid state, or None; truncated or changed files are skipped with a warning."""
        return self.files.restore()

    def save(self, state: dict[str, Any], *, best: bool) -> None:
        """Write `best.pt` if the epoch is the best, then `last.pt`; keep the predecessors of `last.pt`."""
        now, done = time.monotonic(), len(state.get("history", ()))
        is_last_epoch = done >= state.get("refit", state.get("epochs", 0))
        is_due = now - self._saved_at >= self._interval or is_last_epoch
        self.files.save(state, best=best, last=is_due)
        if is_due:
            self._saved_at = now

    def mid_epoch_action(self, left: Callable[[], float]) -> MidEpochAction:  # noqa: ARG002 part of the protocol
        """Return SAVE if the last checkpoint is at least `save_every` seconds old, else NONE."""
        return MidEpochAction.SAVE if self.files.is_due(self._save_every) else MidEpochAction.NONE

    def save_mid_epoch(self, state: dict[str, Any]) -> None:
        """Write `last.pt`, and keep its predecessors."""
        self.files.save_last(state)

    def report(self, record: EpochRecord) -> Verdict:  # noqa: ARG002 part of the protocol
        """Return CONTINUE; the metrics are in the checkpoint and in the trainer's files."""
        return Verdict.CONTINUE

    def log(self, path: Path) -> None:
        """Copy the file into the directory unless it is already there."""
        if path.resolve().parent != self.run_dir.resolve():
            self.run_dir.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, self.run_dir / path.name)
