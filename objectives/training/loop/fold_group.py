"""Train the folds of a trial together: one gradient, one clipping and one update for all folds in each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hpsearch.kill_points import kill_point
from hpsearch.objectives.training.data.batches import LazyBatch
from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.evaluation.losses import compute_loss_weight
from hpsearch.objectives.training.evaluation.step import Step
from hpsearch.objectives.training.loop.epoch import EpochSums, set_training_mode
from hpsearch.objectives.training.loop.run import Run
from hpsearch.objectives.training.loop.stacked_folds import StackedFolds, get_shapes, split_folds, unflatten

_COUNTS = frozenset({"step", "mu_product"})  # optimizer states that are one number for all values of a parameter


class StackedOptimizer:
    """One optimizer for the stacked parameters of all folds, which shares its state with the folds' own optimizers.

    The own optimizers update the folds if their learning rates or their numbers of steps differ, which one optimizer
    cannot represent, and in the first step of a run, which creates their states.

    Args:
        runs: the runs of the folds; the optimizers must update each value of a parameter independently of the others.
        folds: stacked folds, which are bound.
    """

    def __init__(self, runs: Sequence[Run], folds: StackedFolds) -> None:
        self._runs, self._groups, self._config = runs, folds.groups, runs[0].config
        self._parameters = [nn.Parameter(flat) for flat in folds.flat]
        self._flat_gradients = [torch.zeros_like(flat) for flat in folds.flat]
        self._gradients: list[Tensor] = []  # views [folds, ...]
        for parameter, flat, group in zip(self._parameters, self._flat_gradients, folds.groups, strict=True):
            parameter.grad = flat
            self._gradients += unflatten(flat, group).values()
        own = runs[0].optimizer.param_groups
        groups = [{**group, "params": [flat]} for group, flat in zip(own, self._parameters, strict=True)]
        self._optimizer = type(runs[0].optimizer)(groups)  # type: ignore[call-arg]  # each optimizer has more options
        self._is_bound = False  # whether the states of the folds' own optimizers are views of the stacked ones
        self._counts: list[tuple[Tensor, list[Tensor]]] = []  # the step counts, and those of the own optimizers

    def set_gradients(self, gradients: list[Tensor]) -> Tensor:
        """Keep the gradients [folds, ...] for `step`, clipped as configured; return their norms [folds] before that."""
        torch._foreach_copy_(self._gradients, gradients)
        each = torch.stack([torch.linalg.vector_norm(flat, dim=1) for flat in self._flat_gradients])
        norms: Tensor = torch.linalg.vector_norm(each, dim=0)
        if (limit := self._config.clip_grad_norm) is not None:
            factors = (limit / (norms + 1e-6)).clamp_max(1.0)[:, None]  # as in `clip_grad_norm_`
            for flat in self._flat_gradients:
                flat.mul_(factors)
        if (limit := self._config.clip_grad_value) is not None:
            for flat in self._flat_gradients:
                flat.clamp_(-limit, limit)
        return norms

    def step(self) -> None:
        """Update all folds by the gradients of `set_gradients`."""
        rates = [[group["lr"] for group in run.optimizer.param_groups] for run in self._runs]
        steps = {run.step for run in self._runs}
        if any(own != rates[0] for own in rates) or len(steps) > 1 or 0 in steps:
            self._step_each()
            return
        if not self._is_bound:
            self._bind()
        for group, own in zip(self._optimizer.param_groups, self._runs[0].optimizer.param_groups, strict=True):
            group.update({key: value for key, value in own.items() if key != "params"})
        self._optimizer.step()

    def _step_each(self) -> None:
        self.release()
        for index, run in enumerate(self._runs):
            own = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
            for parameter, gradient in zip(own, self._gradients, strict=True):
                parameter.grad = gradient[index]
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=True)

    def release(self) -> None:
        """Write the step counts to the folds' own optimizers, before these are used or saved."""
        for stacked, own in self._counts:
            for count in own:
                count.copy_(stacked)
        self._counts, self._is_bound = [], False

    def _bind(self) -> None:
        """Stack the states of the folds' own optimizers, and make these states views of the stacked ones."""
        self._is_bound = True
        for number, (flat, group) in enumerate(zip(self._parameters, self._groups, strict=True)):
            own = [run.optimizer.param_groups[number]["params"] for run in self._runs]
            states = [[run.optimizer.state[p] for p in own[index]] for index, run in enumerate(self._runs)]
            for key, first in states[0][0].items():
                values = [[state[key] for state in fold] for fold in states]
                joined = first
                if key in _COUNTS:
                    joined = first.clone()  # the counts of all folds are equal
                    self._counts.append((joined, [count for fold in values for count in fold]))
                elif isinstance(first, Tensor):
                    joined = torch.stack([torch.cat([value.flatten() for value in fold]) for fold in values])
                    for position, view in enumerate(unflatten(joined, group).values()):
                        for fold, own_view in zip(states, view, strict=True):
                            fold[position][key] = own_view
                self._optimizer.state[flat][key] = joined


