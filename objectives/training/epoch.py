"""One epoch of training, and one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from objectives.training.data import windows
from objectives.training.evaluate import as_floats, summed
from objectives.training.guards import Point
from objectives.training.metrics import Metrics
from objectives.training.reproducibility import derive_seed
from objectives.training.run import Run


@dataclass(frozen=True)
class Trained:
    """What an epoch of training came to.

    Attributes:
        scores: the mean `loss` per sample, and each metric.
        lr: learning rate of the last step.
        grad_norm: mean over the steps, before clipping.
        samples: number trained on.
    """

    scores: dict[str, float]
    lr: float
    grad_norm: float
    samples: int


def train_epoch(run: Run, epoch: int) -> Trained:
    """Trains on every sample once, in an order drawn from (seed, epoch).

    The loss per sample and the metrics are those of the outputs as training saw them.
    """
    run.model.train()
    config, running = run.config, RunningMetrics(run.metrics)
    loss_sum = torch.zeros((), dtype=torch.float64, device=run.device)
    norm_sum, samples, steps, lr = torch.zeros_like(loss_sum), 0, 0, 0.0
    order = windows(
        len(run.train),
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        drop_last=config.drop_last,
        seed=derive_seed(run.seed, "order", epoch),
    )
    for batch, window in enumerate(order):
        lr = float(run.optimizer.param_groups[0]["lr"])
        loss, norm = train_step(run, window, Point(epoch, run.step, batch, lr), running)
        loss_sum += loss
        norm_sum += norm
        samples += sum(map(len, window))
        steps += 1
    run.guard.flush()
    scores = as_floats({"loss": loss_sum / samples, "grad_norm": norm_sum / steps, **running.compute()})
    return Trained(grad_norm=scores.pop("grad_norm"), scores=scores, lr=lr, samples=samples)


def train_step(run: Run, window: Sequence[Tensor], point: Point, running: RunningMetrics) -> tuple[Tensor, Tensor]:
    """One optimizer step over the micro-batches of a window: the summed loss and the gradient's norm, on the device.

    The gradient is that of the mean over all samples of the window, however they are divided into micro-batches.
    A step that loss scaling skips moves neither weights, schedule nor moving average.
    """
    size = sum(map(len, window))
    total = torch.zeros((), dtype=torch.float32, device=run.device)
    run.optimizer.zero_grad(set_to_none=True)
    for rows in window:
        rows = rows.to(run.device)  # noqa: PLW2901
        x, y = run.train.x[rows], run.train.y[rows]
        with run.precision.autocast():
            output = run.model(x)
        loss = summed(run.loss, output, y)
        run.precision.backward(loss / size)
        total += loss.detach()
        running.add(output.detach(), y)
    norm = run.precision.unscale_and_clip(run.optimizer, run.config.clip_grad_norm)
    run.guard.check(point, total / size, norm, scaled=run.precision.scaled)
    stepped = run.precision.step(run.optimizer)
    if stepped:
        run.schedule.step()
        if run.ema is not None:
            run.ema.update_parameters(run.model)
    run.guard.count(point, norm, stepped=stepped)
    run.step += 1
    return total, torch.where(torch.isfinite(norm), norm, 0.0)  # a skipped step has no norm


class RunningMetrics:
    """Metrics of the outputs that training produced, added in chunks: an update costs more than a small batch."""

    _CHUNK = 4096  # rows

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._rows = 0
        with torch.inference_mode():
            metrics.reset()

    def add(self, output: Tensor, target: Tensor) -> None:
        """Adds a batch of detached outputs."""
        self._outputs.append(output.float())
        self._targets.append(target)
        self._rows += len(target)
        if self._rows >= self._CHUNK:
            self._flush()

    def compute(self) -> dict[str, Tensor]:
        """All metrics over what was added."""
        self._flush()
        with torch.inference_mode():
            return dict(self._metrics.compute())

    @torch.inference_mode()
    def _flush(self) -> None:
        if self._outputs:
            self._metrics.update(torch.cat(self._outputs), torch.cat(self._targets))
        self._outputs, self._targets, self._rows = [], [], 0
