"""Train one epoch, from its start or from a mid-epoch checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpsearch.kill_points import kill_point
from hpsearch.objectives.errors import ObjectiveError, get_first_line
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.batches import LazyBatch
from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.data.tree import to_device
from hpsearch.objectives.training.evaluation.evaluate import as_floats
from hpsearch.objectives.training.evaluation.running_metrics import RunningMetrics
from hpsearch.objectives.training.evaluation.step import Step
from hpsearch.objectives.training.loop.guards import StepPosition
from hpsearch.objectives.training.loop.run import CHECKPOINT_FORMAT, MID_EPOCH_FORMAT, Run
from hpsearch.objectives.training.reproducibility.environment import describe_differences
from hpsearch.objectives.training.reproducibility.seeds import restore_rng_state, set_seed
from hpsearch.objectives.training.strategies.base import Strategy


class StepResult(NamedTuple):
    """Result of an optimizer step, on the device.

    Attributes:
        loss: mean loss over the step's micro-batches.
        grad_norm: gradient norm before clipping.
        weight: divisor of the mean: the number of samples, or the total weight that the loss defines.
    """

    loss: Tensor
    grad_norm: Tensor
    weight: Tensor | float


class EpochSums:
    """Sums over the steps of an epoch so far, from which the epoch's mean loss and metrics are computed.

    Attributes:
        loss, norm: sums over the steps of the weighted loss and of the gradient norm.
        weight: sum of the weights of the losses.
        samples: number of samples so far.
        steps: number of optimizer steps so far.
        seconds: duration of the steps that earlier attempts trained, in seconds.
        lr: learning rate of the last step.
        scores: the mean `loss` and the metrics, after `compute`.
        grad_norm: mean gradient norm before clipping, after `compute`.
    """

    scores: dict[str, float]
    grad_norm: float
    _SAVED = ("loss", "norm", "weight", "samples", "steps", "seconds", "lr")

    def __init__(self, run: Run) -> None:
        self._running = RunningMetrics(run.metrics, run.ranks)
        self.loss = torch.zeros((), dtype=torch.float64, device=run.device)
        self.norm = torch.zeros_like(self.loss)
        self.weight: Tensor | float = 0
        self._device = run.device
        self.samples, self.steps, self.seconds, self.lr = 0, 0, 0.0, 0.0

    def step(self, run: Run, micro_batches: Sequence[LazyBatch], epoch: int) -> None:
        """Take an optimizer step over micro-batches, and add the result of the step to the sums."""
        result = train_step(run, micro_batches, self.begin_step(run, epoch), self._running)
        self._add(result, sum(batch.size for batch in micro_batches))

    def begin_step(self, run: Run, epoch: int) -> StepPosition:
        """Return the position of the next optimizer step, and keep its learning rate."""
        self.lr = float(run.optimizer.param_groups[0]["lr"])
        return StepPosition(epoch, run.step, self.steps, self.lr)

    def add(self, step: Step, grad_norm: Tensor, size: int) -> None:
        """Add an optimizer step over one batch of `size` samples that was taken elsewhere."""
        self._running.add(step, size)
        self._add(StepResult(step.loss, grad_norm, size if step.weight is None else step.weight), size)

    def _add(self, result: StepResult, size: int) -> None:
        if isinstance(result.weight, int):
            self.loss.add_(result.loss, alpha=result.weight)
        else:
            self.loss += result.loss * result.weight
        self.weight = self.weight + result.weight
        self.norm += result.grad_norm
        self.samples += size
        self.steps += 1

    def compute(self) -> None:
        """Compute the scores and the gradient norm of the epoch, once all of its steps are done."""
        means = {"loss": self.loss / self.weight, "grad_norm": self.norm / self.steps}
        self.scores = as_floats({**means, **self._running.compute()})
        self.grad_norm = self.scores.pop("grad_norm")

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as plain values and tensors.

        Raises:
            UnserializableStateError: the metrics contain a value that a checkpoint cannot hold.
        """
        return {"running": self._running.state_dict(), **{name: getattr(self, name) for name in self._SAVED}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, without the metrics if `running` is None."""
        if state["running"] is not None:
            self._running.load_state_dict(state["running"], self._device)
        for name in self._SAVED:
            setattr(self, name, to_device(state[name], self._device))


@kill_point("train epoch")
def train_epoch(
    run: Run, epoch: int, sums: EpochSums | None = None, after_step: Callable[[EpochSums], None] = lambda _: None
) -> EpochSums:
    """Train one epoch in an order that depends on (seed, epoch), and return the sums over its steps.

    The mean loss and the metrics are computed from the outputs of the training steps.

    Args:
        run: run to train.
        epoch: epoch (0-based).
        sums: sums of the earlier steps of a resumed epoch; None for a new epoch.
        after_step: callback after each optimizer step; its exceptions end the epoch.
    """
    set_training_mode(run.model)
    run.strategy.begin_epoch()
    sums = sums or EpochSums(run)
    for micro_batches in run.batch_source.iterate_steps(epoch, sums.steps):
        sums.step(run, micro_batches, epoch)
        if not run.config.compile:  # batches of other sizes are compiled in the first epoch
            run.ranks.begin_steps()
        run.on_step()
        _validate_mid_epoch(run, epoch)
        after_step(sums)
    run.finite_guard.flush()
    run.ranks.begin_steps()
    sums.compute()
    return sums


def set_training_mode(model: nn.Module) -> None:
    """Put a model into training mode, except norms of frozen layers, whose running statistics must not change."""
    model.train()
    for norm in _iterate_frozen_norms(model):
        norm.eval()


def _iterate_frozen_norms(module: nn.Module, is_parent_frozen: bool = False) -> Iterator[nn.Module]:
    """Iterate over frozen norms with running statistics; a norm without parameters is frozen if its parent is."""
    trainable = [parameter.requires_grad for parameter in module.parameters()]
    is_frozen = not any(trainable) if trainable else is_parent_frozen
    if is_frozen and getattr(module, "running_mean", None) is not None:
        yield module
    for child in module.children():
        yield from _iterate_frozen_norms(child, is_frozen)


def train_step(run: Run, batches: Sequence[LazyBatch], point: StepPosition, running: RunningMetrics) -> StepResult:
    """Take one optimizer step over the micro-batches `batches`.

    The gradient is that of the mean loss over all samples, independent of their division into micro-batches. A step
    that loss scaling skips changes neither weights, schedule nor weight average.
    """
    run.optimizer.zero_grad(set_to_none=True)
    size = sum(batch.size for batch in batches)
    counts = [batch.has_samples for batch in batches]
    if run.sam is None:
        loss, weight, own_loss = _add_gradient(run, (batch.load() for batch in batches), counts, size, running)
    else:
        loaded = [batch.load() for batch in batches]  # both passes use the same augmented samples
        loss, weight, own_loss = _add_gradient(run, loaded, counts, size, running)
        with run.sam.perturbed_weights(run.model):
            _add_gradient(run, loaded, counts, size, None)
    run.precision.scaler.unscale_(run.optimizer)
    run.steplog.record_step(point, loss)
    norm = clip_gradients(run.strategy, run.optimizer, run.config)
    run.finite_guard.check(point, loss, norm, own_loss, scaled=run.precision.scaled)
    if stepped := run.precision.step(run.optimizer):
        run.schedule.step()
        run.weight_averaging.after_step()
    run.finite_guard.count(point, norm, stepped=stepped)
    run.step += 1
    if run.precision.scaled:
        norm = torch.where(torch.isfinite(norm), norm, 0.0)  # a skipped step has no finite norm
    return StepResult(loss, norm, weight)


def _add_gradient(
    run: Run, batches: Iterable[Batch], counts: Sequence[bool], size: int, running: RunningMetrics | None
) -> tuple[Tensor, Tensor | float, Tensor]:
    """Add the gradient of the mean loss over `size` samples to the parameters' gradients.

    Each rank adds the share of its own samples; the sum over ranks is the gradient of the mean.

    Args:
        run: run whose model has the parameters.
        batches: the micro-batches, or this rank's share of each.
        counts: for each micro-batch, whether this rank has samples of it; if not, its only sample gets weight 0.
        size: number of samples of all micro-batches over all ranks.
        running: metrics to update; None updates no metrics.

    Returns:
        The mean loss, its divisor, and this rank's part of the loss.
    """
    parts: list[Tensor] = []
    weights: list[Tensor | float] = []
    last, world = len(counts) - 1, run.ranks.world_size
    for number, (batch, own) in enumerate(zip(batches, counts, strict=True)):
        step = run.strategy.step(batch, run.precision.autocast(), more=number < last, has_samples=own)
        share = (batch.size if step.weight is None else step.weight) * own / size
        is_whole = own and batch.size == size
        part = step.loss if is_whole or (isinstance(share, float) and share == 1) else step.loss * share
        run.precision.backward(part * world if world > 1 else part)  # DDP and FSDP average gradients over ranks
        parts.append(part.detach())
        weights += [] if step.weight is None else [step.weight * own]
        if running is not None:
            running.add(step, batch.size * own)
    loss = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
    own_loss = loss if world == 1 else loss.clone()
    if not weights:
        return run.ranks.all_reduce_sum(loss), size, own_loss
    if world == 1 and len(parts) == 1:
        return loss, weights[0], own_loss
    # The total weight is known only here, so the gradients, which are scaled by samples, are rescaled to weights.
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
    return loss * scale, total, own_loss


def clip_gradients(strategy: Strategy, optimizer: Optimizer, config: TrainConfig) -> Tensor:
    """Clip the gradients as configured; return their norm before clipping, a scalar on the device."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    limit = float("inf") if config.clip_grad_norm is None else config.clip_grad_norm
    norm = strategy.clip_gradients(parameters, limit)
    if config.clip_grad_value is not None:
        nn.utils.clip_grad_value_(parameters, config.clip_grad_value)
    return norm


def _validate_mid_epoch(run: Run, epoch: int) -> None:
    """Validate within an epoch if configured, for the step records; the run does not change."""
    every = run.config.validate_every
    if every is not None and run.step % every == 0:
        run.finite_guard.flush()
        run.steplog.add_scores(epoch, run.step, run.evaluate(run.val, copy.deepcopy(run.metrics)))


def restore(run: Run, state: dict[str, Any]) -> None:
    """Restore the state of a checkpoint in a new run.

    If the configuration of the run changes, the checkpoint may be of another member of the population, with another
    seed. Its configuration must be the one that trained its last epoch.

    Raises:
        ObjectiveError: the checkpoint is of another run, or does not fit the current code of the objective.
    """
    if state.get("format") == MID_EPOCH_FORMAT:
        state = {**state, "format": CHECKPOINT_FORMAT}
    stored = {key: state.get(key) for key in run.identity}
    if isinstance(stored["config"], dict):  # settings that are newer than the checkpoint get their defaults
        stored["config"] = TrainConfig.from_dict(stored["config"]).to_dict()
    expected = dict(run.identity)
    if (trained := run.plan.get_config(max(len(state["history"]) - ("within" not in state), 0))) is not None:
        expected |= {"config": trained.to_dict(), "seed": stored["seed"]}
    require_same_run(stored, expected)
    try:
        run.load_state_dict(state, is_other_config=expected["config"] != run.identity["config"])
    except (RuntimeError, ValueError, KeyError) as error:
        detail = get_first_line(error)
        raise ObjectiveError(f"the checkpoint does not fit the current code of the objective: {detail}") from error
    if changed := describe_differences(state["environment"], run.environment):
        run.resume_notes.append(f"results after epoch {run.curve.next_epoch} may differ: {changed}")


def resume_mid_epoch(run: Run, state: dict[str, Any], sums: EpochSums, epoch: int) -> None:
    """Resume within an epoch from the mid-epoch part of a checkpoint: restore sums and random generators.

    With the same number of ranks, each rank restores its own state. Otherwise the training metrics cover only the
    remaining steps, and the random generators are seeded again.
    """
    by_rank, ranks = state.get("ranks"), run.ranks
    if len(by_rank or [state]) == ranks.world_size:
        own = by_rank[ranks.rank] if by_rank else {**state, "running": state["sums"]["running"]}
        sums.load_state_dict({**state["sums"], "running": own["running"]})
        restore_rng_state(own["generators"], run.device)
        return
    sums.load_state_dict({**state["sums"], "running": None})
    set_seed(run.plan.seed, "epoch", epoch, "from", sums.steps, *ranks.seed_suffix())
    run.resume_notes.append(
        f"train metrics of epoch {epoch + 1} except the loss cover only the steps after step {sums.steps}, because it "
        f"was resumed on {ranks.world_size} devices instead of {len(by_rank or [state])}"
    )


def require_same_run(stored: dict[str, Any], current: dict[str, Any]) -> None:
    """Reject a checkpoint of another run.

    Raises:
        ObjectiveError: an entry differs; the message has both values.
    """
    for key, value in current.items():
        other = stored.get(key)
        if other == value:
            continue
        if key == "config" and isinstance(other, dict):
            require_same_run(other, value)
        raise ObjectiveError(f"the checkpoint belongs to another run: its {key} is {other!r}, not {value!r}")
