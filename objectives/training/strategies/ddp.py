"""Each rank has the whole model and a share of each batch; gradients are summed while they are computed (DDP)."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.evaluation.step import Step, Stepping
from hpsearch.objectives.training.reproducibility.seeds import generators, restore_generators
from hpsearch.objectives.training.strategies.base import Strategy


class Replicated(Strategy):
    """Torch's DistributedDataParallel (Li et al. 2020) around the whole step of a batch.

    Around the step, and not the model: whatever the step calls of the model, such as a method of its own, is seen.
    """

    name = "ddp"
    _wrapped: DistributedDataParallel | None = None
    _trained: list[bool]

    def place(self, model: nn.Module, *averages: nn.Module) -> None:  # noqa: ARG002 judged, and never trained
        """Let batch norm take its statistics from all ranks' shares, where torch can: on GPUs."""
        if any(parameter.is_cuda for parameter in model.parameters()):
            nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch names no types

    def begin_epoch(self) -> None:
        """Wrap anew where other layers are trained than before: DDP takes note of them once."""
        trained = [parameter.requires_grad for parameter in self._model.parameters()]
        if self._wrapped is not None and trained != self._trained:
            self._wrapped = None
        self._trained = trained

    def step(self, batch: Batch, autocast: AbstractContextManager[None], *, more: bool = False) -> Step:
        """The step of a micro-batch in training; gradients are summed over ranks unless there are `more`."""
        if self._wrapped is None:
            self._wrapped = self._wrap(batch, autocast)
        with self._wrapped.no_sync() if more else nullcontext():
            step: Step = self._wrapped(batch, autocast)
        return step

    def _wrap(self, batch: Batch, autocast: AbstractContextManager[None]) -> DistributedDataParallel:
        unused = self._leaves_out(batch, autocast)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name, which 2.11 does not know
            return DistributedDataParallel(
                _Stepped(self._model, self._stepping),
                broadcast_buffers=False,  # see `agree`
                find_unused_parameters=unused,  # it costs a look at the graph in each step
                gradient_as_bucket_view=True,
            )

    def _leaves_out(self, batch: Batch, autocast: AbstractContextManager[None]) -> bool:
        """Whether a step uses only some of the parameters, on any rank: tried, without a trace, on the first batch."""
        model, device = self._model, next(self._model.parameters()).device
        kept, drawn = {name: buffer.clone() for name, buffer in model.named_buffers()}, generators(device)
        self._stepping(model, batch, autocast).loss.backward()  # type: ignore[no-untyped-call]  # as above
        unused = [p.requires_grad and p.grad is None for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        restore_generators(drawn, device)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
        return any(self._ranks.each(any(unused)))

    def efficiency(self) -> float | None:
        """Forward and backward pass, as a share of these and of the sums over ranks that they do not hide.

        Torch measures some steps: the 10th, 20th and so on, ever more rarely.
        """
        if self._wrapped is None:
            return None
        found = self._wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # as above
        compute = found.get("avg_forward_compute_time", 0) + found.get("avg_backward_compute_time", 0)
        exposed = found.get("avg_backward_comm_time", 0) - found.get("avg_backward_compute_comm_overlap_time", 0)
        return compute / (compute + max(exposed, 0)) if compute > 0 else None


class _Stepped(nn.Module):
    """The step of a batch as a module, which DDP can wrap."""

    def __init__(self, model: nn.Module, stepping: Stepping) -> None:
        super().__init__()
        self.model, self._stepping = model, stepping

    def forward(self, batch: Batch, autocast: AbstractContextManager[None]) -> Step:
        """The step."""
        return self._stepping(self.model, batch, autocast)
