"""Smoke test: check before a search that the model can overfit one batch."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpsearch.objectives.errors import wrap_training_errors
from hpsearch.objectives.training.checks.fault_signs import FaultFinder
from hpsearch.objectives.training.config import RunPlan, TrainConfig
from hpsearch.objectives.training.data.batches import LazyBatch
from hpsearch.objectives.training.evaluation.running_metrics import RunningMetrics
from hpsearch.objectives.training.loop.build import build_run
from hpsearch.objectives.training.loop.epoch import train_step
from hpsearch.objectives.training.loop.guards import NonFiniteError, StepPosition, translate_torch_errors
from hpsearch.objectives.training.loop.run import Run
from hpsearch.objectives.training.reports.plots import plot_overfit
from hpsearch.objectives.training.reproducibility.seeds import make_reproducible, set_seed, use_one_thread

if TYPE_CHECKING:
    from hpsearch.objectives.objective import Objective

_LR_FACTORS = (1.0, 3.0, 0.3, 10.0, 0.1)  # tried in order: the test is about the model, not the learning rate
_MIN_FALL = 0.1  # share of the initial loss by which the loss must fall if its floor is unknown
_CHECK_STEPS = 25  # steps between two reads of the losses, which synchronize with the GPU


@dataclass(frozen=True)
class SmokeResult:
    """Result of the attempt to overfit one batch.

    Attributes:
        passed: whether the loss fell to `target` or below.
        losses: loss of the batch before each step.
        target: the loss to reach.
        samples: number of samples in the batch.
        lr: the learning rate with which `losses` were measured.
        reason: reason for the failure in one sentence; empty if the test passed.
        is_undecided: whether the time limit ended the test, so that it neither passed nor failed.
        signs: signs of faults other than the loss; see `FaultFinder`.
    """

    passed: bool
    losses: list[float]
    target: float
    samples: int
    lr: float
    reason: str = ""
    is_undecided: bool = False
    signs: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Write `smoke.json` and `smoke.png`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "smoke.json").write_text(json.dumps(dataclasses.asdict(self)) + "\n")
        plot_overfit(self.losses, folder / "smoke.png", target=self.target)


def run_smoke_test(
    objective: Objective,
    config: TrainConfig | None = None,
    *,
    seed: int = 0,
    samples: int = 32,
    steps: int = 1000,
    seconds: float = math.inf,
    device: torch.device | None = None,
) -> SmokeResult:
    """Overfit one batch of training data without regularization; a model that cannot do this has a fault.

    The excess is the difference between the loss and the objective's `loss_floor`. It must fall to a hundredth of its
    initial value and to at most 0.01. An excess that starts above 10 must fall to a thousandth of its initial value. If
    `loss_floor` is None, or the loss starts below it, the loss must fall by a tenth. Dropout, weight decay, label
    smoothing, augmentation and weight averaging are off. Every step has the same random numbers, so that a noisy loss
    falls only if the model learns. The test tries several learning rates around the configured one, in order.

    Args:
        objective: the objective to check.
        config: configuration; None for the objective's default.
        seed: seed of the split, the weights and the batch.
        samples: maximum number of samples in the batch.
        steps: maximum number of steps per learning rate.
        seconds: limit of the CPU time of the whole test in this thread, at which the result is undecided. The elapsed
            time would depend on the load of the machine.
        device: device to train on; None for the CPU.
    """
    config = config or objective.default_config()
    device = device or torch.device("cpu")
    result, deadline = None, time.thread_time() + seconds
    for factor in _LR_FACTORS:
        tried = _disable_regularization(config, config.lr * factor, samples)
        wrapped = wrap_training_errors(f"{type(objective).__name__} in the smoke test")
        reproducible = make_reproducible(deterministic=config.deterministic)
        # On a loaded machine, several threads spin while they wait for each other.
        with reproducible, use_one_thread(), wrapped, translate_torch_errors(tried, device):
            run, scores = build_run(objective, tried, RunPlan(steps, seed, seed), device=device)
            found = _overfit(objective, run, scores, samples, steps, deadline)
        if found.passed:
            return found
        if result is None or found.losses[-1] < result.losses[-1]:
            result = found
        if time.thread_time() >= deadline:
            break
    assert result is not None
    return result


def _disable_regularization(config: TrainConfig, lr: float, samples: int) -> TrainConfig:
    return dataclasses.replace(
        config,
        lr=lr,
        batch_size=samples,
        gradient_accumulation_steps=1,
        weight_decay=0.0,
        label_smoothing=0.0,
        ema_decay=None,
        swa_fraction=None,
        schedule="constant",
        warmup_fraction=0.0,
        warmup_steps=None,
        num_workers=None,
        compile=False,
        validate_every=None,
        log_every=None,
    )


def _compute_target(first: float, floor: float | None) -> float:
    """Return the loss to reach, from the initial loss `first`."""
    if floor is None or first <= floor:
        return first - _MIN_FALL * max(abs(first), _MIN_FALL)
    above = first - floor
    return floor + (above / 1000 if above > 10 else min(0.01, above / 100))


def _overfit(
    objective: Objective, run: Run, scores: dict[str, float], samples: int, steps: int, deadline: float
) -> SmokeResult:
    """Overfit one batch; `scores` are the validation metrics before the first step."""
    for module in run.model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
    set_seed(run.plan.seed, "smoke")
    train = run.splits.train
    batch = train.batch(torch.randperm(len(train))[:samples]).to(run.device)
    pending = LazyBatch(batch.size, lambda: batch)
    run.model.train()  # batch norm must use the statistics of the batch, as in training
    finder, floor = FaultFinder(objective, run, batch, scores), objective.loss_floor
    set_seed(run.plan.seed, "smoke", "step")
    with torch.no_grad():
        losses = [float(run.step_function(run.model, batch, nullcontext()).loss)]
    target = _compute_target(losses[0], floor)
    reason, step, unread = "", 0, list[torch.Tensor]()
    for step in range(steps):
        running = RunningMetrics(run.metrics)
        set_seed(run.plan.seed, "smoke", "step")  # a noisy loss, such as that of a diffusion model, may fall by chance
        try:
            loss = train_step(run, [pending], StepPosition(0, step, step, run.config.lr), running).loss
        except NonFiniteError as error:
            reason = str(error)
            break
        if step:
            unread.append(loss)
        if unread and ((step + 1) % _CHECK_STEPS == 0 or step + 1 == steps):
            losses += torch.stack(unread).tolist()
            unread.clear()
            if losses[-1] <= target or time.thread_time() >= deadline:
                break
    passed = not reason and losses[-1] <= target
    is_undecided = not passed and not reason and step + 1 < steps
    signs = () if reason else finder.find(is_fitted=passed)
    if not passed and not reason:
        late = " (time limit)" if is_undecided else ""
        reason = f"the loss of one batch is {losses[-1]:.4g} after {step + 1} steps{late}, not below {target:.4g}"
        if floor == 0 and losses[-1] < (1 - _MIN_FALL) * losses[0] and not signs:
            reason += "; if no model can reach this loss, set loss_floor of the objective"
        reason += "".join(f"; {sign}" for sign in signs)
    return SmokeResult(passed, losses, target, batch.size, run.config.lr, reason, is_undecided, signs)
