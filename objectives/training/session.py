"""The one thing that the training loop talks to: where a run is kept, and who says when it ends."""

from __future__ import annotations

import enum
import json
import logging
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from objectives.training import checkpoint

log = logging.getLogger("objectives.training")


@dataclass(frozen=True)
class EpochRecord:
    """The numbers of one epoch.

    Attributes:
        epoch: 0-based.
        timestamp: unix seconds when the epoch ended; kept in the checkpoint, so a replay repeats it.
        metrics: `train_loss`, `val_loss`, `train_<metric>` and `val_<metric>` for each metric, `lr`, `grad_norm`
            (mean over the steps, before clipping), `epoch_seconds`, `samples_per_second`.
    """

    epoch: int
    timestamp: float
    metrics: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON values; NaN and infinities as None."""
        plain = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        return {"epoch": self.epoch, "timestamp": self.timestamp, **plain}


class Verdict(enum.Enum):
    """The answer to a report."""

    CONTINUE = "continue"
    PRUNE = "prune"
    STOP = "stop"  # preempted or drained: the run goes on later, from its checkpoint


class Session(Protocol):
    """What a run may ask of the trial that it belongs to."""

    def restore(self) -> dict[str, Any] | None:
        """The last checkpoint's state, or None when the run starts."""
        ...

    def save(self, state: dict[str, Any], *, best: bool) -> None:
        """Keeps the state after an epoch, before it is reported.

        The tensors are the run's own: write or copy them before returning. `best`: the epoch is the best so far,
        and `promotable(state)` is what a promotion needs of it.
        """
        ...

    def report(self, record: EpochRecord) -> Verdict:
        """Takes an epoch's numbers and says whether to go on. Idempotent by epoch.

        A restored run reports its whole history again, so that a death between save and report loses nothing; a
        session that has an epoch already answers CONTINUE.
        """
        ...

    def log(self, path: Path) -> None:
        """Takes a file that the run made: configuration, metrics, log, plots."""
        ...


def promotable(state: dict[str, Any]) -> dict[str, Any]:
    """What `best.pt` holds of a full state: the best weights and what they scored, without the optimizer."""
    kept = ("format", "objective", "config", "seed", "split_seed", "split_hash")
    return {**{key: state[key] for key in kept}, **state["best"]}


class LocalSession:
    """Keeps a run in a directory: `last.pt` and the one before it, `best.pt`, `metrics.jsonl`. Never stops a run."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = Path(run_dir)
        self.last_path = self.run_dir / "last.pt"
        self.previous_path = self.run_dir / "previous.pt"
        self.best_path = self.run_dir / "best.pt"
        self._metrics = MetricsFile(self.run_dir / "metrics.jsonl")

    def restore(self) -> dict[str, Any] | None:
        """The newest state that can be trusted; a torn or changed file is passed over with a warning."""
        checkpoint.remove_leftovers(self.run_dir)
        for path in (self.last_path, self.previous_path):
            try:
                return checkpoint.read(path)
            except FileNotFoundError:
                continue
            except checkpoint.CheckpointError as error:
                log.warning("%s; trying the checkpoint before it", error)
        return None

    def save(self, state: dict[str, Any], *, best: bool) -> None:
        """Writes `best.pt` when the epoch is the best, then `last.pt`, keeping the one before."""
        if best:
            checkpoint.write(self.best_path, promotable(state))
        if self.last_path.exists():
            self.last_path.replace(self.previous_path)
        checkpoint.write(self.last_path, state)

    def report(self, record: EpochRecord) -> Verdict:
        """Appends the epoch to `metrics.jsonl`, once."""
        self._metrics.append(record)
        return Verdict.CONTINUE

    def log(self, path: Path) -> None:
        """Copies the file into the directory, unless it is there."""
        if path.resolve().parent != self.run_dir.resolve():
            self.run_dir.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, self.run_dir / path.name)


class MetricsFile:
    """One JSON object a line, one line an epoch. Appending an epoch again changes nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: EpochRecord) -> None:
        """Adds an epoch that is not in the file yet; a line torn by a crash is dropped first."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = self.path.read_text() if self.path.exists() else ""
        lines = text.splitlines()
        whole = [line for line in lines if _epoch(line) is not None]
        if any(_epoch(line) == record.epoch for line in whole):
            return
        if len(whole) < len(lines) or (text and not text.endswith("\n")):
            self.path.write_text("".join(f"{line}\n" for line in whole))
        with self.path.open("a") as file:
            file.write(json.dumps(record.to_dict(), allow_nan=False) + "\n")

    def clear(self) -> None:
        """Forgets what another run left."""
        self.path.unlink(missing_ok=True)


def _epoch(line: str) -> int | None:
    try:
        return int(json.loads(line)["epoch"])
    except (ValueError, KeyError, TypeError):
        return None
