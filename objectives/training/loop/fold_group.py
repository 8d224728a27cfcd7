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
from hpsearch.objectives.training.loop.stacked_folds import (
    StackedFolds,
    Tensors,
    flatten,
    get_shapes,
    split_folds,
    unflatten,
)

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
        self._runs, self._groups = runs, folds.groups
        self._parameters = [nn.Parameter(flat) for flat in folds.flat]
        own = [run.optimizer.param_groups for run in runs]
        groups = [{**group, "params": [flat]} for group, flat in zip(own[0], self._parameters, strict=True)]
        self._optimizer = type(runs[0].optimizer)(groups)  # type: ignore[call-arg]  # each optimizer has more options
        self._counts: list[tuple[Tensor, list[Tensor]]] = []
        self._is_bound = self._has_counts = False  # the step counts are here, or in the folds' own optimizers
        if all(run.step for run in runs):
            self._bind_state()

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Update all folds by the gradients [folds, values] of each parameter group."""
        rates = [[group["lr"] for group in run.optimizer.param_groups] for run in self._runs]
        is_equal = all(own == rates[0] for own in rates) and len({run.step for run in self._runs}) == 1
        if not (self._is_bound and is_equal):
            self._step_each(gradients)
            return
        for group, own in zip(self._optimizer.param_groups, self._runs[0].optimizer.param_groups, strict=True):
            group.update({key: value for key, value in own.items() if key != "params"})
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        if not self._has_counts:
            for stacked, counts in self._counts:
                stacked.copy_(counts[0])  # the counts of all folds are equal
            self._has_counts = True
        self._optimizer.step()

    def _step_each(self, gradients: Sequence[Tensor]) -> None:
        for number, (flat, group) in enumerate(zip(gradients, self._groups, strict=True)):
            by_name = unflatten(flat, group).values()
            for index, run in enumerate(self._runs):
                for parameter, gradient in zip(run.optimizer.param_groups[number]["params"], by_name, strict=True):
                    parameter.grad = gradient[index]
        self.write_counts()
        for run in self._runs:
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=True)
        if not self._is_bound:
            self._bind_state()

    def write_counts(self) -> None:
        """Copy the step counts to the folds' own optimizers, before these are used or saved."""
        if self._has_counts:
            for stacked, own in self._counts:
                for count in own:
                    count.copy_(stacked)
        self._has_counts = False

    def _bind_state(self) -> None:
        """Stack the states of the folds' own optimizers, and make these states views of the stacked ones."""
        self._is_bound = True
        for number, (flat, group) in enumerate(zip(self._parameters, self._groups, strict=True)):
            own = [run.optimizer.param_groups[number]["params"] for run in self._runs]
            states = [[run.optimizer.state[p] for p in own[index]] for index, run in enumerate(self._runs)]
            for key, first in states[0][0].items():
                values = [[state[key] for state in fold] for fold in states]
                joined = first
                if key in _COUNTS:
                    joined = first.clone()
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
        for run in self._runs:
            set_training_mode(run.model)
        sources = [run.batch_source.iterate_steps(epoch, own.steps) for run, own in zip(self._runs, sums, strict=True)]
        while any(found := [next(source, None) for source in sources]):
            batches = [None if micro_batches is None else micro_batches[0].load() for micro_batches in found]
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
        self._optimizer.write_counts()

    def _step(self, batches: Sequence[Batch], epoch: int, sums: Sequence[EpochSums]) -> None:
        points = [own.begin_step(run, epoch) for run, own in zip(self._runs, sums, strict=True)]
        with torch.no_grad():
            gradients, (losses, outputs) = self._folds.compute(
                self._folds.trained, self._folds.constants, *self._folds.stack(batches)
            )
            clipped, norms = self._clip(gradients)
            own_losses, own_norms = losses.unbind(), norms.unbind()
            for run, point, loss, norm in zip(self._runs, points, own_losses, own_norms, strict=True):
                run.finite_guard.check(point, loss, norm, scaled=False)
            self._optimizer.step(clipped)
        own_outputs = split_folds(outputs, len(batches))
        for index, (run, own, batch) in enumerate(zip(self._runs, sums, batches, strict=True)):
            run.schedule.step()
            run.weight_averaging.after_step()
            run.step += 1
            weight = compute_loss_weight(self._folds.modules[index].loss, batch.y) if self._has_weights else None
            own.add(Step(own_losses[index], own_outputs[index], batch.y, {}, weight), own_norms[index], batch.size)

    def _step_each(self, batches: Sequence[Batch | None], epoch: int, sums: Sequence[EpochSums]) -> None:
        self._optimizer.write_counts()
        for run, own, batch in zip(self._runs, sums, batches, strict=True):
            if batch is not None:
                own.step(run, [LazyBatch(batch.size, partial(Batch, *batch))], epoch)
                run.optimizer.zero_grad(set_to_none=True)

    def _clip(self, gradients: Tensors) -> tuple[list[Tensor], Tensor]:
        """Return the gradients [folds, values] of each parameter group, clipped as configured.

        The second result is the norm of the gradients of each fold [folds] before the clipping.
        """
        config = self._runs[0].config
        flat = [flatten({name: gradients[name] for name in group}) for group in self._folds.groups]
        norms = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each, dim=1) for each in flat]), dim=0)
        if (limit := config.clip_grad_norm) is not None:
            factors = (limit / (norms + 1e-6)).clamp_max(1.0)[:, None]  # as in `clip_grad_norm_`
            flat = [each * factors for each in flat]
        if (limit := config.clip_grad_value) is not None:
            flat = [each.clamp(-limit, limit) for each in flat]
        return flat, norms
