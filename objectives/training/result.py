"""What a run came to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from objectives.training.data.dataset import Dataset
from objectives.training.evaluation.calling import Call
from objectives.training.exportable import Example
from objectives.training.reproducibility.metrics_file import EpochRecord

Status = Literal["completed", "pruned", "stopped"]


@dataclass
class FitResult:
    """What a run came to.

    Attributes:
        status: "completed" (also by patience), "pruned", or "stopped" to be resumed later.
        best_epoch: 0-based, by the validation metric.
        best_value: the objective's metric at the best epoch.
        best_metrics: all numbers of the best epoch.
        history: one record an epoch, those before a resume included.
        model: with the weights of the best epoch, in evaluation mode, on the CPU.
        example: four validation inputs, raw, as the model takes them, on the CPU; to export the model with.
        call: how the model is called with them.
        best_path, last_path: checkpoints in the run's directory, where there are any.
        split_hash: SHA-256 of the data as it was split.
        val: the validation split, on the CPU: what `best_value` was measured on.
        resume_note: why resumes of this run were not exact (another machine, another torch), and which options it
            had to do without; None when there is nothing of the kind.
        train_scores: loss and metrics of the best weights on the training split, judged as the validation split is;
            for the report, and None without a run directory.
        memory: most bytes of the device's memory that the run held at once; None on a CPU.
    """

    status: Status
    best_epoch: int
    best_value: float
    best_metrics: dict[str, float]
    history: list[EpochRecord]
    model: nn.Module
    example: Example
    call: Call
    best_path: Path | None
    last_path: Path | None
    split_hash: str
    val: Dataset
    resume_note: str | None = None
    memory: int | None = None
    train_scores: dict[str, float] | None = None
