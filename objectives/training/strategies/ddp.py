"""Distributed data parallel training with torch's DistributedDataParallel."""

from __future__ import annotations

import dataclasses
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.evaluation.step import Step, StepFunction
from hpsearch.objectives.training.reproducibility.seeds import get_rng_state, restore_rng_state
from hpsearch.objectives.training.strategies.base import Strategy


class DDPStrategy(Strategy):
    """PyTorch's DistributedDataParallel (Li et al. 2020) around the step of a batch.

    DDP wraps the step instead of the model, so that it covers every method of the model that the step calls.
    """

    name = "ddp"
    _wrapped: DistributedDataParallel | None = None
    _trained: list[bool]
    _norms: list[SyncBatchNorm]

    def setup_model(self, model: nn.Module, *averages: nn.Module) -> None:
        """Use batch norm that synchronizes its statistics over ranks, on GPUs only: PyTorch has none for CPUs."""
        super().setup_model(model, *averages)
        if any(parameter.is_cuda for parameter in model.parameters()):
            nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch declares no types
        norms = [module for module in model.modules() if type(module) is nn.SyncBatchNorm]
        for norm in norms:
            norm.__class__ = SyncBatchNorm
        self._norms = cast("list[SyncBatchNorm]", norms)

    def begin_epoch(self) -> None:
        """Wrap the step again if other parameters are trained, because DDP registers them only at construction."""
        trained = [parameter.requires_grad for parameter in self._model.parameters()]
        if self._wrapped is not None and trained != self._trained:
            self._wrapped = None
        self._trained = trained

    def step(
        self, batch: Batch, autocast: AbstractContextManager[None], *, more: bool = False, has_samples: bool = True
    ) -> Step:
        """Return the training step of a micro-batch; with `more`, gradients are not yet reduced over ranks."""
        for norm in self._norms:
            norm.has_samples = has_samples
        if self._wrapped is None:
            self._wrapped = self._wrap(batch, autocast)
        with self._wrapped.no_sync() if more else nullcontext():
            result: tuple[Tensor, Step] = self._wrapped(batch, autocast)
        loss, step = result
        return dataclasses.replace(step, loss=loss)

    def _wrap(self, batch: Batch, autocast: AbstractContextManager[None]) -> DistributedDataParallel:
        unused = self._config.find_unused_parameters
        if unused is None and not self._config.static_graph:
            unused = self._has_unused_parameters(batch, autocast)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames an option; 2.11 lacks the new name
            return DistributedDataParallel(
                _StepModule(self._model, self._step_function),
                broadcast_buffers=False,  # see `sync_buffers`
                find_unused_parameters=bool(unused),  # the search for unused parameters takes time in each step
                static_graph=self._config.static_graph,
                bucket_cap_mb=self._config.bucket_cap_mb,
                gradient_as_bucket_view=True,
            )

    def _has_unused_parameters(self, batch: Batch, autocast: AbstractContextManager[None]) -> bool:
        """Return whether a step leaves parameters unused on any rank, by a test step whose effects are undone."""
        model, device = self._model, next(iter(self._model.parameters())).device
        buffers, generators = {name: buffer.clone() for name, buffer in model.named_buffers()}, get_rng_state(device)
        with torch.compiler.set_stance(
            "force_eager"
        ):  # a graph that is compiled outside of DDP would be used in it too
            self._step_function(model, batch, autocast).loss.backward()  # type: ignore[no-untyped-call]  # as above
        unused = [p.requires_grad and p.grad is None for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        restore_rng_state(generators, device)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        return any(self._ranks.all_gather_object(any(unused)))

    def scaling_efficiency(self) -> float | None:
        """Return computation time / (computation time + communication time that does not overlap with computation).

        PyTorch measures only some steps: the 10th, the 20th and so on, at increasing intervals.
        """
        if self._wrapped is None:
            return None
        found = self._wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # as above
        compute = found.get("avg_forward_compute_time", 0) + found.get("avg_backward_compute_time", 0)
        exposed = found.get("avg_backward_comm_time", 0) - found.get("avg_backward_compute_comm_overlap_time", 0)
        return compute / (compute + max(exposed, 0)) if compute > 0 else None


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch norm over all ranks. A rank without samples of a micro-batch has one sample, which it does not count.

    Attributes:
        has_samples: whether this rank has samples of the micro-batch.
    """

    has_samples: bool = True

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 torch's name
        """Return the normalized input [samples, channels, ...]; without samples of its own, the input."""
        if self.has_samples or not self.training:
            return super().forward(input)
        # Without a sample, this rank still takes part in the communication of both passes. All parameters get a
        # gradient, for which DDP waits.
        nothing = super().forward(input[:0]).sum() + sum(0 * parameter.sum() for parameter in self.parameters())
        return input + nothing.to(input.dtype)


class _StepModule(nn.Module):
    """Step function as a module, which DDP can wrap."""

    def __init__(self, model: nn.Module, step_function: StepFunction) -> None:
        super().__init__()
        self.model, self._step_function = model, step_function

    def forward(self, batch: Batch, autocast: AbstractContextManager[None]) -> tuple[Tensor, Step]:
        step = self._step_function(self.model, batch, autocast)
        return step.loss, step  # with a static graph, DDP needs a tensor to begin its work in the first backward pass
