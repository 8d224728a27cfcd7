"""The directory of a run: its configuration, its log, its numbers and its plots."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpsearch.objectives.training.reports.plots import plot_curves, plot_gradient_norms
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord, MetricsFile, StepsFile

if TYPE_CHECKING:
    from hpsearch.objectives.training.result import RunResult


FILES = (
    "report.md",
    "config.yaml",
    "changes.diff",
    "metrics.jsonl",
    "steps.jsonl",
    "train.log",
    "curves.png",
    "gradients.png",
    "smoke.json",
    "smoke.png",
    "trace.json.gz",
)


class RunDir:
    """Writes the files of a run that are in `FILES`; without a path, none. The session writes checkpoints.

    `should_log` says whether the run logs messages: only one of several ranks does.
    """

    def __init__(self, path: Path | None, *, should_log: bool) -> None:
        self.path = path
        level = logging.INFO if should_log else logging.CRITICAL
        self.log = logging.Logger("hpsearch.objectives.training.loop.run", level)  # unregistered: one for each run
        self.log.parent = logging.getLogger("hpsearch.objectives.training")
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
            self._metrics = MetricsFile(path / "metrics.jsonl")

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

    def start(self, resolved: dict[str, Any], changes: str, *, resumed_at: int | None) -> None:
        """Writes `config.yaml` and `changes.diff`.

        A run that starts anew clears the numbers of one before it; one resumed at a step forgets the steps from there.
        """
        if self.path is None:
            return
        target = self.path / "config.yaml"
        if resumed_at is None:
            self._metrics.clear()
        StepsFile(self.path / "steps.jsonl").rewind(resumed_at or 0)
        if resumed_at is None or not target.exists():
            _replace(target, _yaml(resolved))
            (self.path / "changes.diff").unlink(missing_ok=True)
            if changes:
                _replace(self.path / "changes.diff", changes)

    def record(self, record: EpochRecord) -> None:
        """Appends an epoch to `metrics.jsonl`, once."""
        if self.path is not None:
            with self._tolerate_full_disk("metrics.jsonl"):
                self._metrics.append(record)

    def record_steps(self, records: list[dict[str, Any]]) -> None:
        """Appends records of steps to `steps.jsonl`."""
        if self.path is not None and records:
            with self._tolerate_full_disk("steps.jsonl"):
                StepsFile(self.path / "steps.jsonl").append(records)

    @contextmanager
    def _tolerate_full_disk(self, name: str) -> Iterator[None]:
        """Lets a run go on without its records where the disk is full: they are in the checkpoint, and reported."""
        try:
            yield
        except OSError as error:
            self.log.warning("%s cannot be written: %s; the run goes on", name, error.strerror)

    def finish(
        self, result: RunResult, names: Sequence[str], write: Callable[[Path, list[dict[str, Any]]], None]
    ) -> list[Path]:
        """Draw `names` over the epochs, write the report, and return the files to keep as artifacts.

        `write` gets the report's path and the records of steps. A pruned run gets no plots, because drawing takes as
        long as the training of some of them.
        """
        if self.path is None:
            return []
        with self._tolerate_full_disk("the report"):
            steps = StepsFile(self.path / "steps.jsonl").read()
            for plot in ("curves.png", "gradients.png"):  # of the run as it was before a resume
                (self.path / plot).unlink(missing_ok=True)
            if result.status != "pruned":
                self._draw(result, names, steps)
            write(self.path / "report.md", steps)
        return [self.path / name for name in FILES if (self.path / name).exists()]

    def _draw(self, result: RunResult, names: Sequence[str], steps: list[dict[str, Any]]) -> None:
        assert self.path is not None
        try:
            plot_curves(result.history, self.path / "curves.png", names, best_epoch=result.best_epoch)
            plot_gradient_norms(steps, self.path / "gradients.png")
        except ModuleNotFoundError as error:  # the run is done: what it came to must not hang on a plot
            self.log.warning("no plots: %s is not installed", error.name)


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
