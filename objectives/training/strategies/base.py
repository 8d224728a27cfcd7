"""The strategy interface, the strategy of a single process, and DDP."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.evaluation.step import Step, StepFunction
from hpsearch.objectives.training.ranks import Ranks
from hpsearch.objectives.training.reproducibility.seeds import get_rng_state, restore_rng_state


class Strategy:
    """Strategy of a single process, and base class of the strategies that `TrainConfig.strategy` names."""

    name: ClassVar[str] = "one process"

    def __init__(self, ranks: Ranks, config: TrainConfig) -> None:
        self._ranks, self._config = ranks, config

    def setup_model(self, model: nn.Module, *averages: nn.Module) -> None:
        """Distribute a model, and averages of its weights, over the ranks. Call it before building the optimizer."""

    def set_model(self, model: nn.Module, step_function: StepFunction) -> None:
        """Set the model and its step function. Call it before the first step, after all changes of parameters."""
        self._model, self._step_function = model, step_function

    def begin_epoch(self) -> None:
        """Prepare for an epoch, before which the objective may have frozen or unfrozen layers."""

    def step(self, batch: Batch, autocast: AbstractContextManager[None], *, more: bool = False) -> Step:  # noqa: ARG002 used by subclasses
        """Return the training step of a micro-batch; with `more`, further ones follow before the optimizer step."""
        return self._step_function(self._model, batch, autocast)

    def explain_sharding_errors(self) -> AbstractContextManager[None]:
        """Return a context that explains errors in code of the objective that uses a distributed model."""
        return nullcontext()

    def sync_buffers(self, *models: nn.Module) -> None:
        """Average running statistics of norms over ranks, and copy other buffers from rank 0, after an epoch."""
        if self._ranks.is_single_process:
            return
        for module in (module for model in models for module in model.modules()):
            statistics = ("running_mean", "running_var") if hasattr(module, "running_mean") else ()
            for name, buffer in module._buffers.items():
                if buffer is not None and name in statistics:
                    self._ranks.all_reduce_mean([buffer])
                elif buffer is not None:
                    self._ranks.broadcast_tensors([buffer])

    def full_state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict with unsharded tensors, for use on rank 0. All ranks must call it."""
        return state

    def local_state_dict(self, state: dict[str, Any], like: Mapping[Any, Any]) -> dict[str, Any]:  # noqa: ARG002 used by subclasses
        """Return this rank's part of an unsharded state dict; `like` contains this rank's current tensors by key."""
        return state

    def checkpoint_state(self, parts: dict[str, Any], shards_dir: Path | None) -> dict[str, Any]:  # noqa: ARG002 used by subclasses
        """Return a state for a checkpoint: with unsharded tensors, or with a manifest of shards in `shards_dir`."""
        return self.full_state_dict(parts)

    def load_checkpoint_state(self, kept: dict[str, Any], like: Mapping[Any, Any], path: Path | None) -> dict[str, Any]:
        """Return this rank's part of the checkpoint state `kept`.

        Args:
            kept: result of `checkpoint_state`.
            like: as for `local_state_dict`.
            path: folder with shards; None without shards.
        """
        if path is None:
            return self.local_state_dict(kept, like)
        from hpsearch.objectives.training.strategies import shards  # a slow import that few runs need

        return self.local_state_dict(shards.read_shards(kept, path), like)

    def scaling_efficiency(self) -> float | None:
        """Return the share of recent step time that is not spent waiting for other ranks; None if unknown."""
        return None

    def gradient_norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of each gradient [n], over all ranks."""
        return torch.stack(torch._foreach_norm(list(gradients))).float()

    def clip_gradients(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        """Scale the gradients down to a total norm of at most `limit`; return the norm before the scaling."""
        return nn.utils.clip_grad_norm_(parameters, limit, error_if_nonfinite=False)

    def gather_model(self, model: nn.Module) -> nn.Module:
        """Return the model with unsharded weights on the CPU, for use on rank 0."""
        return model.cpu()


class DDPStrategy(Strategy):
    """PyTorch's DistributedDataParallel (Li et al. 2020) around the step of a batch.

    DDP wraps the step instead of the model, so that it covers every method of the model that the step calls.
    """

    name = "ddp"
    _wrapped: DistributedDataParallel | None = None
    _trained: list[bool]

    def setup_model(self, model: nn.Module, *averages: nn.Module) -> None:  # noqa: ARG002 averages are not trained
        """Use batch norm that synchronizes its statistics over ranks, on GPUs only: PyTorch has none for CPUs."""
        if any(parameter.is_cuda for parameter in model.parameters()):
            nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch declares no types

    def begin_epoch(self) -> None:
        """Wrap the step again if other parameters are trained, because DDP registers them only at construction."""
        trained = [parameter.requires_grad for parameter in self._model.parameters()]
        if self._wrapped is not None and trained != self._trained:
            self._wrapped = None
        self._trained = trained

    def step(self, batch: Batch, autocast: AbstractContextManager[None], *, more: bool = False) -> Step:
        """Return the training step of a micro-batch; with `more`, gradients are not yet reduced over ranks."""
        if self._wrapped is None:
            self._wrapped = self._wrap(batch, autocast)
        with self._wrapped.no_sync() if more else nullcontext():
            step: Step = self._wrapped(batch, autocast)
        return step

    def _wrap(self, batch: Batch, autocast: AbstractContextManager[None]) -> DistributedDataParallel:
        unused = self._has_unused_parameters(batch, autocast)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames an option; 2.11 lacks the new name
            return DistributedDataParallel(
                _StepModule(self._model, self._step_function),
                broadcast_buffers=False,  # see `sync_buffers`
                find_unused_parameters=unused,  # the search for unused parameters takes time in each step
                gradient_as_bucket_view=True,
            )

    def _has_unused_parameters(self, batch: Batch, autocast: AbstractContextManager[None]) -> bool:
        """Return whether a step leaves parameters unused on any rank, by a test step whose effects are undone."""
        model, device = self._model, next(self._model.parameters()).device
        buffers, generators = {name: buffer.clone() for name, buffer in model.named_buffers()}, get_rng_state(device)
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


class _StepModule(nn.Module):
    """Step function as a module, which DDP can wrap."""

    def __init__(self, model: nn.Module, step_function: StepFunction) -> None:
        super().__init__()
        self.model, self._step_function = model, step_function

    def forward(self, batch: Batch, autocast: AbstractContextManager[None]) -> Step:
        return self._step_function(self.model, batch, autocast)
