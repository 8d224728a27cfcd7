"""One epoch of training, and one optimizer step."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from objectives.training.config import TrainConfig
from objectives.training.data.batches import Batch
from objectives.training.evaluation.evaluate import as_floats, mean
from objectives.training.evaluation.metrics import Metrics
from objectives.training.loop.guards import Point
from objectives.training.loop.run import Run


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
    running = RunningMetrics(run.metrics)
    loss_sum = torch.zeros((), dtype=torch.float64, device=run.device)
    norm_sum, samples, steps, lr = torch.zeros_like(loss_sum), 0, 0, 0.0
    for number, window in enumerate(run.feed.windows(epoch)):
        lr = float(run.optimizer.param_groups[0]["lr"])
        loss, norm = train_step(run, window, Point(epoch, run.step, number, lr), running)
        size = sum(batch.size for batch in window)
        loss_sum.add_(loss, alpha=size)
        norm_sum += norm
        samples += size
        steps += 1
        run.on_step()
        _validate_within(run, epoch)
    run.guard.flush()
    scores = as_floats({"loss": loss_sum / samples, "grad_norm": norm_sum / steps, **running.compute()})
    return Trained(grad_norm=scores.pop("grad_norm"), scores=scores, lr=lr, samples=samples)


def train_step(run: Run, window: Sequence[Batch], point: Point, running: RunningMetrics) -> tuple[Tensor, Tensor]:
    """One optimizer step over the micro-batches of a window: its mean loss and the gradient's norm, on the device.

    The gradient is that of the mean over all samples of the window, however they are divided into micro-batches.
    A step that loss scaling skips moves neither weights, schedule nor average.
    """
    size = sum(batch.size for batch in window)
    run.optimizer.zero_grad(set_to_none=True)
    if run.sharpness is None:
        loss = _gradient(run, (batch.get() for batch in window), size, running)
    else:
        inputs = [batch.get() for batch in window]  # both passes see the same samples, augmented the same way
        loss = _gradient(run, inputs, size, running)
        with run.sharpness.displaced(run.model):
            _gradient(run, inputs, size, None)
    run.precision.unscale(run.optimizer)
    run.steplog.note(point, loss)
    norm = clip(run.optimizer, run.config)
    run.guard.check(point, loss, norm, scaled=run.precision.scaled)
    stepped = run.precision.step(run.optimizer)
    if stepped:
        run.schedule.step()
        run.average.after_step()
    run.guard.count(point, norm, stepped=stepped)
    run.step += 1
    if run.precision.scaled:
        norm = torch.where(torch.isfinite(norm), norm, 0.0)  # a skipped step has none
    return loss, norm


def _gradient(run: Run, batches: Iterable[tuple[Tensor, Tensor]], size: int, running: RunningMetrics | None) -> Tensor:
    """Adds the gradient of the mean loss over the `size` samples of all batches to the parameters'; that mean."""
    parts = []
    for x, y in batches:
        with run.precision.autocast():
            output = run.model(x)
        loss = mean(run.loss, output, y)
        share = len(y) / size
        part = loss if share == 1 else loss * share
        run.precision.backward(part)
        parts.append(part.detach())
        if running is not None:
            running.add(output.detach(), y)
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def clip(optimizer: Optimizer, config: TrainConfig) -> Tensor:
    """Clips the gradient as configured; its norm before that, a scalar on the device."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    limit = float("inf") if config.clip_grad_norm is None else config.clip_grad_norm
    norm = nn.utils.clip_grad_norm_(parameters, limit, error_if_nonfinite=False)
    if config.clip_grad_value is not None:
        nn.utils.clip_grad_value_(parameters, config.clip_grad_value)
    return norm


def _validate_within(run: Run, epoch: int) -> None:
    """A validation in the midst of an epoch, for the record of steps, which changes nothing of the run."""
    every = run.config.validate_every
    if every is not None and run.step % every == 0:
        run.guard.flush()
        run.steplog.add_scores(epoch, run.step, run.validate(copy.deepcopy(run.metrics)))


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
