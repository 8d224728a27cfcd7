"""Metrics of a run as JSON lines, which stay valid after a crash."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class EpochRecord:
    """The metrics of an epoch.

    Attributes:
        epoch: epoch (0-based).
        timestamp: end of the epoch in Unix seconds. Checkpoints contain the timestamp, so that a resumed run reports
            the same value.
        metrics: `train_loss`, `val_loss`, `train_<metric>` and `val_<metric>` for each metric, `lr`, `grad_norm`
            (mean over the steps, before clipping), `epoch_seconds`, `samples_per_second`, and the model metrics by
            their names, see `hpsearch.objectives.model_metric_names`.
    """

    epoch: int
    timestamp: float
    metrics: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values, with None for NaN and infinity."""
        plain = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        return {"epoch": self.epoch, "timestamp": self.timestamp, **plain}


class MetricsFile:
    """File with one line per epoch, a JSON object. Appending an epoch again has no effect.

    The file is read only once, because no other process writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._epochs: set[int] | None = None  # in the file; None before it is read

    def append(self, record: EpochRecord) -> None:
        """Append an epoch unless it is in the file; remove lines that a crash or a full disk truncated."""
        epochs = self._repair() if self._epochs is None else self._epochs
        if record.epoch not in epochs:
            self._epochs = None  # unknown if the write fails
            with self.path.open("a") as file:
                file.write(json.dumps(record.to_dict(), allow_nan=False) + "\n")
        self._epochs = epochs | {record.epoch}

    def _repair(self) -> set[int]:
        """Remove truncated lines, and return the epochs of the remaining lines."""
        text = _read_text(self.path)
        records = _parse_records(text, "epoch")
        if len(records) < text.count("\n") or (text and not text.endswith("\n")):
            self.path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        return {int(record["epoch"]) for record in records}

    def clear(self) -> None:
        """Remove the file of an earlier run."""
        self.path.unlink(missing_ok=True)
        self._epochs = None


class StepsFile:
    """A file with one JSON object per line, in the order of optimizer steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """Return all valid records."""
        return _parse_records(_read_text(self.path), "step")

    def append(self, records: list[dict[str, Any]]) -> None:
        """Append records."""
        with self.path.open("a") as file:
            file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in records)

    def rewind(self, step: int) -> None:
        """Remove the records from `step` on, which the run repeats, and truncated lines."""
        if self.path.exists():
            kept = [record for record in self.read() if _is_before(record, step)]
            self.path.write_text("".join(json.dumps(record) + "\n" for record in kept))


def _read_text(path: Path) -> str:
    """Return the text of a file; empty without a file. Damaged bytes become U+FFFD."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _is_before(record: dict[str, Any], step: int) -> bool:
    """Return whether a record is from before `step` (0-based); validations store the number of steps before them."""
    return int(record["step"]) < step or ("val_loss" in record and int(record["step"]) == step > 0)


def _parse_records(text: str, key: str) -> list[dict[str, Any]]:
    """Return the valid records that contain `key`; lines that a crash truncated or damaged are skipped."""
    found = []
    for line in (line for line in text.splitlines() if line.isascii()):
        with suppress(ValueError):
            found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict) and key in record]
