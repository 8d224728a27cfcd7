"""The session of a run: saves, restores, logs and reports; on several ranks, rank 0 decides."""

from __future__ import annotations

import enum
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.ranks import Ranks
from hpsearch.objectives.training.reproducibility.checkpoint import RunFiles
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord


@dataclass(frozen=True)
class Verdict:
    """The answer to a report: `CONTINUE`, `PRUNE`, `STOP` or `PAUSE`.

    `STOP` is for a preempted or drained run, which resumes later from its checkpoint; `PAUSE` likewise, once no better
    trials are left or the budget has room. Verdicts are equal whatever their reasons.

    Attributes:
        name: of the verdict.
        reason: what it was decided by, for the caller of `fit`.
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
        metric: that decides.
        maximize: whether higher is better.
        keep_last: whether the last epoch counts as the best: a refit has nothing unbiased left to choose by.
        known: the metric by epoch, where earlier attempts reported it; a value that is known stays.

    Attributes:
        history: the records.
        best: `epoch`, `value`, `metrics` and `model` (weights) of the best epoch; empty before the first.
        values: the metric by epoch, those of earlier attempts included.
    """

    def __init__(
        self, metric: str, *, maximize: bool, keep_last: bool = False, known: Mapping[int, float] | None = None
    ) -> None:
        self.metric, self.maximize, self._keep_last = metric, maximize, keep_last
        self.history: list[EpochRecord] = []
        self.best: dict[str, Any] = {}
        self.values = dict(known or {})

    @property
    def key(self) -> str:
        """The name of the metric in a record."""
        return f"val_{self.metric}"

    @property
    def next_epoch(self) -> int:
        """The epoch to train next."""
        return len(self.history)

    @property
    def epochs_since_best(self) -> int:
        """Epochs since the best one."""
        return len(self.history) - 1 - int(self.best["epoch"]) if self.best else 0

    def add(self, record: EpochRecord, weights: Callable[[], Any]) -> bool:
        """Add an epoch; return whether its weights are kept because it is the best so far, or the last is kept."""
        self._append(record)
        value = record.metrics[self.key]
        if self.best and not self._keep_last and not self._is_better(value, self.best["value"]):
            return False
        self.best = {"epoch": record.epoch, "value": value, "metrics": record.metrics, "model": weights()}
        return True

    def best_up_to(self, epoch: int) -> EpochRecord:
        """Return the record of the best epoch up to `epoch`; of equal ones the earliest."""
        best = self.history[0]
        for record in self.history[1 : epoch + 1]:
            if self._is_better(record.metrics[self.key], best.metrics[self.key]):
                best = record
        return best

    def _append(self, record: EpochRecord) -> None:
        self.history.append(record)
        self.values.setdefault(record.epoch, record.metrics[self.key])

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
    """What is due after an optimizer step, in the midst of an epoch."""

    NONE = "nothing"
    SAVE = "save"
    SAVE_AND_STOP = "leave"  # save, and go on later: there is no time to end the epoch


class Session(Protocol):
    """What a run may ask of the trial that it belongs to."""

    @property
    def run_dir(self) -> Path | None:
        """Directory of the run's configuration, log, numbers and plots; None writes none."""

    @property
    def curve(self) -> Curve | None:
        """The learning curve that the run extends; None lets the run make its own."""

    @property
    def shards(self) -> Path | None:
        """Folder to which ranks may write their parts of a large state; None keeps each state in one file."""

    def restore(self) -> dict[str, Any] | None:
        """The last checkpoint's state, or None when the run starts."""

    def save(self, state: dict[str, Any], *, best: bool) -> None:
        """Keeps the state after an epoch, before it is reported.

        The tensors are the run's own: write or copy them before returning. `best`: the epoch is the best so far,
        and `promotable(state)` is what a promotion needs of it.
        """

    def mid_epoch_action(self, left: Callable[[], float]) -> MidEpochAction:
        """Asked after each optimizer step: whether the run's state is to be saved there, or the run to be left.

        Args:
            left: the seconds that the epoch will yet take, its validation and checkpoint included, by its pace so far.
        """

    def save_mid_epoch(self, state: dict[str, Any]) -> None:
        """Keeps the state in the midst of an epoch: as `save`, but nothing of that epoch is known yet."""

    def report(self, record: EpochRecord) -> Verdict:
        """Takes an epoch's numbers and says whether to go on. Idempotent by epoch.

        A restored run reports its whole history again, so that a death between save and report loses nothing; a
        session that has an epoch already answers CONTINUE.
        """

    def log(self, path: Path) -> None:
        """Takes a file that the run made: configuration, metrics, log, plots."""