class FoldGroup:
    """Training of all folds of a trial at once.

    Each fold keeps its order of samples, schedule, weight average, gradient norm and metrics. All folds draw random
    numbers, for dropout and augmentation, from one stream. Steps in which the batches of the folds differ in shape, or
    in which a fold has no batch left, are taken one by one.

    Args:
        runs: the runs of the folds.
        folds: the stacked folds; the models of the runs become views of them.
    """

    def __init__(self, runs: Sequence[Run], folds: StackedFolds) -> None:
        self._runs, self._folds = runs, folds
        folds.bind()
        self._optimizer = StackedOptimizer(runs, folds)
        self._has_weights = hasattr(folds.modules[0].loss, "weigh")

    @kill_point("train epoch")
    def train_epoch(self, epoch: int, sums: Sequence[EpochSums], after_step: Callable[[], None]) -> None:
        """Train an epoch of all folds.

        Args:
            epoch: epoch (0-based).
            sums: sums of each fold, which contain the earlier steps of a resumed epoch.
            after_step: callback after each step; its exceptions end the epoch.
        """
        pairs = zip(self._runs, sums, strict=True)
        sources = [run.batch_source.iterate_batches(epoch, own.steps) for run, own in pairs]
        while any(batches := [next(source, None) for source in sources]):
            whole = [batch for batch in batches if batch is not None]
            if len(whole) == len(batches) and all(get_shapes(batch) == self._folds.shapes for batch in whole):
                self._step(whole, epoch, sums)
            else:
                self._step_each(batches, epoch, sums)
            after_step()
        for run, own in zip(self._runs, sums, strict=True):
            run.finite_guard.flush()
            own.compute()
        self.prepare_checkpoint()

    def prepare_checkpoint(self) -> None:
        """Update the parts of the runs' states that change in each step only for all folds together."""
        self._optimizer.release()

    def _step(self, batches: Sequence[Batch], epoch: int, sums: Sequence[EpochSums]) -> None:
        points = [own.begin_step(run, epoch) for run, own in zip(self._runs, sums, strict=True)]
        with torch.no_grad():
            gradients, losses, outputs = self._folds.compute(*self._folds.stack(batches))
            norms = self._optimizer.set_gradients(gradients)
            own_losses, own_norms = losses.unbind(), norms.unbind()
            for run, point, loss, norm in zip(self._runs, points, own_losses, own_norms, strict=True):
                run.finite_guard.check(point, loss, norm, scaled=False)
            self._optimizer.step()
        own_outputs = split_folds(outputs, len(batches))
        for index, (run, own, batch) in enumerate(zip(self._runs, sums, batches, strict=True)):
            run.schedule.step()
            run.weight_averaging.after_step()
            run.step += 1
            weight = compute_loss_weight(self._folds.modules[index].loss, batch.y) if self._has_weights else None
            own.add(Step(own_losses[index], own_outputs[index], batch.y, {}, weight), own_norms[index], batch.size)

    def _step_each(self, batches: Sequence[Batch | None], epoch: int, sums: Sequence[EpochSums]) -> None:
        self._optimizer.release()
        for run, own, batch in zip(self._runs, sums, batches, strict=True):
            if batch is not None:
                set_training_mode(run.model)
                own.step(run, [LazyBatch(batch.size, partial(Batch, *batch))], epoch)
                run.optimizer.zero_grad(set_to_none=True)
