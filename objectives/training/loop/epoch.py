"""One epoch of training, and one optimizer step."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from objectives.training.config import TrainConfig
from objectives.training.data.batches import Pending
from objectives.training.data.dataset import Batch
from objectives.training.evaluation.evaluate import Means, as_floats
from objectives.training.evaluation.metrics import Metrics
from objectives.training.evaluation.step import Step, detached
from objectives.training.loop.guards import Point
from objectives.training.loop.run import Run


@dataclass(frozen=True)
class Trained:
    """What an epoch of training came to.

    Attributes:
        scores: the mean `loss`, and each metric.
        lr: learning rate of the last step.
        grad_norm: mean over the steps, before clipping.
        samples: number trained on.
    """

    scores: dict[str, float]
    lr: float
    grad_norm: float
    samples: int


class Stepped(NamedTuple):
    """What an optimizer step came to, on the device.

    Attributes:
        loss: the mean over its window.
        norm: of the gradient, before clipping.
        weight: what the loss is a mean over: the window's samples, or what the loss weighs.
    """

    loss: Tensor
    norm: Tensor
    weight: Tensor | float


def train_epoch(run: Run, epoch: int) -> Trained:
    """Trains on every sample once, in an order drawn from (seed, epoch).

    The mean loss and the metrics are those of the outputs as training saw them.
    """
    training_mode(run.model)
    running = RunningMetrics(run.metrics)
    loss_sum = torch.zeros((), dtype=torch.float64, device=run.device)
    weight: Tensor | float = 0
    norm_sum, samples, steps, lr = torch.zeros_like(loss_sum), 0, 0, 0.0
    for number, window in enumerate(run.feed.windows(epoch)):
        lr = float(run.optimizer.param_groups[0]["lr"])
        step = train_step(run, window, Point(epoch, run.step, number, lr), running)
        if isinstance(step.weight, int):
            loss_sum.add_(step.loss, alpha=step.weight)
        else:
            loss_sum += step.loss * step.weight
        weight = weight + step.weight
        norm_sum += step.norm
        samples += sum(batch.size for batch in window)
        steps += 1
        run.on_step()
        _validate_within(run, epoch)
    run.guard.flush()
    scores = as_floats({"loss": loss_sum / weight, "grad_norm": norm_sum / steps, **running.compute()})
    return Trained(grad_norm=scores.pop("grad_norm"), scores=scores, lr=lr, samples=samples)


def training_mode(model: nn.Module) -> None:
    """Puts a model into training mode, but for the norms of frozen layers: their running statistics are frozen too."""
    model.train()
    for frozen in _frozen_norms(model):
        frozen.eval()


def _frozen_norms(module: nn.Module, above: bool = False) -> Iterator[nn.Module]:
    """Norms with running statistics whose parameters are frozen; one without any goes by what it stands in."""
    own = [parameter.requires_grad for parameter in module.parameters()]
    frozen = not any(own) if own else above
    if frozen and getattr(module, "running_mean", None) is not None:
        yield module
    for child in module.children():
        yield from _frozen_norms(child, frozen)


def train_step(run: Run, window: Sequence[Pending], point: Point, running: RunningMetrics) -> Stepped:
    """One optimizer step over the micro-batches of a window.

    The gradient is that of the mean over all samples of the window, however they are divided into micro-batches.
    A step that loss scaling skips moves neither weights, schedule nor average.
    """
    run.optimizer.zero_grad(set_to_none=True)
    size = sum(pending.size for pending in window)
    if run.sharpness is None:
        loss, weight = _gradient(run, (pending.get() for pending in window), size, running)
    else:
        batches = [pending.get() for pending in window]  # both passes see the same samples, augmented the same way
        loss, weight = _gradient(run, batches, size, running)
        with run.sharpness.displaced(run.model):
            _gradient(run, batches, size, None)
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
    return Stepped(loss, norm, weight)


def _gradient(
    run: Run, batches: Iterable[Batch], size: int, running: RunningMetrics | None
) -> tuple[Tensor, Tensor | float]:
    """Adds the gradient of the mean loss over `size` samples to the parameters'; that mean, and what it weighs."""
    parts: list[Tensor] = []
    weights: list[Tensor | float] = []
    for batch in batches:
        step = run.stepping(run.model, batch, run.precision.autocast())
        share = (batch.size if step.weight is None else step.weight) / size
        alone = batch.size == size
        part = step.loss if alone or (isinstance(share, float) and share == 1) else step.loss * share
        run.precision.backward(part)
        parts.append(part.detach())
        weights += [] if step.weight is None else [step.weight]
        if running is not None:
            running.add(step, batch.size)
    loss = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
    if not weights:
        return loss, size
    if len(parts) == 1:
        return loss, weights[0]
    # The weights of all are known only now: what was a share of the samples becomes one of them.
    total = torch.stack([torch.as_tensor(weight, device=loss.device) for weight in weights]).sum()
    scale = size / total.clamp_min(torch.finfo(torch.float32).tiny)
    for group in run.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
    return loss * scale, total


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
    """Metrics of the outputs that training produced, added in chunks: an update costs more than a small batch.

    What a chunk holds is bounded by rows and by bytes: of images or of tokens a single batch is a chunk.
    """

    _ROWS, _BYTES = 4096, 4 << 20

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._outputs: list[Any] = []
        self._targets: list[Any] = []
        self._rows = self._bytes = 0
        self._measured: Means | None = None  # by the steps themselves
        with torch.inference_mode():
            metrics.reset()

    def add(self, step: Step, size: int) -> None:
        """Adds a batch of `size` samples."""
        if step.metrics:
            self._measured = self._measured or Means(step.loss.device)
            self._measured.add(step, size)
        if step.outputs is None:
            return
        outputs = detached(step.outputs)
        if not (isinstance(outputs, Tensor) and isinstance(step.targets, Tensor)):  # only tensors are joined
            self._update(outputs, step.targets)
            return
        if outputs.ndim > 2 and self._outputs and outputs.shape[1:] != self._outputs[-1].shape[1:]:
            self._flush()
        self._outputs.append(outputs)
        self._targets.append(step.targets)
        self._rows += size
        self._bytes += outputs.nbytes + step.targets.nbytes
        if self._rows >= self._ROWS or self._bytes >= self._BYTES:
            self._flush()

    def compute(self) -> dict[str, Tensor]:
        """All metrics over what was added."""
        self._flush()
        measured = {} if self._measured is None else self._measured.compute()
        measured.pop("loss", None)
        with torch.inference_mode():
            return {**measured, **self._metrics.compute()}

    def _flush(self) -> None:
        outputs, targets = self._outputs, self._targets
        self._outputs, self._targets, self._rows, self._bytes = [], [], 0, 0
        if len(outputs) == 1:
            self._update(outputs[0], targets[0])
        elif outputs:
            self._update(torch.cat(outputs), torch.cat(targets))

    @torch.inference_mode()
    def _update(self, outputs: Any, targets: Any) -> None:
        self._metrics.update(outputs, targets)
