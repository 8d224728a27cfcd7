"""The directory of a run: configuration, log, metrics and plots."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.reports.plots import plot_curves, plot_gradient_norms
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord, MetricsFile, StepsFile
from hpsearch.tolerant_logger import TolerantLogger

if TYPE_CHECKING:
    from hpsearch.objectives.training.result import RunResult


RUN_FILES = (
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
    """Writer of the files of a run that `RUN_FILES` lists. The session writes the checkpoints.

    Args:
        path: the directory; None writes no files.
        should_log: whether the run logs messages; only rank 0 does.
    """

    def __init__(self, path: Path | None, *, should_log: bool) -> None:
        self.path = path
        level = logging.INFO if should_log else logging.CRITICAL
        self.log = TolerantLogger("hpsearch.objectives.training.loop.run", level)  # not registered, one per run
        self.log.parent = logging.getLogger("hpsearch.objectives.training")
        if path is not None:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ObjectiveError(
                    f"run_dir {str(path)!r} cannot be created: {error.strerror}; choose another"
                ) from error
            self._metrics = MetricsFile(path / "metrics.jsonl")

    def find(self, name: str) -> Path | None:
        """Return the path of a file of the run; None if it does not exist."""
        path = self.path / name if self.path else None
        return path if path and path.exists() else None

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Return a context in which log messages of the run are written to `train.log`."""
        if self.path is None:
            yield
            return
        self._reject_links(self.path)
        handler = logging.FileHandler(self.path / "train.log", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.log.addHandler(handler)
        try:
            yield
        finally:
            self.log.removeHandler(handler)
            with self._tolerate_full_disk("train.log"):
                handler.close()

    @staticmethod
    def _reject_links(folder: Path) -> None:
        """Raise an error if the folder contains links, through which the run would change other files."""
        if links := sorted(path.name for path in folder.iterdir() if path.is_symlink()):
            raise ObjectiveError(f"the run folder {folder} contains the link {links[0]!r}; remove it")

    def start(self, resolved: dict[str, Any], changes: str, *, resumed_at: int | None) -> None:
        """Write `config.yaml` and `changes.diff`, and remove outdated metrics.

        Args:
            resolved: content of `config.yaml`.
            changes: content of `changes.diff`; no file if empty.
            resumed_at: step at which the run resumes; records from this step on are removed. None for a new run: all
                metrics of an earlier run are removed.
        """
        if self.path is None:
            return
        target = self.path / "config.yaml"
        with self._tolerate_full_disk("config.yaml"):
            if resumed_at is None:
                self._metrics.clear()
            StepsFile(self.path / "steps.jsonl").rewind(resumed_at or 0)
            if resumed_at is None or not target.exists():
                _replace(target, _to_yaml(resolved))
                (self.path / "changes.diff").unlink(missing_ok=True)
                if changes:
                    _replace(self.path / "changes.diff", changes)

    def record(self, record: EpochRecord) -> None:
        """Append an epoch to `metrics.jsonl` unless it is already there."""
        if self.path is not None:
            with self._tolerate_full_disk("metrics.jsonl"):
                self._metrics.append(record)

    def record_steps(self, records: list[dict[str, Any]]) -> None:
        """Append records of steps to `steps.jsonl`."""
        if self.path is not None and records:
            with self._tolerate_full_disk("steps.jsonl"):
                StepsFile(self.path / "steps.jsonl").append(records)

    @contextmanager
    def _tolerate_full_disk(self, name: str) -> Iterator[None]:
        """Log write errors, such as a full disk, instead of raising them: the metrics are also in the checkpoint."""
        try:
            yield
        except OSError as error:
            self.log.warning("%s cannot be written: %s; the run continues", name, error.strerror)

    @contextmanager
    def _tolerate_any_error(self, name: str) -> Iterator[None]:
        """Log errors instead of raising them, because a missing report must not fail a run that has trained."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            self.log.warning("no %s: %s: %s", name, type(error).__name__, error, exc_info=True)

    def finish(
        self, result: RunResult, names: Sequence[str], write: Callable[[Path, list[dict[str, Any]]], None]
    ) -> list[Path]:
        """Plot the metrics `names` over the epochs, write the report, and return the files to keep as artifacts.

        `write` receives the report's path and the step records. A pruned run gets no plots, because drawing them may
        take as long as its training.
        """
        if self.path is None:
            return []
        with self._tolerate_full_disk("the report"):
            steps = StepsFile(self.path / "steps.jsonl").read()
            for plot in ("curves.png", "gradients.png"):  # the plots may be of an earlier attempt
                (self.path / plot).unlink(missing_ok=True)
            if result.status != "pruned":
                with self._tolerate_any_error("plots"):
                    self._draw(result, names, steps)
            with self._tolerate_any_error("report"):
                write(self.path / "report.md", steps)
        return [self.path / name for name in RUN_FILES if (self.path / name).exists()]

    def _draw(self, result: RunResult, names: Sequence[str], steps: list[dict[str, Any]]) -> None:
        assert self.path is not None
        try:
            plot_curves(result.history, self.path / "curves.png", names, best_epoch=result.best_epoch)
            plot_gradient_norms(steps, self.path / "gradients.png")
        except ModuleNotFoundError as error:  # a missing plot must not fail a finished run
            self.log.warning("no plots: %s is not installed", error.name)


def _to_yaml(values: dict[str, Any]) -> str:
    text = json.dumps(values, indent=2)
    try:
        import yaml
    except ModuleNotFoundError:
        return text + "\n"  # JSON is YAML
    # `json.loads` copies objects that occur twice, for which YAML would have aliases; readers of a run reject aliases.
    return str(yaml.safe_dump(json.loads(text), sort_keys=False))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
