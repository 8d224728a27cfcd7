"""Train one epoch, from its start or from a mid-epoch checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpsearch.kill_points import kill_point
from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.batches import LazyBatch
from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.data.tree import to_device
from hpsearch.objectives.training.evaluation.evaluate import as_floats
from hpsearch.objectives.training.evaluation.running import RunningMetrics
from hpsearch.objectives.training.loop.guards import StepPosition
from hpsearch.objectives.training.loop.run import FORMAT, MID_EPOCH_FORMAT, Run
from hpsearch.objectives.training.reproducibility.environment import describe_differences
from hpsearch.objectives.training.reproducibility.seeds import restore_rng_state, set_seed
from hpsearch.objectives.training.strategies.base import Strategy


class StepResult(NamedTuple):
    """What an optimizer step came to, on the device.

    Attributes:
        loss: the mean over its window.
        norm: of the gradient, before clipping.
        weight: what the loss is a mean over: the window's samples, or what the loss weighs.
    """

    loss: Tensor
    norm: Tensor
    weight: Tensor | float


class EpochSums:
    """What the steps of an epoch came to so far: its mean loss and metrics, and at which step it is.

    Attributes:
        loss, norm: sums over the steps, the loss by its weight.
        weight: sum of the weights of the losses.
        samples: number trained on.
        steps: optimizer steps of the epoch that are done.
        seconds: that earlier attempts spent on them.
        lr: learning rate of the last step.
        scores: the mean `loss`, and each metric; of a whole epoch.
        grad_norm: mean over the steps, before clipping; of a whole epoch.
    """

    scores: dict[str, float]
    grad_norm: float
    _KEPT = ("loss", "norm", "weight", "samples", "steps", "seconds", "lr")

    def __init__(self, run: Run) -> None:
        self._running = RunningMetrics(run.metrics, run.ranks)
        self.loss = torch.zeros((), dtype=torch.float64, device=run.device)
        self.norm = torch.zeros_like(self.loss)
        self.weight: Tensor | float = 0
        self._device = run.device
        self.samples, self.steps, self.seconds, self.lr = 0, 0, 0.0, 0.0

    def step(self, run: Run, window: Sequence[LazyBatch], epoch: int) -> None:
        """Takes an optimizer step over a window, and adds it."""
        self.lr = float(run.optimizer.param_groups[0]["lr"])
        step = train_step(run, window, StepPosition(epoch, run.step, self.steps, self.lr), self._running)
        if isinstance(step.weight, int):
            self.loss.add_(step.loss, alpha=step.weight)
        else:
            self.loss += step.loss * step.weight
        self.weight = self.weight + step.weight
        self.norm += step.norm
        self.samples += sum(batch.size for batch in window)
        self.steps += 1

    def compute(self) -> None:
        """Compute the scores and the gradient norm of the epoch, once all of its steps are done."""
        means = {"loss": self.loss / self.weight, "grad_norm": self.norm / self.steps}
        self.scores = as_floats({**means, **self._running.compute()})
        self.grad_norm = self.scores.pop("grad_norm")

    def state_dict(self) -> dict[str, Any]:
        """All of it, as plain values and tensors.

        Raises:
            UnkeptError: the metrics hold what is not plain.
        """
        return {"running": self._running.state_dict(), **{name: getattr(self, name) for name in self._KEPT}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave; where `running` is None, without the metrics."""
        if state["running"] is not None:
            self._running.load_state_dict(state["running"], self._device)
        for name in self._KEPT:
            setattr(self, name, to_device(state[name], self._device))


@kill_point("train epoch")
def train_epoch(
    run: Run, epoch: int, sums: EpochSums | None = None, after_step: Callable[[EpochSums], None] = lambda _: None
) -> EpochSums:
    """Trains on every sample once, in an order drawn from (seed, epoch).

    The mean loss and the metrics are those of the outputs as training saw them.

    Args:
        run: to train.
        epoch: 0-based.
        sums: of the epoch's steps that were taken before, where it was left in its midst.
        after_step: called after each optimizer step; what it raises leaves the epoch.
    """
    training_mode(run.model)
    run.strategy.begin_epoch()
    sums = sums or EpochSums(run)
    for window in run.batch_source.iterate_steps(epoch, sums.steps):
        sums.step(run, window, epoch)
        run.on_step()
        _validate_within(run, epoch)
        after_step(sums)
    run.guard.flush()
    sums.compute()
    return sums


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


def train_step(run: Run, window: Sequence[LazyBatch], point: StepPosition, running: RunningMetrics) -> StepResult:
    """One optimizer step over the micro-batches of a window.

    The gradient is that of the mean over all samples of the window, however they are divided into micro-batches.
    A step that loss scaling skips moves neither weights, schedule nor average.
    """
    run.optimizer.zero_grad(set_to_none=True)
    size = sum(pending.size for pending in window)
    counts = [pending.counts for pending in window]
    if run.sam is None:
        loss, weight = _gradient(run, (pending.get() for pending in window), counts, size, running)
    else:
        batches = [pending.get() for pending in window]  # both passes see the same samples, augmented the same way
        loss, weight = _gradient(run, batches, counts, size, running)
        with run.sam.perturbed_weights(run.model):
            _gradient(run, batches, counts, size, None)
    run.precision.scaler.unscale_(run.optimizer)
    run.steplog.record_step(point, loss)
    norm = clip(run.strategy, run.optimizer, run.config)
    run.guard.check(point, loss, norm, scaled=run.precision.scaled)
    stepped = run.precision.step(run.optimizer)
    if stepped:
        run.schedule.step()
        run.average.after_step()
    run.guard.count(point, norm, stepped=stepped)
    run.step += 1
    if run.precision.scaled:
        norm = torch.where(torch.isfinite(norm), norm, 0.0)  # a skipped step has none
    return StepResult(loss, norm, weight)


