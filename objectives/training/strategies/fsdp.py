"""FSDP2 shards weights, gradients and optimizer state over ranks; a layer is unsharded while it computes."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hpsearch.objectives.errors import ObjectiveError, explain_copy_errors, get_first_line
from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.data.tree import map_tensors
from hpsearch.objectives.training.evaluation.step import Step
from hpsearch.objectives.training.optimizers.optimizer import list_layers
from hpsearch.objectives.training.strategies.base import Strategy

log = logging.getLogger("hpsearch.objectives.training")


class FSDPStrategy(Strategy):
    """PyTorch's `fully_shard` (Zhao et al. 2023), applied to each layer and to parameters outside of layers."""

    name = "fsdp"
    can_cache_casts = False  # the cache would hold the whole model on each device
    compiles_layers = True  # a graph of the whole model would end at each layer, whose weights are gathered by a hook
    _unsharded: nn.Module
    _mesh: DeviceMesh
    _has_warned = False

    def setup_model(self, model: nn.Module, *averages: nn.Module) -> None:
        """Shard a model, and averages of its weights. Call it before building the optimizer."""
        super().setup_model(model, *averages)
        self._unsharded = _without_weights(model)
        self._mesh = self._make_mesh()
        for each in (model, *averages):
            try:
                self._shard(each)
            except (ValueError, NotImplementedError, AssertionError) as error:
                detail = get_first_line(error)
                raise ObjectiveError(f"strategy 'fsdp' cannot shard the model: {detail}; set strategy='ddp'") from error

    def _make_mesh(self) -> DeviceMesh:
        """Return the mesh of the devices: one-dimensional, or with replicas of shards of the weights (HSDP)."""
        world, shards = self._ranks.world_size, self._config.shard_mesh_size
        if shards is None or shards >= world:
            return self._ranks.make_device_mesh((world,))
        if world % shards:
            raise ObjectiveError(f"shard_mesh_size={shards} must divide the number of devices, {world}; change one")
        return self._ranks.make_device_mesh((world // shards, shards))

    def _shard(self, model: nn.Module) -> None:
        offload = self._config.cpu_offload
        # Training uses autocast, and evaluation fp32, as in a single process. With a `param_dtype` of bf16, evaluation
        # would use bf16 weights, and raw inputs would be cast before the model scales them.
        reduce_dtype = torch.float32 if self._config.precision == "bf16" else None
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        settings: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": True,  # the root too: averages and checkpoints read it after evaluations
            "mp_policy": policy,
            "offload_policy": CPUOffloadPolicy(self._device.type == "cuda") if offload else OffloadPolicy(),
        }
        for layer in list_layers(model):
            if layer is not model and _is_separately_shardable(layer, model):
                fully_shard(layer, **settings)
        fully_shard(model, **settings)
        # This makes the model the root even if a custom step calls its layers first. Weights that are first unsharded
        # in inference mode could not be trained afterwards.
        model._get_fsdp_state()._lazy_init()  # type: ignore[operator]  # torch has no public API for it
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()

    def step(
        self, batch: Batch, autocast: AbstractContextManager[None], *, more: bool = False, has_samples: bool = True
    ) -> Step:
        """Return the training step of a micro-batch; with `more`, gradients are not yet reduced over ranks."""
        model = cast("FSDPModule", self._model)
        if self._config.gradient_accumulation_steps > 1:
            model.set_requires_gradient_sync(not more or self._config.sync_each_micro_batch)
        # The backward pass begins with the weights of the root, and reshards them.
        recurse = not self._config.reshard_after_forward
        model.set_reshard_after_forward(reshard_after_forward=False, recurse=recurse)
        try:
            with self.explain_sharding_errors():
                return super().step(batch, autocast, more=more, has_samples=has_samples)
        finally:
            model.set_reshard_after_forward(reshard_after_forward=True, recurse=recurse)

    @contextmanager
    def explain_sharding_errors(self) -> Iterator[None]:
        """Return a context that explains errors in code of the objective that uses a sharded weight."""
        try:
            yield
        except (ObjectiveError, RuntimeError) as error:
            if "DTensor" not in str(error):
                raise
            where = str(error).partition(" RuntimeError:")[0] if isinstance(error, ObjectiveError) else "the step:"
            raise ObjectiveError(
                f"{where} a weight is used outside of its layer's forward, where strategy 'fsdp' shards it; call the "
                "model or the layer instead of methods that use weights, or set strategy='ddp'"
            ) from error

    def full_state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict with unsharded CPU tensors, gathered one by one; tensors are empty except on rank 0."""
        return cast("dict[str, Any]", map_tensors(self._gather, state))

    def _gather(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        part: Any = tensor.detach().to(self._device)
        full = part.full_tensor()
        return full.to("cpu", copy=True) if self._ranks.is_rank_zero else torch.empty(0)  # the copy has no padding

    def checkpoint_state(self, parts: dict[str, Any], shards_dir: Path | None) -> dict[str, Any]:
        """Return a state for a checkpoint; if it is large, each rank writes its shards to `shards_dir`."""
        from hpsearch.objectives.training.strategies import shards  # a slow import that few runs need

        if shards_dir is not None and shards.should_shard(parts, self._config.shard_checkpoint_above_gib):
            written = shards.write_shards(parts, shards_dir, self._ranks)
            if written is not None:
                return written
            if self._ranks.is_rank_zero and not self._has_warned:
                log.warning("checkpoints are not sharded: not all ranks see %s; rank 0 writes the state", shards_dir)
            self._has_warned = True
        return self.full_state_dict(parts)

    def load_checkpoint_state(self, kept: dict[str, Any], like: Mapping[Any, Any], path: Path | None) -> dict[str, Any]:
        """Return this rank's part of the checkpoint state `kept`; see `Strategy.load_checkpoint_state`."""
        if path is None:
            return self.local_state_dict(kept, like)
        from hpsearch.objectives.training.strategies import shards

        if all(self._ranks.all_gather_object(path.is_dir())):
            return shards.read_shards(kept, path, like, self._ranks)
        return self.local_state_dict(shards.read_shards(kept, path) if self._ranks.is_rank_zero else kept, like)

    def gradient_norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of each gradient [n], over all ranks."""
        own = torch.stack(torch._foreach_norm([_local_part(gradient) for gradient in gradients])).float()
        replicas = self._mesh.size(0) if self._mesh.ndim > 1 else 1
        return self._ranks.all_reduce_sum(own.to(self._device).square_()).div_(replicas).sqrt_()

    def clip_gradients(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        """Scale the gradients down to a total norm of at most `limit`; return the norm before the scaling."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm: Tensor = self.gradient_norms(gradients).norm()
        if limit < float("inf"):
            parts = [_local_part(gradient) for gradient in gradients]
            torch._foreach_mul_(parts, (limit / (norm + 1e-6)).clamp(max=1.0).to(parts[0].device))
        return norm

    def gather_model(self, model: nn.Module) -> nn.Module:
        """Return the unsharded model on the CPU; on ranks other than rank 0 it has no weights."""
        state, unsharded = self.full_state_dict(model.state_dict()), self._unsharded
        if not self._ranks.is_rank_zero:
            return unsharded
        parameters: dict[int, nn.Parameter] = {}
        for (name, module), live in zip(unsharded.named_modules(), model.modules(), strict=True):
            for key, parameter in module._parameters.items():
                if parameter is not None:  # shared parameters stay shared
                    weight = state[f"{name}.{key}" if name else key]
                    full = nn.Parameter(weight, requires_grad=parameter.requires_grad)
                    module._parameters[key] = parameters.setdefault(id(parameter), full)
            module._buffers.update(live._buffers)
            # Attributes that the objective changed during the training.
            vars(module).update({k: v for k, v in vars(live).items() if k in vars(module) and isinstance(v, _PLAIN)})
        return unsharded.cpu()


_PLAIN = (bool, int, float, str)


def _local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_separately_shardable(layer: nn.Module, model: nn.Module) -> bool:
    """Return whether a layer has a `forward`, and shares no weight with the rest of the model."""
    if type(layer).forward is nn.Module.forward:
        return False
    in_model, in_layer = _count_references(model), _count_references(layer)
    return all(in_model[key] == count for key, count in in_layer.items())


def _count_references(model: nn.Module) -> Counter[int]:
    """Count the modules that contain each parameter, by the parameter's id."""
    return Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)


def _without_weights(model: nn.Module) -> nn.Module:
    """Copy a model with parameters on the meta device, which take no memory."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    with explain_copy_errors("strategy 'fsdp'"):
        return copy.deepcopy(model, memo)
