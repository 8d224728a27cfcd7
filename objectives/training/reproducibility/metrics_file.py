"""The numbers of a run as lines of JSON, appended as they come and whole after any crash."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class EpochRecord:
    """The numbers of one epoch.

    Attributes:
        epoch: 0-based.
        timestamp: unix seconds when the epoch ended; kept in the checkpoint, so a replay repeats it.
        metrics: `train_loss`, `val_loss`, `train_<metric>` and `val_<metric>` for each metric, `lr`, `grad_norm`
            (mean over the steps, before clipping), `epoch_seconds`, `samples_per_second`; and under their own names
            what is measured of the model: see `hpsearch.objectives.model_metrics`.
    """

    epoch: int
    timestamp: float
    metrics: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON values; NaN and infinities as None."""
        plain = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        return {"epoch": self.epoch, "timestamp": self.timestamp, **plain}


class MetricsFile:
    """One JSON object a line, one line an epoch. Appending an epoch again changes nothing.

    The file is read once: nobody else writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._epochs: set[int] | None = None  # in the file; None while nobody has looked

    def append(self, record: EpochRecord) -> None:
        """Adds an epoch that is not in the file yet; a line torn by a crash or a full disk is dropped first."""
        epochs = self._repair() if self._epochs is None else self._epochs
        if record.epoch not in epochs:
            self._epochs = None  # until the line is whole
            with self.path.open("a") as file:
                file.write(json.dumps(record.to_dict(), allow_nan=False) + "\n")
        self._epochs = epochs | {record.epoch}

    def _repair(self) -> set[int]:
        """Drops what is torn, and returns the epochs that are whole."""
        text = self.path.read_text() if self.path.exists() else ""
        records = _parse_records(text, "epoch")
        if len(records) < text.count("\n") or (text and not text.endswith("\n")):
            self.path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        return {int(record["epoch"]) for record in records}

    def clear(self) -> None:
        """Forgets what another run left."""
        self.path.unlink(missing_ok=True)
        self._epochs = None


class StepsFile:
    """One JSON object a line, in the order of optimizer steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """All whole records."""
        return _parse_records(self.path.read_text(), "step") if self.path.exists() else []

    def append(self, records: list[dict[str, Any]]) -> None:
        """Adds records."""
        with self.path.open("a") as file:
            file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in records)

    def rewind(self, step: int) -> None:
        """Forgets the steps from `step` on: they are about to be taken again. And a line torn by a crash."""
        if self.path.exists():
            kept = [record for record in self.read() if _before(record, step)]
            self.path.write_text("".join(json.dumps(record) + "\n" for record in kept))


def _before(record: dict[str, Any], step: int) -> bool:
    """A validation within an epoch comes after the step that it is counted by."""
    return int(record["step"]) < step or ("val_loss" in record and int(record["step"]) == step > 0)


def _parse_records(text: str, key: str) -> list[dict[str, Any]]:
    """Return the records of lines of JSON that have a key; a crash tears lines."""
    found = []
    for line in text.splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict) and key in record]
