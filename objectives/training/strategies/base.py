"""The strategy interface, the strategy of a single process, and DDP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.data.tree import map_tensors
from hpsearch.objectives.training.evaluation.step import Step, StepFunction
from hpsearch.objectives.training.ranks import Ranks


class Strategy:
    """Strategy of a single process, and base class of the strategies that `TrainConfig.strategy` names."""

    name: ClassVar[str] = "one process"
    can_cache_casts: ClassVar[bool] = True  # whether a device has the memory for low-precision casts of all weights
    compiles_layers: ClassVar[bool] = False  # whether each layer is compiled separately

    _device: torch.device

    def __init__(self, ranks: Ranks, config: TrainConfig) -> None:
        self._ranks, self._config = ranks, config

    def setup_model(self, model: nn.Module, *averages: nn.Module) -> None:  # noqa: ARG002 used by subclasses
        """Distribute a model, and averages of its weights, over the ranks. Call it before building the optimizer."""
        self._device = next(iter(model.parameters())).device

    def set_model(self, model: nn.Module, step_function: StepFunction) -> None:
        """Set the model and its step function. Call it before the first step, after all changes of parameters."""
        self._model, self._step_function = model, step_function

    def begin_epoch(self) -> None:
        """Prepare for an epoch, before which the objective may have frozen or unfrozen layers."""

    def step(
        self,
        batch: Batch,
        autocast: AbstractContextManager[None],
        *,
        more: bool = False,  # noqa: ARG002 used by subclasses
        has_samples: bool = True,  # noqa: ARG002 as above
    ) -> Step:
        """Return the training step of a micro-batch.

        Args:
            batch: this rank's samples of the micro-batch.
            autocast: context of the forward pass.
            more: whether further micro-batches follow before the optimizer step.
            has_samples: False if the batch is one sample of another rank, because this rank has none.
        """
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

    def local_state_dict(self, state: dict[str, Any], like: Mapping[Any, Any]) -> dict[str, Any]:
        """Return this rank's part of rank 0's unsharded state dict.

        Rank 0 sends one tensor at a time, because pickling the state for each rank would need several times its memory.

        Args:
            state: the state dict; used on rank 0 only.
            like: this rank's current tensors by key. A tensor of the state is placed and sharded as the tensor of equal
                shape at its key, or at the key of a mapping that contains it.
        """
        if self._ranks.is_single_process:
            return state
        outline = map_tensors(_make_outline, state) if self._ranks.is_rank_zero else None
        return cast("dict[str, Any]", self._scatter(state, self._ranks.broadcast_object(outline), like))

    def _scatter(self, value: Any, outline: Any, like: Any) -> Any:
        """Return this rank's part of rank 0's value; `outline` has a meta tensor for each tensor of the value."""
        if isinstance(outline, Tensor):
            given = (value if self._ranks.is_rank_zero else torch.empty_like(outline, device="cpu")).to(self._device)
            is_like = isinstance(like, Tensor) and like.shape == outline.shape
            if is_like and isinstance(like, DTensor):
                return distribute_tensor(given, like.device_mesh, like.placements).to(like.device)
            self._ranks.broadcast_tensors([given])
            return given if is_like and outline.ndim else given.cpu()  # optimizers count their steps on the CPU
        if isinstance(outline, dict):
            found = {}
            for key, inner in outline.items():
                below = like[key] if isinstance(like, Mapping) and key in like else like
                found[key] = self._scatter(value[key] if self._ranks.is_rank_zero else None, inner, below)
            return found
        if isinstance(outline, (list, tuple)):
            values = value if self._ranks.is_rank_zero else [None] * len(outline)
            return type(outline)(self._scatter(one, inner, like) for one, inner in zip(values, outline, strict=True))
        return outline

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


def _make_outline(tensor: Tensor) -> Tensor:
    """Return a tensor with the same shape, strides and type that has no memory."""
    return torch.empty_like(tensor, device="meta")
