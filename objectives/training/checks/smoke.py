"""Before a search: can the model fit one batch at all?"""

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

from hpsearch.objectives.training.config import RunPlan, TrainConfig
from hpsearch.objectives.training.data.batches import Pending
from hpsearch.objectives.training.evaluation.running import RunningMetrics
from hpsearch.objectives.training.loop.build import build
from hpsearch.objectives.training.loop.epoch import train_step
from hpsearch.objectives.training.loop.guards import NonFiniteError, Point, told_apart
from hpsearch.objectives.training.loop.run import Run
from hpsearch.objectives.training.reports.plots import overfit_curve
from hpsearch.objectives.training.reproducibility.seeds import reproducible, set_seed

if TYPE_CHECKING:
    from hpsearch.objectives.objective import Objective

_RATES = (1.0, 3.0, 0.3, 10.0, 0.1)  # tried in turn: a smoke test is of the model, not of a rate
_SHARE = 0.1  # of what the loss was: how far it must fall where nobody knows how low it can
_CHECK = 25  # steps between two looks at the losses: on a GPU a look waits


@dataclass(frozen=True)
class SmokeResult:
    """The result of overfitting one batch.

    Attributes:
        passed: whether the loss fell to `target`.
        losses: before each step, on the batch.
        samples: number of samples in the batch.
        lr: the learning rate of `losses`.
        reason: of a failure, in a sentence; else empty.
    """

    passed: bool
    losses: list[float]
    target: float
    samples: int
    lr: float
    reason: str = ""

    def write(self, folder: Path) -> None:
        """Writes `smoke.json` and `smoke.png`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "smoke.json").write_text(json.dumps(dataclasses.asdict(self)) + "\n")
        overfit_curve(self.losses, folder / "smoke.png", target=self.target)


def smoke(
    objective: Objective,
    config: TrainConfig | None = None,
    *,
    seed: int = 0,
    samples: int = 32,
    steps: int = 1000,
    seconds: float = math.inf,
    device: torch.device | None = None,
) -> SmokeResult:
    """Overfits one batch of training data, without regularisation; a model that cannot has a fault in it.

    Above the objective's `loss_floor` the loss must fall to a hundredth of what it was, a thousandth where that was
    above 10, and 0.01 where it was below 1. Where there is no floor, or the loss starts below it, it must fall by a
    tenth of what it was. Dropout, decay, label smoothing, augmentation and averages are off, and some learning rates
    around the configured one are tried in turn.

    Args:
        objective: the model and loss to check.
        config: None is the objective's default.
        seed: of the split, the weights and the batch.
        samples: the most in the batch.
        steps: the most with each learning rate.
        seconds: the time limit of all rates. A check that reaches it fails.
        device: None is the CPU.
    """
    config = config or objective.default_config()
    device = device or torch.device("cpu")
    result, deadline = None, time.monotonic() + seconds
    for factor in _RATES:
        tried = _bare(config, config.lr * factor, samples)
        with reproducible(deterministic=config.deterministic), told_apart(tried, device):
            run, _ = build(objective, tried, RunPlan(steps, seed, seed), device=device)
            found = _overfit(run, samples, steps, deadline, objective.loss_floor)
        if found.passed:
            return found
        if result is None or found.losses[-1] < result.losses[-1]:
            result = found
        if time.monotonic() >= deadline:
            break
    assert result is not None
    return result


def _bare(config: TrainConfig, lr: float, samples: int) -> TrainConfig:
    return dataclasses.replace(
        config,
        lr=lr,
        batch_size=samples,
        accumulate=1,
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


def _target(first: float, floor: float | None) -> float:
    """What a loss that starts at `first` has to fall to."""
    if floor is None or first <= floor:
        return first - _SHARE * max(abs(first), _SHARE)
    above = first - floor
    return floor + (above / 1000 if above > 10 else min(0.01, above / 100))


def _overfit(run: Run, samples: int, steps: int, deadline: float, floor: float | None) -> SmokeResult:
    for module in run.model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
    set_seed(run.plan.seed, "smoke")
    train = run.splits.train
    batch = train.batch(torch.randperm(len(train))[:samples]).to(run.device)
    pending = Pending(batch.size, lambda: batch)
    run.model.train()  # batch norm takes its statistics from the batch, as in training
    with torch.no_grad():
        losses = [float(run.stepping(run.model, batch, nullcontext()).loss)]
    target = _target(losses[0], floor)
    reason, step, unread = "", 0, list[torch.Tensor]()
    for step in range(steps):
        running = RunningMetrics(run.metrics)
        try:
            loss = train_step(run, [pending], Point(0, step, step, run.config.lr), running).loss
        except NonFiniteError as error:
            reason = str(error)
            break
        if step:
            unread.append(loss)
        if unread and ((step + 1) % _CHECK == 0 or step + 1 == steps):
            losses += torch.stack(unread).tolist()
            unread.clear()
            if losses[-1] <= target or time.monotonic() >= deadline:
                break
    passed = not reason and losses[-1] <= target
    if not passed and not reason:
        late = ", when time was up," if step + 1 < steps else ""
        reason = (
            f"the loss of one batch is {losses[-1]:.4g} after {step + 1} steps{late} and should be below {target:.4g}"
        )
        if floor == 0 and losses[-1] < (1 - _SHARE) * losses[0]:
            reason += ", unless it cannot: then the objective says so by loss_floor"
    return SmokeResult(passed, losses, target, batch.size, run.config.lr, reason)
