"""Instruments of a run: the profiler, and event files for TensorBoard."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.private_folders import open_temporary_folder
from hpsearch.objectives.training.loop.run import Run
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord

TRACE_FILE = "trace.json.gz"
EVENTS_FOLDER = "tensorboard"


@dataclass(frozen=True)
class Instruments:
    """Profiler and TensorBoard settings of a run. Both need a run directory, and neither changes the run's results.

    Attributes:
        profile_steps: number of optimizer steps to profile, early in the first epoch. The trace, for Perfetto or
            chrome://tracing, is `trace.json.gz`.
        tensorboard: whether to write event files into the folder `tensorboard`.
    """

    profile_steps: int = 0
    tensorboard: bool = False

    def check(self, run_dir: Path | None) -> None:
        """Check before training that the settings are valid and that TensorBoard is installed if it is needed.

        Raises:
            ObjectiveError: a setting is invalid, there is no run directory, or TensorBoard is not installed.
        """
        if (self.profile_steps or self.tensorboard) and run_dir is None:
            raise ObjectiveError("profile_steps and tensorboard need a directory; set run_dir")
        if self.profile_steps < 0:
            raise ObjectiveError(f"profile_steps must be at least 0, not {self.profile_steps}")
        if self.tensorboard:
            try:
                import torch.utils.tensorboard  # noqa: F401 only whether it can be imported
            except ImportError as error:
                raise ObjectiveError("tensorboard=True needs TensorBoard; run pip install tensorboard") from error

    @contextmanager
    def profiler(self, run: Run, folder: Path | None) -> Iterator[None]:
        """Profile some steps of the first epoch, after two steps that warm up caches and kernels."""
        if not self.profile_steps or folder is None or run.curve.next_epoch:
            yield
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if run.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=self.profile_steps, repeat=1),
            on_trace_ready=partial(_export_trace, path=folder / TRACE_FILE),
            profile_memory=True,
        ) as profile:
            before, run.on_step = run.on_step, profile.step
            try:
                yield
            finally:
                run.on_step = before

    def record(self, record: EpochRecord, folder: Path | None) -> None:
        """Add an epoch to the event files; the points of an epoch that a resume repeats replace its earlier points."""
        if not self.tensorboard or folder is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(folder / EVENTS_FOLDER)) as writer:
            for name, value in record.metrics.items():
                tag = "/".join(reversed(name.split("_", 1))) if name.startswith(("train_", "val_")) else name
                writer.add_scalar(tag, value, record.epoch, walltime=record.timestamp)


def _export_trace(profile: torch.profiler.profile, path: Path) -> None:
    """Write the trace as a compressed file. Torch would compress it in the temporary folder, and follow links there."""
    with (
        open_temporary_folder() as folder,
        gzip.open(path, "wb") as compressed,
    ):
        plain = folder / "trace.json"
        profile.export_chrome_trace(str(plain))
        with plain.open("rb") as file:
            shutil.copyfileobj(file, compressed)


NO_INSTRUMENTS = Instruments()
