"""Results of a training run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.evaluation.step import Call
from hpsearch.objectives.training.exportable import Example, exportable
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.session import Curve, Verdict

Status = Literal["completed", "pruned", "stopped"]


def derive_status(verdict: Verdict, *, finished: bool) -> Status:
    """Return the status of a run that ended with a verdict; `finished` is whether nothing was left to train."""
    if verdict == Verdict.PRUNE:
        return "pruned"
    if verdict == Verdict.PAUSE:  # also after the last epoch: the caller decides whether it counts
        return "stopped"
    return "completed" if finished else "stopped"


class ExportableModel(NamedTuple):
    """A model for export.

    Attributes:
        module: module in evaluation mode on the CPU, with positional tensor inputs.
        inputs: names and tensors of a batch with at least two samples; the name of a single tensor is empty.
        dynamic_dims: for each input, the dimensions with dynamic size, as in `dynamic_shapes` of `torch.export`.
    """

    module: nn.Module
    inputs: list[tuple[str, Tensor]]
    dynamic_dims: Sequence[frozenset[int]]


@dataclass(frozen=True)
class ResplitScore:
    """The score of a run on a new split of the data.

    Attributes:
        value: of the metric, by cross-fitting where the validation samples could be halved; else of the best epoch.
        error: its standard error by the samples that it was measured on; None where nothing is known of it.
        epochs: 0-based, that the halves chose; none of the best epoch's value.
        divided: whether train and validation were divided anew, and not only seeds.
        sizes: how many samples were trained on, validated on, and are in the test split.
    """

    value: float
    error: float | None
    epochs: tuple[int, ...]
    divided: bool
    sizes: tuple[int, int, int]

    def record(self) -> dict[str, Any]:
        """Return the score as plain values, for storage."""
        return {**asdict(self), "epochs": list(self.epochs), "sizes": list(self.sizes)}

    def describe(self, metric: str) -> str:
        """Return a description of the score."""
        if not self.epochs:
            return f"{metric} {self.value:.6g} of the best epoch"
        chosen = " and ".join(str(epoch + 1) for epoch in self.epochs)
        return f"{metric} {self.value:.6g} of the halves at each other's best epochs, {chosen}"


@dataclass(kw_only=True)
class RunResult(ABC):
    """The result of a run.

    Attributes:
        status: "completed" (also by patience), "pruned", or "stopped" to be resumed later.
        verdict: the session's last answer, with its reason.
        curve: the epochs, those before a resume included.
        best_path, last_path: checkpoints in the run's directory, where there are any.
        resume_note: why resumes of this run were not exact (another machine, another torch), and which options it
            had to do without; None when there is nothing of the kind.
        fresh: the score of a run on a fresh division; None of any other.
    """

    status: Status
    verdict: Verdict = Verdict.CONTINUE
    curve: Curve
    best_path: Path | None
    last_path: Path | None
    resume_note: str | None = None
    resplit_score: ResplitScore | None = None

    @property
    def best_epoch(self) -> int:
        """0-based, by the validation metric; -1 of a run that was stopped in its first epoch."""
        return int(self.curve.best.get("epoch", -1))

    @property
    def best_value(self) -> float:
        """The objective's metric at the best epoch; NaN of a run that was stopped in its first epoch."""
        return float(self.curve.best.get("value", math.nan))

    @property
    def best_metrics(self) -> dict[str, float]:
        """All numbers of the best epoch."""
        return dict(self.curve.best.get("metrics", {}))

    @property
    def history(self) -> list[EpochRecord]:
        """One record per epoch, those before a resume included."""
        return self.curve.history

    @property
    def has_model(self) -> bool:
        """Whether there is anything to export."""
        return True

    @property
    def data_digest(self) -> tuple[str, int] | None:
        """SHA-256 of the data as it was split, and the number of validation samples; None if unknown."""
        return None

    @abstractmethod
    def exportable_model(self) -> ExportableModel:
        """Return the model of the best epoch for export.

        Raises:
            ObjectiveError: the model cannot be exported.
        """


@dataclass(kw_only=True)
class FitResult(RunResult):
    """The result of a run of the training loop.

    Attributes:
        model: with the weights of the best epoch, in evaluation mode, on the CPU; on ranks other than the first it may
            be without them.
        example: four validation inputs, raw, as the model takes them, on the CPU; to export the model with.
        call: how the model is called with them.
        split_hash: SHA-256 of the data as it was split.
        val: the validation split, on the CPU: what `best_value` was measured on.
        train_scores: loss and metrics of the best weights on the training split, in evaluation mode, for the
            report; None without a run directory.
        memory: most bytes of the device's memory that the run held at once; None on a CPU.
        fresh: the score of a run on a fresh division; None of any other.
    """

    model: nn.Module
    example: Example
    call: Call
    split_hash: str
    val: Dataset
    memory: int | None = None
    train_scores: dict[str, float] | None = None

    @property
    def data_digest(self) -> tuple[str, int] | None:
        """The hash of the data as it was split, and the number of validation samples."""
        return self.split_hash, len(self.val)

    def exportable_model(self) -> ExportableModel:
        """Return the model of the best epoch for export.

        Raises:
            ObjectiveError: its inputs are not tensors.
        """
        return ExportableModel(*exportable(self.model, self.call, self.example.x), self.example.dynamic_dims)
