"""Results of a training run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.evaluation.step import ForwardCall
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.serving_module import Example, make_exportable
from hpsearch.objectives.training.session import Curve, Verdict

Status = Literal["completed", "pruned", "stopped"]


def derive_status(verdict: Verdict, *, finished: bool) -> Status:
    """Return the status of a run.

    Args:
        verdict: last verdict of the session.
        finished: whether the training is complete.
    """
    if verdict == Verdict.PRUNE:
        return "pruned"
    if verdict == Verdict.PAUSE:  # also after the last epoch; the caller decides whether the trial is complete
        return "stopped"
    return "completed" if finished else "stopped"


class ExportableModel(NamedTuple):
    """A model for export.

    Attributes:
        module: module in evaluation mode on the CPU, with positional tensor inputs.
        inputs: names and tensors of a batch with at least two samples; the name of a single tensor is empty.
        dynamic_dims: for each input, the dimensions with dynamic size, as in `dynamic_shapes` of `torch.export`.
        source: the objective's method that returned the module, such as "Points.export"; empty for the trained model.
    """

    module: nn.Module
    inputs: list[tuple[str, Tensor]]
    dynamic_dims: Sequence[frozenset[int]]
    source: str = ""


@dataclass(frozen=True)
class ResplitScore:
    """The score of a run on a new split of the data.

    Attributes:
        value: metric of the best epoch without its optimism.
        optimism: part of the best epoch's metric that is due to the choice of the epoch, negative for a metric to
            minimize; None if unknown, because the validation samples cannot be halved.
        error: standard error of `value` from the validation samples; None if unknown.
        epochs: epochs (0-based) that the halves of the validation samples selected; empty if `optimism` is None.
        has_new_split: whether the run has a new train/validation split; False if only its seed is new.
        sizes: numbers of training, validation and test samples.
    """

    value: float
    optimism: float | None
    error: float | None
    epochs: tuple[int, ...]
    has_new_split: bool
    sizes: tuple[int, int, int]

    def to_record(self) -> dict[str, Any]:
        """Return the score as plain values, for storage."""
        scores = {"value": self.value, "optimism": self.optimism, "error": self.error, "epochs": list(self.epochs)}
        return {**scores, "divided": self.has_new_split, "sizes": list(self.sizes)}

    def describe(self, metric: str) -> str:
        """Describe the score of `metric`, and how it was computed, in one line."""
        if self.optimism is None:
            return f"{metric} {self.value:.6g} at the best epoch"
        best = self.value + self.optimism
        return f"{metric} {self.value:.6g} ({best:.6g} at the best epoch, corrected for its choice)"


@dataclass(kw_only=True)
class RunResult(ABC):
    """The result of a run.

    Attributes:
        status: "completed" (also if the patience is exhausted), "pruned", or "stopped" to be resumed later.
        verdict: the session's last verdict, with its reason.
        curve: the learning curve, including epochs before a resume.
        best_path, last_path: checkpoints in the run's directory; None if they do not exist.
        resume_note: reasons why a resume was not exact (another machine or version of torch), and options that did not
            work; None if there are none.
        resplit_score: score on a new train/validation split; None for a run on the study's split.
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
        """Best epoch (0-based) by the validation metric; -1 if the run stopped in its first epoch."""
        return int(self.curve.best.get("epoch", -1))

    @property
    def best_value(self) -> float:
        """The objective's metric at the best epoch; NaN if the run stopped in its first epoch."""
        return float(self.curve.best.get("value", math.nan))

    @property
    def best_metrics(self) -> dict[str, float]:
        """All metrics of the best epoch."""
        return dict(self.curve.best.get("metrics", {}))

    @property
    def history(self) -> list[EpochRecord]:
        """One record per epoch, including epochs before a resume."""
        return self.curve.history

    @property
    def has_model(self) -> bool:
        """Whether the result has a model to export."""
        return True

    @property
    def data_digest(self) -> tuple[str, int] | None:
        """SHA-256 of the split data, and the number of validation samples; None if unknown."""
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
        model: model with the weights of the best epoch, in evaluation mode, on the CPU. On ranks other than rank 0 it
            may have no weights.
        example: four raw validation inputs on the CPU, for the export of the model.
        call: function that calls the model with a batch of inputs.
        export: function that returns the module to export; None to export the model itself.
        split_hash: SHA-256 of the split data.
        val: the validation split, on the CPU, on which `best_value` was measured.
        memory: peak bytes of the device's memory; None on a CPU.
        train_scores: loss and metrics of the best weights on the training split, in evaluation mode, for the report;
            None without a run directory.
    """

    model: nn.Module
    example: Example
    call: ForwardCall
    split_hash: str
    val: Dataset
    export: Callable[[nn.Module], ExportableModel] | None = None
    memory: int | None = None
    train_scores: dict[str, float] | None = None

    @property
    def data_digest(self) -> tuple[str, int] | None:
        """SHA-256 of the split data, and the number of validation samples."""
        return self.split_hash, len(self.val)

    def exportable_model(self) -> ExportableModel:
        """Return the model of the best epoch for export.

        Raises:
            ObjectiveError: the inputs of the model are not tensors, or `Objective.export` raised an error.
        """
        if self.export is not None:
            return self.export(self.model)
        return ExportableModel(*make_exportable(self.model, self.call, self.example.x), self.example.dynamic_dims)
