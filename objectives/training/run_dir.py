"""The directory of a run: its configuration, its log, its numbers and its plots."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from objectives.training.plots import curves
from objectives.training.session import EpochRecord, MetricsFile


class RunDir:
    """Writes a run's files; with no path, none.

    The files are `config.yaml`, `metrics.jsonl`, `train.log` and `curves.png`; checkpoints are the session's.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.log = logging.Logger("objectives.training.run", logging.INFO)  # unregistered: one for each run
        self.log.parent = logging.getLogger("objectives.training")
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)

    def existing(self, name: str) -> Path | None:
        """The path of a file of the run, if it is there."""
        path = self.path / name if self.path else None
        return path if path and path.exists() else None

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Keeps the log in `train.log` for the time of the run."""
        if self.path is None:
            yield
            return
        handler = logging.FileHandler(self.path / "train.log", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.log.addHandler(handler)
        try:
            yield
        finally:
            self.log.removeHandler(handler)
            handler.close()

    def start(self, resolved: dict[str, Any], *, resumed: bool) -> None:
        """Writes `config.yaml`; a run that starts anew clears the numbers of one before it."""
        if self.path is None:
            return
        target = self.path / "config.yaml"
        if not resumed:
            MetricsFile(self.path / "metrics.jsonl").clear()
        if not resumed or not target.exists():
            _replace(target, _yaml(resolved))

    def record(self, record: EpochRecord) -> None:
        """Appends an epoch to `metrics.jsonl`."""
        if self.path is not None:
            MetricsFile(self.path / "metrics.jsonl").append(record)

    def finish(self, history: list[EpochRecord], metric: str, best_epoch: int) -> list[Path]:
        """Draws the curves; returns the files that are worth keeping as artifacts."""
        if self.path is None:
            return []
        curves(history, self.path / "curves.png", metric=metric, best_epoch=best_epoch)
        names = ("config.yaml", "metrics.jsonl", "train.log", "curves.png")
        return [self.path / name for name in names if (self.path / name).exists()]


def _yaml(values: dict[str, Any]) -> str:
    try:
        import yaml
    except ModuleNotFoundError:
        return json.dumps(values, indent=2) + "\n"  # JSON is YAML
    return str(yaml.safe_dump(values, sort_keys=False))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