def _gradient(
    run: Run, batches: Iterable[Batch], counts: Sequence[bool], size: int, running: RunningMetrics | None
) -> tuple[Tensor, Tensor | float]:
    """Adds the gradient of the mean loss over `size` samples to the parameters'; that mean, and what it weighs.

    Of several ranks each adds the share of the samples that it has, and the sum over ranks is that gradient.

    Args:
        run: whose model has the parameters.
        batches: the micro-batches, or this rank's share of each.
        counts: for each whether it is this rank's, and not one that weighs nothing.
        size: samples of all micro-batches of all ranks.
        running: adds up what the step came to.
    """
    parts: list[Tensor] = []
    weights: list[Tensor | float] = []
    last, world = len(counts) - 1, run.ranks.world_size
    for number, (batch, own) in enumerate(zip(batches, counts, strict=True)):
        step = run.strategy.step(batch, run.precision.autocast(), more=number < last)
        share = (batch.size if step.weight is None else step.weight) * own / size
        alone = own and batch.size == size
        part = step.loss if alone or (isinstance(share, float) and share == 1) else step.loss * share
        run.precision.backward(part * world if world > 1 else part)  # ranks take the mean of their gradients
        parts.append(part.detach())
        weights += [] if step.weight is None else [step.weight * own]
        if running is not None:
            running.add(step, batch.size * own)
    loss = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
    if not weights:
        return run.ranks.all_reduce_sum(loss), size
    if world == 1 and len(parts) == 1:
        return loss, weights[0]
    # The weights of all are known only now: what was a share of the samples becomes one of them.
    own_weight = torch.stack([torch.as_tensor(weight, device=loss.device) for weight in weights]).sum()
    if world > 1:
        loss, total = run.ranks.all_reduce_sum(torch.stack([loss.double(), own_weight.double()])).unbind()
    else:
        total = own_weight
    scale = size / total.clamp_min(torch.finfo(torch.float32).tiny)
    for group in run.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
    return loss * scale, total


def clip(strategy: Strategy, optimizer: Optimizer, config: TrainConfig) -> Tensor:
    """Clips the gradient as configured; its norm before that, a scalar on the device."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    limit = float("inf") if config.clip_grad_norm is None else config.clip_grad_norm
    norm = strategy.clip_gradients(parameters, limit)
    if config.clip_grad_value is not None:
        nn.utils.clip_grad_value_(parameters, config.clip_grad_value)
    return norm


def _validate_within(run: Run, epoch: int) -> None:
    """A validation in the midst of an epoch, for the record of steps, which changes nothing of the run."""
    every = run.config.validate_every
    if every is not None and run.step % every == 0:
        run.guard.flush()
        run.steplog.add_scores(epoch, run.step, run.validate(copy.deepcopy(run.metrics)))


def restore(run: Run, state: dict[str, Any]) -> None:
    """Puts a checkpoint's state into a run that was built anew.

    Raises:
        ObjectiveError: the checkpoint is of another run, or the objective's code has changed since.
    """
    if state.get("format") == MID_EPOCH_FORMAT:
        state = {**state, "format": FORMAT}
    then = {key: state.get(key) for key in run.identity}
    if isinstance(then["config"], dict):  # a setting that is newer than the checkpoint had its default
        then["config"] = TrainConfig.from_dict(then["config"]).to_dict()
    require_same(then, run.identity)
    try:
        run.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError) as error:
        detail = str(error).strip().splitlines()[0]
        raise ObjectiveError(f"the checkpoint does not fit the objective's code of today: {detail}") from error
    changed = describe_differences(state["environment"], run.environment)
    if changed:
        run.notes.append(f"not exact after epoch {run.curve.next_epoch}: {changed}")


def resume_mid_epoch(run: Run, within: dict[str, Any], sums: EpochSums, epoch: int) -> None:
    """Goes on in the midst of an epoch: with what its steps came to, and the generators.

    On as many ranks as before each goes on with its own. On others the metrics of training count the steps from here
    on, and what is drawn at random is drawn anew.
    """
    then, ranks = within.get("ranks"), run.ranks
    if len(then or [within]) == ranks.world_size:
        own = then[ranks.rank] if then else {"running": within["sums"]["running"], "generators": within["generators"]}
        sums.load_state_dict({**within["sums"], "running": own["running"]})
        restore_rng_state(own["generators"], run.device)
        return
    sums.load_state_dict({**within["sums"], "running": None})
    set_seed(run.plan.seed, "epoch", epoch, "from", sums.steps, *ranks.seed_suffix())
    run.notes.append(
        f"train metrics of epoch {epoch + 1} but its loss are of the steps after {sums.steps}: it went on on "
        f"{ranks.world_size} in place of {len(then or [within])} devices"
    )


def require_same(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuses a checkpoint of another run.

    Raises:
        ObjectiveError: it says what differs.
    """
    for key, value in now.items():
        other = then.get(key)
        if other == value:
            continue
        if key == "config" and isinstance(other, dict):
            require_same(other, value)
        raise ObjectiveError(f"the checkpoint is of another run: {key} is {other!r} there and {value!r} here")
