"""What may watch a run: the profiler, and event files for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.loop.run import Run
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord

TRACE = "trace.json.gz"
EVENTS = "tensorboard"


@dataclass(frozen=True)
class Instruments:
    """What watches a run and changes none of its numbers. All of it needs a run directory.

    Attributes:
        profile_steps: optimizer steps to profile, early in the first epoch; the trace, for Perfetto or
            chrome://tracing, is `trace.json.gz`.
        tensorboard: write event files into the folder `tensorboard`.
    """

    profile_steps: int = 0
    tensorboard: bool = False

    def check(self, run_dir: Path | None) -> None:
        """Refuses what cannot work, before training.

        Raises:
            ObjectiveError: there is no directory to write to, or TensorBoard is not installed.
        """
        if (self.profile_steps or self.tensorboard) and run_dir is None:
            raise ObjectiveError("profile_steps and tensorboard need a run_dir to write to")
        if self.profile_steps < 0:
            raise ObjectiveError(f"profile_steps must be at least 0, not {self.profile_steps}")
        if self.tensorboard:
            try:
                import torch.utils.tensorboard  # noqa: F401 only whether it is there
            except ImportError as error:
                raise ObjectiveError("tensorboard=True needs TensorBoard: pip install tensorboard") from error

    @contextmanager
    def profiler(self, run: Run, folder: Path | None) -> Iterator[None]:
        """Profiles some steps of the first epoch, after two in which caches and kernels are warmed."""
        if not self.profile_steps or folder is None or run.curve.next_epoch:
            yield
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if run.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=self.profile_steps, repeat=1),
            on_trace_ready=lambda profile: profile.export_chrome_trace(str(folder / TRACE)),
            profile_memory=True,
        ) as profile:
            before, run.on_step = run.on_step, profile.step
            try:
                yield
            finally:
                run.on_step = before

    def record(self, record: EpochRecord, folder: Path | None) -> None:
        """Adds an epoch to the event files; one that is added again after a restart lies over the first."""
        if not self.tensorboard or folder is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(folder / EVENTS)) as writer:
            for name, value in record.metrics.items():
                tag = "/".join(reversed(name.split("_", 1))) if name.startswith(("train_", "val_")) else name
                writer.add_scalar(tag, value, record.epoch, walltime=record.timestamp)


NO_INSTRUMENTS = Instruments()
