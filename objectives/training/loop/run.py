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
from hpsearch.objectives.training.data.batches import Feed
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.evaluation.evaluate import InParts, evaluate, evaluation_rows
from hpsearch.objectives.training.evaluation.metrics import Metrics
from hpsearch.objectives.training.evaluation.step import Stepping
from hpsearch.objectives.training.loop.fresh import CrossFit, Fresh
from hpsearch.objectives.training.loop.guards import FiniteGuard
from hpsearch.objectives.training.loop.measuring import Measuring
from hpsearch.objectives.training.loop.steplog import StepLog
from hpsearch.objectives.training.optimizers.averaging import Average
from hpsearch.objectives.training.optimizers.optimizer import Precision, Sharpness
from hpsearch.objectives.training.optimizers.schedules import Schedule
from hpsearch.objectives.training.ranks import ALONE, Ranks
from hpsearch.objectives.training.reproducibility.seeds import generators
from hpsearch.objectives.training.session import Curve
from hpsearch.objectives.training.strategies.base import Strategy

FORMAT = 2  # of a checkpoint's state after an epoch
WITHIN = 3  # and in the midst of one: to a release that knows no such state it is of another run


@dataclass
class Run:
    """The parts of a run, on its device.

    Attributes:
        identity: what makes it this run: objective, configuration, epochs, seeds and data; plain values.
        environment: what it runs on; plain values.
        changes: how the objective's source differs from its commit, as git prints it.
        splits: as the objective gave them, on the CPU.
        val: the validation split, on the device unless it is loaded as it is used.
        fresh: what a run on a fresh division has beside others.
        feed: the training batches.
        stepping: what a batch comes to: the loss of the model's outputs, or the objective's own step.
        ranks: the processes that train it together.
        strategy: how they do.
        measuring: what is measured of the model beside its metrics.
        optimizer: the one that takes the steps; with SAM its base.
        sharpness: SAM's first pass, where it is configured.
        on_step: called after each optimizer step of an epoch: a profiler's beat.
        step: optimizer steps tried so far.
        notes: what kept a resume from being exact, and options that the run had to do without.
        within: where in an epoch the run goes on, after it was left in its midst: what `state_within` kept of it.
        whole_epochs: nothing can be kept within one: what its metrics gather is no plain value.
        shards: where ranks may write their parts of a large state.
        conclusion: seconds that the last epoch took after its steps: validation and checkpoint.
    """

    identity: dict[str, Any]
    environment: dict[str, Any]
    changes: str
    config: TrainConfig
    plan: RunPlan
    device: torch.device
    splits: Splits
    val: Dataset
    feed: Feed
    model: nn.Module
    stepping: Stepping
    metrics: Metrics
    optimizer: Optimizer
    sharpness: Sharpness | None
    schedule: Schedule
    precision: Precision
    average: Average
    guard: FiniteGuard
    steplog: StepLog
    curve: Curve
    ranks: Ranks = ALONE
    strategy: Strategy = field(kw_only=True)
    measuring: Measuring = field(kw_only=True)
    fresh: Fresh | None = None
    on_step: Callable[[], None] = lambda: None
    step: int = 0
    notes: list[str] = field(default_factory=list)
    within: dict[str, Any] | None = None
    whole_epochs: bool = False
    shards: Path | None = None
    conclusion: float = 0.0

    @property
    def judged(self) -> nn.Module:
        """The model whose weights are judged and kept: the average of weights where there is one."""
        return self.average.judged

    @property
    def halves(self) -> CrossFit | None:
        """The judge of the halves of the validation split, in a run on a fresh division."""
        return None if self.fresh is None else self.fresh.cross_fit

    @property
    def finished(self) -> bool:
        """Whether the budget of epochs, or the patience, is spent."""
        if self.plan.refit is not None:  # whatever its validation samples say, which are trained on
            return self.curve.next_epoch >= self.plan.refit
        patience = self.config.patience
        out_of_patience = patience is not None and self.curve.stale >= patience
        return out_of_patience or self.curve.next_epoch >= self.plan.epochs

    def weights(self) -> dict[str, Tensor]:
        """A copy of the judged weights and buffers."""
        own = self.judged.state_dict()
        whole = self.strategy.whole(own)
        return {name: tensor.detach().clone() if tensor is own[name] else tensor for name, tensor in whole.items()}

    def validate(self, metrics: Metrics | None = None) -> dict[str, float]:
        """Loss and metrics of the judged model on the validation split, by the run's metrics or others."""
        return self.judge(self.val, metrics)

    def validate_epoch(self) -> dict[str, float]:
        """The same after the epoch that is next in the record; a run on a fresh division judges the halves too."""
        if (halves := self.halves) is None:
            return self.validate()
        halves.begin()
        scores = self.judge(self.val, also=halves)
        halves.end(self.curve.next_epoch)
        return scores

    def judge(self, split: Dataset, metrics: Metrics | None = None, also: InParts | None = None) -> dict[str, float]:
        """Loss and metrics of the judged model on a split, by the run's metrics or others."""
        return evaluate(
            self.judged,
            split,
            self.stepping,
            metrics or self.metrics,
            batch_size=evaluation_rows(self.config),
            device=self.device,
            num_workers=self.config.num_workers or 0,
            ranks=self.ranks,
            also=also,
        )

    def state_dict(self) -> dict[str, Any]:
        """All that a checkpoint holds, as plain values and the run's own tensors.

        No generator is in it: every epoch seeds them from (seed, epoch), so a resume is exact without.
        """
        parts: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.state_dict(),
        }
        return {
            **self.identity,
            "environment": self.environment,
            "notes": self.notes,
            **self.strategy.kept(parts, self.shards),
            "schedule": self.schedule.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "step": self.step,
            "skipped": self.guard.skipped,
            "skipped_in_all": self.guard.skipped_in_all,
            **self.curve.state_dict(),
            **({} if self.halves is None else {"halves": self.halves.state_dict()}),
            **({"measured": measured} if (measured := self.measuring.state_dict()) else {}),
        }

    def state_within(self, sums: dict[str, Any]) -> dict[str, Any]:
        """The same between two steps of an epoch, with what these came to so far, and the generators.

        What a rank gathered and drew by itself is there once for each.
        """
        within: dict[str, Any] = {"sums": sums, "generators": generators(self.device)}
        if not self.ranks.alone:
            within["ranks"] = self.ranks.each({"running": sums["running"], "generators": within["generators"]})
        return {**self.state_dict(), "format": WITHIN, "within": within}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` or `state_within` gave, but for identity and environment."""
        parameters = dict(enumerate(p for group in self.optimizer.param_groups for p in group["params"]))
        average = self.average.state_dict()
        like = {"model": self.model.state_dict(), "optimizer": parameters, "average": average or {}}
        folder = Path(state["shards"]["folder"]) if "shards" in state else None
        own = self.strategy.restored({part: state[part] for part in like}, like, folder)
        self.model.load_state_dict(own["model"])
        self.optimizer.load_state_dict(own["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.precision.scaler.load_state_dict(state["scaler"])
        if average is not None:
            self.average.load_state_dict(own["average"])
        self.step = state["step"]
        self.notes = [*state["notes"], *(note for note in self.notes if note not in state["notes"])]
        self.guard.skipped, self.guard.skipped_in_all = state["skipped"], state["skipped_in_all"]
        self.curve.load_state_dict(state)
        if self.halves is not None:
            self.halves.load_state_dict(state["halves"])
        self.measuring.load_state_dict(state.get("measured", {}))
        self.within = state.get("within")
