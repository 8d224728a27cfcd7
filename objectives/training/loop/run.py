"""The state of a run and its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpsearch.objectives.training.config import RunPlan, TrainConfig
from hpsearch.objectives.training.data.batches import BatchSource
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.evaluation.evaluate import (
    HalvesEvaluator,
    PartEvaluator,
    evaluate,
    get_eval_batch_size,
)
from hpsearch.objectives.training.evaluation.metrics import Metrics
from hpsearch.objectives.training.evaluation.step import StepFunction
from hpsearch.objectives.training.loop.cross_fit import CrossFit
from hpsearch.objectives.training.loop.guards import FiniteGuard
from hpsearch.objectives.training.loop.measure_model import ModelMeasurer
from hpsearch.objectives.training.loop.resplit_evaluation import ResplitEvaluation
from hpsearch.objectives.training.loop.steplog import StepLog
from hpsearch.objectives.training.optimizers.averaging import WeightAveraging
from hpsearch.objectives.training.optimizers.optimizer import SAM, Precision
from hpsearch.objectives.training.optimizers.schedules import Schedule
from hpsearch.objectives.training.ranks import SINGLE_PROCESS, Ranks
from hpsearch.objectives.training.reproducibility.seeds import get_rng_state
from hpsearch.objectives.training.session import Curve
from hpsearch.objectives.training.strategies.base import Strategy

CHECKPOINT_FORMAT = 2  # format of a checkpoint after an epoch
# Entries of an optimizer's groups that are no settings; pytorch-optimizer counts steps in `step` and `counter`.
_PROGRESS = frozenset({"params", "step", "counter"})
MID_EPOCH_FORMAT = 3  # releases without mid-epoch checkpoints reject this format as another run


@dataclass
class Run:
    """The parts of a run, on its device.

    Attributes:
        identity: objective, configuration, epochs, seeds and data hash, as plain values.
        environment: versions and hardware, as plain values.
        git_diff: the git diff of the objective's source.
        splits: the objective's data, on the CPU.
        val: the validation split, on the device unless loader processes load it.
        resplit_evaluation: the evaluation of a run on a new split; None for a run on the study's split.
        batch_source: the training batches.
        step_function: function that computes loss and outputs of a batch, with the objective's loss or its `step`.
        evaluate_part: function that calls `Objective.evaluate`; None if it is not overridden.
        ranks: the processes that train the run together.
        strategy: distributes the model over the ranks.
        measurer: measures the model metrics.
        optimizer: the optimizer that updates the weights; with SAM, the base optimizer of SAM.
        sam: the first pass of SAM; None for other optimizers.
        on_step: callback after each optimizer step, for the profiler.
        step: number of optimizer steps so far, including skipped steps.
        resume_notes: reasons why a resume was not exact, and options that did not work.
        mid_epoch_state: mid-epoch part of the restored checkpoint; None at the start of an epoch.
        can_save_mid_epoch: whether mid-epoch checkpoints are possible; False if the state of the metrics is not
            serializable.
        shards: folder for sharded checkpoints; None if checkpoints are not sharded.
        epoch_end_seconds: duration of validation and checkpoint of the last epoch, in seconds.
    """

    identity: dict[str, Any]
    environment: dict[str, Any]
    git_diff: str
    config: TrainConfig
    plan: RunPlan
    device: torch.device
    splits: Splits
    val: Dataset
    batch_source: BatchSource
    model: nn.Module
    step_function: StepFunction
    evaluate_part: PartEvaluator | None
    metrics: Metrics
    optimizer: Optimizer
    sam: SAM | None
    schedule: Schedule
    precision: Precision
    weight_averaging: WeightAveraging
    finite_guard: FiniteGuard
    steplog: StepLog
    curve: Curve
    ranks: Ranks = SINGLE_PROCESS
    strategy: Strategy = field(kw_only=True)
    measurer: ModelMeasurer = field(kw_only=True)
    resplit_evaluation: ResplitEvaluation | None = None
    on_step: Callable[[], None] = lambda: None
    step: int = 0
    resume_notes: list[str] = field(default_factory=list)
    mid_epoch_state: dict[str, Any] | None = None
    can_save_mid_epoch: bool = True
    shards: Path | None = None
    epoch_end_seconds: float = 0.0

    @property
    def eval_model(self) -> nn.Module:
        """The model that is evaluated and saved: the weight average, or the trained model without averaging."""
        return self.weight_averaging.eval_model

    @property
    def cross_fit(self) -> CrossFit | None:
        """The cross-fitting of the validation halves; None for a run on the study's split."""
        return None if self.resplit_evaluation is None else self.resplit_evaluation.cross_fit

    @property
    def is_finished(self) -> bool:
        """Whether the run has trained its last epoch, or its patience is exhausted."""
        if self.plan.refit is not None:  # patience does not apply: a refit trains on the validation samples
            return self.curve.next_epoch >= self.plan.refit
        patience = self.config.patience
        out_of_patience = patience is not None and self.curve.epochs_since_best >= patience
        return out_of_patience or self.curve.next_epoch >= self.plan.epochs

    def copy_weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights and buffers of `eval_model`."""
        own = self.eval_model.state_dict()
        full = self.strategy.full_state_dict(own)
        return {name: tensor.detach().clone() if tensor is own[name] else tensor for name, tensor in full.items()}

    def validate(self) -> dict[str, float]:
        """Return loss and metrics of `eval_model` on the validation split."""
        return self.evaluate(self.val, evaluate_part=self.evaluate_part)

    def validate_epoch(self) -> dict[str, float]:
        """Validate after an epoch; in a run on a new split, also evaluate the two validation halves."""
        if (cross_fit := self.cross_fit) is None:
            return self.validate()
        cross_fit.reset()
        scores = self.evaluate(self.val, evaluate_part=self.evaluate_part, halves=cross_fit)
        cross_fit.update_selection(self.curve.next_epoch)
        return scores

    def evaluate_rows(self, rows: Tensor) -> float:
        """Return the metric that selects the best epoch, for the validation samples at `rows`."""
        return self.evaluate(self.val.take(rows), evaluate_part=self.evaluate_part)[self.curve.metric]

    def evaluate(
        self,
        split: Dataset,
        metrics: Metrics | None = None,
        evaluate_part: PartEvaluator | None = None,
        halves: HalvesEvaluator | None = None,
    ) -> dict[str, float]:
        """Return loss and metrics of `eval_model` on a split; `metrics` None uses the run's metrics."""
        return evaluate(
            self.eval_model,
            split,
            self.step_function,
            metrics or self.metrics,
            batch_size=get_eval_batch_size(self.config),
            device=self.device,
            num_workers=self.config.num_workers or 0,
            ranks=self.ranks,
            evaluate_part=evaluate_part,
            halves=halves,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint, as plain values and the run's own tensors.

        The checkpoint has no RNG state, because every epoch seeds the random generators from (seed, epoch).
        """
        parts: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.weight_averaging.state_dict(),
        }
        return {
            **self.identity,
            "environment": self.environment,
            "notes": self.resume_notes,
            **self.strategy.checkpoint_state(parts, self.shards),
            "schedule": self.schedule.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "step": self.step,
            "skipped": self.finite_guard.skipped,
            "skipped_in_all": self.finite_guard.skipped_in_all,
            **self.curve.state_dict(),
            **({} if self.cross_fit is None else {"halves": self.cross_fit.state_dict()}),
            **({"measured": measured} if (measured := self.measurer.state_dict()) else {}),
        }

    def mid_epoch_state_dict(self, sums: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint between two steps of an epoch, with the epoch's sums and the RNG state.

        Metric states and RNG states are stored per rank.
        """
        mid_epoch: dict[str, Any] = {"sums": sums, "generators": get_rng_state(self.device)}
        if not self.ranks.is_single_process:
            own = {"running": sums["running"], "generators": mid_epoch["generators"]}
            mid_epoch["ranks"] = self.ranks.all_gather_object(own)
        return {**self.state_dict(), "format": MID_EPOCH_FORMAT, "within": mid_epoch}

    def load_state_dict(self, state: dict[str, Any], *, is_other_config: bool = False) -> None:
        """Restore a checkpoint, except identity and environment.

        Args:
            state: content of the checkpoint.
            is_other_config: whether the checkpoint has another configuration than this run. The settings of the
                optimizer and the schedule, such as learning rates and weight decay, are then those of this run.
        """
        groups = [dict(group) for group in self.optimizer.param_groups]
        parameters = dict(enumerate(p for group in self.optimizer.param_groups for p in group["params"]))
        average = self.weight_averaging.state_dict()
        like = {"model": self.model.state_dict(), "optimizer": parameters, "average": average or {}}
        folder = Path(state["shards"]["folder"]) if "shards" in state else None
        own = self.strategy.load_checkpoint_state({part: state[part] for part in like}, like, folder)
        self.model.load_state_dict(own["model"])
        self.optimizer.load_state_dict(own["optimizer"])
        if is_other_config:
            rates = [group["lr"] / group["initial_lr"] for group in self.optimizer.param_groups]
            for group, fresh in zip(self.optimizer.param_groups, groups, strict=True):
                group.update({key: value for key, value in fresh.items() if key not in _PROGRESS})
            within = state["within"]["sums"]["steps"] if state.get("within") else 0
            steps = len(state["history"]) * self.batch_source.steps + within
            self.schedule.continue_at(steps, state["schedule"], rates)
        else:
            self.schedule.load_state_dict(state["schedule"])
        self.precision.scaler.load_state_dict(state["scaler"])
        if average is not None:
            self.weight_averaging.load_state_dict(own["average"])
        self.step = state["step"]
        self.resume_notes = [*state["notes"], *(note for note in self.resume_notes if note not in state["notes"])]
        self.finite_guard.skipped, self.finite_guard.skipped_in_all = state["skipped"], state["skipped_in_all"]
        self.curve.load_state_dict(state)
        if self.cross_fit is not None:
            self.cross_fit.load_state_dict(state["halves"])
        self.measurer.load_state_dict(state.get("measured", {}))
        self.mid_epoch_state = state.get("within")
