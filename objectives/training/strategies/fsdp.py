"""Each rank has a part of every weight, gradient and optimizer state; a layer is whole while it computes (FSDP2)."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.data.tree import map_tensors
from hpsearch.objectives.training.evaluation.step import Step
from hpsearch.objectives.training.optimizers.optimizer import list_layers
from hpsearch.objectives.training.strategies.base import Strategy

log = logging.getLogger("hpsearch.objectives.training")


class FSDPStrategy(Strategy):
    """Torch's fully_shard (Zhao et al. 2023) of each layer, and of what is in none.

    Every micro-batch sums its gradients over ranks: added up whole they would take the memory that sharding saves.
    """

    name = "fsdp"
    _device: torch.device
    _unsharded: nn.Module
    _has_warned = False

    def setup_model(self, model: nn.Module, *averages: nn.Module) -> None:
        """Shard a model, and averages of its weights, before the optimizer is made."""
        self._device = next(model.parameters()).device
        self._unsharded = _without_weights(model)
        for each in (model, *averages):
            try:
                self._shard(each)
            except (ValueError, NotImplementedError, AssertionError) as error:
                detail = str(error).strip().splitlines()[0]
                raise ObjectiveError(f"strategy 'fsdp' cannot shard the model: {detail}; 'ddp' can train it") from error

    def _shard(self, model: nn.Module) -> None:
        offload = self._config.cpu_offload
        # Autocast casts each operation in training, and evaluation is in fp32 as in one process: weights gathered in
        # bf16 would change the evaluation, and raw inputs would be cast before the model scales them.
        policy = MixedPrecisionPolicy(
            reduce_dtype=torch.float32 if self._config.precision == "bf16" else None, cast_forward_inputs=False
        )
        settings: dict[str, Any] = {
            "mesh": init_device_mesh(self._device.type, (self._ranks.world_size,)),
            "reshard_after_forward": True,  # the root too: averages and checkpoints look at it between two steps
            "mp_policy": policy,
            "offload_policy": CPUOffloadPolicy(self._device.type == "cuda") if offload else OffloadPolicy(),
        }
        for layer in list_layers(model):
            if layer is not model and _is_separately_shardable(layer, model):
                fully_shard(layer, **settings)
        fully_shard(model, **settings)
        # The model is the root also where an own step calls its layers first. And weights that are whole for the first
        # time in an evaluation, in inference mode, could not be trained afterwards.
        model._get_fsdp_state()._lazy_init()  # type: ignore[operator]  # torch has no public word for it
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()

    def step(self, batch: Batch, autocast: AbstractContextManager[None], *, more: bool = False) -> Step:
        """The step of a micro-batch in training."""
        with self.explain_sharding_errors():
            return super().step(batch, autocast, more=more)

    @contextmanager
    def explain_sharding_errors(self) -> Iterator[None]:
        """Explain errors of the objective's code that uses a sharded weight."""
        try:
            yield
        except (ObjectiveError, RuntimeError) as error:
            if "DTensor" not in str(error):
                raise
            where = str(error).partition(" RuntimeError:")[0] if isinstance(error, ObjectiveError) else "the step:"
            raise ObjectiveError(
                f"{where} a weight is used outside its layer's call, where strategy 'fsdp' has only a part of it: call "
                "the model, or the layer, and no method that uses weights; or set strategy='ddp'"
            ) from error

    def full_state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict whose tensors are whole, on the CPU of rank 0, one gathered after the other; empty on others."""
        return cast("dict[str, Any]", map_tensors(self._gather, state))

    def _gather(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        part: Any = tensor.detach().to(self._device)
        whole = part.full_tensor()
        return whole.to("cpu", copy=True) if self._ranks.is_rank_zero else torch.empty(0)  # without its padding

    def local_state_dict(self, state: dict[str, Any], like: Mapping[Any, Any]) -> dict[str, Any]:
        """What this rank has of rank 0's state dict with whole tensors, one dealt out after the other."""
        outline = self._ranks.broadcast_object(map_tensors(_TensorSpec.of, state) if self._ranks.is_rank_zero else None)
        return cast("dict[str, Any]", self._scatter(state, outline, like))

    def _scatter(self, value: Any, outline: Any, like: Any) -> Any:
        """Return this rank's part of rank 0's value, of which all ranks have the outline.

        `like` is the tensor whose sharding its tensors of the same shape get, or such tensors by the keys of the value.
        """
        if isinstance(outline, _TensorSpec):
            given = value.to(self._device) if self._ranks.is_rank_zero else outline.empty(self._device)
            if isinstance(like, DTensor) and like.shape == outline.shape:
                return distribute_tensor(given, like.device_mesh, like.placements).to(like.device)
            self._ranks.broadcast_tensors([given])
            return given.cpu()
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

    def checkpoint_state(self, parts: dict[str, Any], place: Path | None) -> dict[str, Any]:
        """What a checkpoint has of a state: where it is large, each rank writes its own part to `place`."""
        from hpsearch.objectives.training.strategies import shards  # only here: see `Strategy.restored`

        if place is not None and shards.sharded_bytes(parts) > self._config.shard_checkpoint_above_gib * 2**30:
            written = shards.write_shards(parts, place, self._ranks)
            if written is not None:
                return written
            if self._ranks.is_rank_zero and not self._has_warned:
                log.warning(
                    "checkpoints are gathered in rank 0's memory, for all their size: not all ranks see %s, and parts "
                    "are written where they do",
                    place,
                )
            self._has_warned = True
        return self.full_state_dict(parts)

    def load_checkpoint_state(
        self, kept: dict[str, Any], like: Mapping[Any, Any], folder: Path | None
    ) -> dict[str, Any]:
        """What this rank has of what `kept` gave; `like` as of `own`."""
        if folder is None:
            return self.local_state_dict(kept, like)
        from hpsearch.objectives.training.strategies import shards

        if all(self._ranks.all_gather_object(folder.is_dir())):
            return shards.read_shards(kept, folder, like, self._ranks)
        return self.local_state_dict(shards.read_shards(kept, folder) if self._ranks.is_rank_zero else kept, like)

    def gradient_norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of each gradient [n], over all ranks."""
        own = torch.stack(torch._foreach_norm([_local_part(gradient) for gradient in gradients])).float()
        return self._ranks.all_reduce_sum(own.to(self._device).square_()).sqrt_()

    def clip_gradients(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        """Scales the gradient down to a norm of `limit`; its norm before that."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm: Tensor = self.gradient_norms(gradients).norm()
        if limit < float("inf"):
            parts = [_local_part(gradient) for gradient in gradients]
            torch._foreach_mul_(parts, (limit / (norm + 1e-6)).clamp(max=1.0).to(parts[0].device))
        return norm

    def gather_model(self, model: nn.Module) -> nn.Module:
        """The model with whole weights on the CPU, as if it had never been sharded; on rank 0, without on others."""
        state, made = self.full_state_dict(model.state_dict()), self._unsharded
        if not self._ranks.is_rank_zero:
            return made
        held: dict[int, nn.Parameter] = {}
        for (name, module), live in zip(made.named_modules(), model.modules(), strict=True):
            for key, parameter in module._parameters.items():
                if parameter is not None:  # one that several modules share stays one
                    weight = state[f"{name}.{key}" if name else key]
                    module._parameters[key] = held.setdefault(
                        id(parameter), nn.Parameter(weight, requires_grad=parameter.requires_grad)
                    )
            module._buffers.update(live._buffers)
            # What the objective switched as epochs went.
            vars(module).update({k: v for k, v in vars(live).items() if k in vars(module) and isinstance(v, _SWITCHES)})
        return made.cpu()


_SWITCHES = (bool, int, float, str)


class _TensorSpec(NamedTuple):
    """A tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorSpec:
        return cls(tensor.shape, tensor.dtype)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def _local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_separately_shardable(layer: nn.Module, model: nn.Module) -> bool:
    """Whether a layer can be sharded by itself: it is called, and shares no weight with the rest of the model."""
    if type(layer).forward is nn.Module.forward:
        return False
    anywhere, within = _count_references(model), _count_references(layer)
    return all(anywhere[key] == count for key, count in within.items())


def _count_references(model: nn.Module) -> Counter[int]:
    """How many modules hold each parameter."""
    return Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)


def _without_weights(model: nn.Module) -> nn.Module:
    """Copy a model; the parameters of the copy take no memory."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever the parts of somebody's model raise
        detail = (str(error).strip().splitlines() or ["no detail"])[0]
        raise ObjectiveError(
            f"strategy 'fsdp' needs a model that copy.deepcopy copies: {type(error).__name__}: {detail}"
        ) from error