class LocalSession:
    """Keeps a run's checkpoints in a directory: `last.pt` and those before it, `best.pt`. Never stops a run.

    Args:
        run_dir: the directory.
        keep: how many states to keep for resuming, the last one included; two survive a torn file.
        interval: seconds between two of them, for epochs that are shorter than their checkpoint is worth. The last
            epoch is always kept; a run that is killed loses what came after the last checkpoint, and nothing else.
        snapshot_every: epochs between two states that stay, as `epoch-0009.pt`; none unless given.
        save_every: seconds after which a state is kept in the midst of an epoch too; never unless given.
        synced: whether what is saved outlives a power cut, and not only the process.
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
        for name, value, least in (("keep", keep, 1), ("interval", interval, 0), ("snapshot_every", snapshot_every, 1)):
            if value is not None and value < least:
                raise ObjectiveError(f"{name} must be at least {least}, not {value}")
        if save_every is not None and not save_every > 0:
            raise ObjectiveError(f"save_every must be above 0 seconds, not {save_every}")
        self.files = RunFiles(run_dir, keep=keep, snapshot_every=snapshot_every, synced=synced)
        self.run_dir = self.files.run_dir
        self.shards = self.files.shards
        self._interval, self._save_every = interval, save_every
        self._saved_at = -math.inf

    def restore(self) -> dict[str, Any] | None:
        """The newest state that can be trusted; a torn or changed file is passed over with a warning."""
        return self.files.restore()

    def save(self, state: dict[str, Any], *, best: bool) -> None:
        """Writes `best.pt` when the epoch is the best, then `last.pt`, keeping those before."""
        now, done = time.monotonic(), len(state.get("history", ()))
        ends = done >= state.get("refit", state.get("epochs", 0))
        last = now - self._saved_at >= self._interval or ends
        self.files.save(state, best=best, last=last)
        if last:
            self._saved_at = now

    def mid_epoch_action(self, left: Callable[[], float]) -> MidEpochAction:  # noqa: ARG002 a session's
        """Saves each `save_every` seconds."""
        return MidEpochAction.SAVE if self.files.is_due(self._save_every) else MidEpochAction.NONE

    def save_mid_epoch(self, state: dict[str, Any]) -> None:
        """Writes `last.pt`, keeping those before."""
        self.files.save_last(state)

    def report(self, record: EpochRecord) -> Verdict:  # noqa: ARG002 a session's
        """Lets the run go on: its numbers are in the checkpoint, and the trainer keeps them beside it."""
        return Verdict.CONTINUE

    def log(self, path: Path) -> None:
        """Copies the file into the directory, unless it is there."""
        if path.resolve().parent != self.run_dir.resolve():
            self.run_dir.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, self.run_dir / path.name)


_ASKED = 0.25  # seconds between two steps at which the ranks agree on what is due


class RankedSession:
    """What a run on ranks asks of its trial: rank 0 asks, and its answers, or its errors, hold for all.

    Args:
        session: of the trial; None on ranks but the first.
        ranks: that train together.
    """

    def __init__(self, session: Session | None, ranks: Ranks) -> None:
        self._session, self._ranks = cast("Session", session), ranks  # rank 0 alone uses the session
        self.curve = None if session is None else session.curve
        self.run_dir, self.shards = ranks.broadcast_object(
            (None, None) if session is None else (session.run_dir, session.shards)
        )
        self._steps = 0  # until the ranks agree again
        self._asked = time.monotonic()
        self._apart = 1  # steps between the last two times

    def restore(self) -> dict[str, Any] | None:
        """The last checkpoint's state, which rank 0 reads; of one in parts, it alone keeps the best weights."""
        read: list[dict[str, Any] | None] = []

        def lean() -> dict[str, Any] | None:
            state = self._session.restore()
            read.append(state)
            if state is None or "shards" not in state or not state["best"]:
                return state
            return {**state, "best": {**state["best"], "model": {}}}

        told = self._ranks.run_on_rank_zero(lean)
        return read[0] if self._ranks.is_rank_zero else told

    def save(self, state: dict[str, Any], *, best: bool) -> None:
        """Rank 0 keeps the state after an epoch; nobody goes on before it is kept."""
        self._ranks.run_on_rank_zero(lambda: self._session.save(state, best=best))

    def mid_epoch_action(self, left: Callable[[], float]) -> MidEpochAction:
        """The same on all ranks, at the same step: asked at steps that are some time apart, not at each."""
        self._steps -= 1
        if self._steps > 0:
            return MidEpochAction.NONE
        stop = any(self._ranks.all_gather_object(self._ranks.should_stop()))
        due, self._apart = self._ranks.run_on_rank_zero(lambda: self._ask(left, should_stop=stop))
        self._steps = self._apart
        return due

    def _ask(self, left: Callable[[], float], *, should_stop: bool) -> tuple[MidEpochAction, int]:
        """What is due, and after how many steps the ranks agree again."""
        if should_stop:
            self._ranks.on_stop_request()
        now = time.monotonic()
        pace = max((now - self._asked) / self._apart, 1e-6)
        self._asked = now
        return self._session.mid_epoch_action(left), max(1, min(int(_ASKED / pace), 2 * self._apart))

    def save_mid_epoch(self, state: dict[str, Any]) -> None:
        """Rank 0 keeps the state in the midst of an epoch."""
        self._ranks.run_on_rank_zero(lambda: self._session.save_mid_epoch(state))

    def report(self, record: EpochRecord) -> Verdict:
        """Rank 0 reports; all ranks leave in the same epoch."""
        return self._ranks.run_on_rank_zero(lambda: self._session.report(record))

    def log(self, path: Path) -> None:
        """Rank 0 takes a file that the run made; the others make none."""
        if self._ranks.is_rank_zero:
            self._session.log(path)


def wrap_session(session: Session | None, ranks: Ranks) -> Session | None:
    """The session of a run on ranks; None where rank 0 has none."""
    return RankedSession(session, ranks) if ranks.broadcast_object(session is not None) else None
