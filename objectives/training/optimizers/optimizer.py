"""Build optimizers: parameter groups, layer-wise learning rates, SAM, gradient scaling."""

from __future__ import annotations

import importlib
import math
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from hpsearch.objectives.errors import ObjectiveError, get_first_line
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.short_lists import join_first

# Normalization layers by type, because layers in a Sequential have no meaningful names.
NORM_LAYERS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
_CONTAINERS = (nn.Sequential, nn.ModuleList)


class ParameterWithDepth(NamedTuple):
    """A trainable parameter with its module and the depth of its layer, which is 0 at the input."""

    parameter: nn.Parameter
    module: nn.Module
    depth: int


def list_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers with trainable parameters in the order of registration, the input first.

    The children of containers and of the model are layers. Any other module, such as a residual block, is one layer,
    unless it contains a ModuleList, like an encoder with its blocks.
    """
    found = [layer for child in model.children() for layer in _iterate_layers(child) if _is_trainable(layer)]
    if not found:
        return [model]
    if len(found) == 1 and any(_is_trainable(child) for child in found[0].children()):
        return list_layers(found[0])  # a wrapper around the network
    return found


def list_parameters(model: nn.Module) -> list[ParameterWithDepth]:
    """Return every trainable parameter once, with its depth.

    A norm has the depth of the layer before it. Parameters outside of layers, such as a class token, have depth 0.
    """
    depths: dict[int, int] = {}
    depth = -1
    for layer in list_layers(model):
        if depth < 0 or not isinstance(layer, NORM_LAYERS):
            depth += 1
        for parameter in layer.parameters():
            depths.setdefault(id(parameter), depth)
    seen: set[int] = set()
    result = []
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                result.append(ParameterWithDepth(parameter, module, depths.get(id(parameter), 0)))
    return result


def _iterate_layers(module: nn.Module) -> Iterator[nn.Module]:
    has_module_list = any(isinstance(child, nn.ModuleList) and _is_trainable(child) for child in module.children())
    if isinstance(module, _CONTAINERS) or has_module_list:
        for child in module.children():
            yield from _iterate_layers(child)
    else:
        yield module


def _is_trainable(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


ParameterGroups = list[dict[str, Any]]
Factory = Callable[[ParameterGroups, TrainConfig, torch.device], Optimizer]


def parameter_groups(model: nn.Module, config: TrainConfig) -> ParameterGroups:
    """Return the trainable parameters in the groups `decay` and `no_decay`; with `layer_decay`, in groups per layer.

    Weight decay excludes biases, other vectors and norm layers. With `layer_decay` below 1, the learning rate of a
    layer is lr * layer_decay ** (number of layers above) (Howard and Ruder 2018). For Muon, the group `muon` contains
    the hidden matrices; AdamW trains embeddings, the output layer and vectors.
    """
    found = list_parameters(model)
    top = max(item.depth for item in found)
    by_depth = config.layer_decay < 1
    groups: dict[str, dict[str, Any]] = {}
    for item in found:
        hidden = item.depth < top and not isinstance(item.module, (nn.Embedding, nn.EmbeddingBag))
        kind = "muon" if config.optimizer == "muon" and hidden else "decay"
        if item.parameter.ndim < 2 or isinstance(item.module, NORM_LAYERS):
            kind = "no_decay"
        name = f"{kind}/{item.depth}" if by_depth else kind
        group = groups.setdefault(name, {"params": [], "name": name})
        group["params"].append(item.parameter)
        group["lr"] = config.lr * (config.layer_decay ** (top - item.depth) if by_depth else 1.0)
        group["weight_decay"] = 0.0 if kind == "no_decay" else config.weight_decay
    return [groups[name] for name in sorted(groups, key=_group_order)]


def _group_order(name: str) -> tuple[int, int]:
    kind, _, depth = name.partition("/")
    return int(depth or 0), ("muon", "decay", "no_decay").index(kind)


def _get_kernel_options(groups: ParameterGroups, device: torch.device) -> dict[str, Any]:
    """Return `fused=True` if the device and all parameters support it, else `foreach=True`."""
    is_real = all(parameter.is_floating_point() for group in groups for parameter in group["params"])
    return {"fused": True} if is_real and device.type in {"cpu", "cuda"} else {"foreach": True}


def _adam_like(config: TrainConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": (config.beta1, config.beta2)}


def _sgd(groups: ParameterGroups, config: TrainConfig, device: torch.device) -> Optimizer:
    # If loss scaling skips the first step, torch 2.13's fused SGD uses an uninitialized momentum buffer. It also has
    # no kernel for sharded weights.
    kernel = (
        {"foreach": True}
        if config.precision == "fp16" or config.strategy == "fsdp"
        else _get_kernel_options(groups, device)
    )
    return SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, **kernel)


def _muon(groups: ParameterGroups, config: TrainConfig, _device: torch.device) -> Optimizer:
    if any(parameter.is_complex() for group in groups for parameter in group["params"]):
        raise ObjectiveError("optimizer muon does not support complex parameters; use another optimizer")
    for group in groups:
        group["use_muon"] = group["name"].startswith("muon")
        if not group["use_muon"]:
            group["betas"] = config.beta1, config.beta2
    # With the adjusted rate, updates are as large as AdamW's (Liu et al. 2025), so both can use one `lr`.
    return _from_library("Muon", groups, momentum=config.momentum, use_adjusted_lr=True)


def _lookahead(groups: ParameterGroups, config: TrainConfig, device: torch.device) -> Optimizer:
    base = FACTORIES[config.base_optimizer](groups, config, device)
    return _from_library("Lookahead", base, k=config.lookahead_steps, alpha=config.lookahead_alpha)


def _sam(groups: ParameterGroups, config: TrainConfig, device: torch.device) -> Optimizer:
    # SAM would construct its base optimizer without these settings, so it gets a finished one with shared groups.
    base = FACTORIES[config.base_optimizer](groups, config, device)
    return _from_library("SAM", base.param_groups, lambda *_, **__: base, rho=config.sam_rho)


def _from_library(name: str, *args: Any, **settings: Any) -> Optimizer:
    try:
        library = importlib.import_module("pytorch_optimizer")
    except ModuleNotFoundError as error:
        raise ObjectiveError(f"optimizer {name} needs pytorch-optimizer; run pip install pytorch-optimizer") from error
    return cast("Optimizer", getattr(library, name)(*args, **settings))


FACTORIES: dict[str, Factory] = {
    "sgd": _sgd,
    "adam": lambda groups, config, device: Adam(groups, **_adam_like(config), **_get_kernel_options(groups, device)),
    "adamw": lambda groups, config, device: AdamW(groups, **_adam_like(config), **_get_kernel_options(groups, device)),
    "nadam": lambda groups, config, _: NAdam(groups, **_adam_like(config), decoupled_weight_decay=True, foreach=True),
    "rmsprop": lambda groups, config, _: RMSprop(groups, lr=config.lr, momentum=config.momentum, foreach=True),
    "adagrad": lambda groups, config, _: Adagrad(groups, lr=config.lr, foreach=True),
    "lion": lambda groups, config, _: _from_library("Lion", groups, **_adam_like(config)),
    "lamb": lambda groups, config, _: _from_library("Lamb", groups, **_adam_like(config)),
    "muon": _muon,
    "lars": lambda groups, config, _: _from_library(
        "LARS", groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov
    ),
    # Without `degenerated_to_sgd`, pytorch-optimizer 4.1 ascends in the first five steps, until RAdam is rectified.
    "ranger": lambda groups, config, _: _from_library("Ranger", groups, **_adam_like(config), degenerated_to_sgd=True),
    "lookahead": _lookahead,
    "sam": _sam,
}


def list_groups(returned: Any) -> ParameterGroups:
    """Return the parameter groups that an objective returned, each with a list of parameters.

    Raises:
        ObjectiveError: the objective did not return a list of dictionaries with parameters.
    """
    is_list = isinstance(returned, Iterable) and not isinstance(returned, (Mapping, Tensor))
    groups: ParameterGroups = []
    for group in returned if is_list else [returned]:
        params = group.get("params") if is_list and isinstance(group, Mapping) else None
        params = [params] if isinstance(params, Tensor) else list(params) if isinstance(params, Iterable) else [None]
        if not all(isinstance(parameter, Tensor) for parameter in params):
            raise ObjectiveError(
                "parameter_groups() must return a list such as [{'params': model.parameters(), 'lr': 0.1}]"
            )
        groups.append({**group, "params": params})
    return groups


def complete_groups(model: nn.Module, config: TrainConfig, groups: ParameterGroups) -> ParameterGroups:
    """Return the parameter groups of an objective with defaults for name, learning rate and weight decay.

    Raises:
        ObjectiveError: a trainable parameter is in no group, a parameter is in two groups, or a learning rate or weight
            decay is not a number of at least 0.
    """
    found: ParameterGroups = []
    for number, group in enumerate(groups):
        defaults = {"name": f"group{number}", "lr": config.lr, "weight_decay": config.weight_decay}
        found.append({**defaults, **group})
        for setting in ("lr", "weight_decay"):
            value = found[-1][setting]
            if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
                name = found[-1]["name"]
                raise ObjectiveError(
                    f"parameter group {name!r} has {setting}={reprlib.repr(value)}; give a number of at least 0"
                )
    ids = [id(parameter) for group in found for parameter in group["params"]]
    if len(ids) > len(set(ids)):
        raise ObjectiveError("a parameter occurs twice in the parameter groups; list each parameter once")
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in set(ids)]
    if left:
        raise ObjectiveError(f"no parameter group has {join_first(left)}; add one, or set requires_grad=False")
    return found


def check_group_settings(optimizer: Optimizer) -> None:
    """Check each parameter group with the optimizer's constructor, because PyTorch validates only the defaults.

    Raises:
        ObjectiveError: PyTorch rejects a setting. Optimizers of other libraries are not checked.
    """
    kind = type(optimizer := getattr(optimizer, "optimizer", optimizer))  # that of Lookahead
    if not kind.__module__.startswith("torch."):
        return
    for group in optimizer.param_groups:
        for name in sorted(group.keys() & signature(kind).parameters.keys() - _UNCHECKED_SETTINGS):
            try:
                kind([nn.Parameter(torch.zeros(1))], **{name: group[name]})
            except Exception as error:  # of a wrong type or value
                given = f"{name}={reprlib.repr(group[name])} is invalid ({get_first_line(error)})"
                raise ObjectiveError(f"parameter group {group['name']!r}: {given}; change or remove it") from None


_UNCHECKED_SETTINGS = {"params", "nesterov", "fused", "foreach", "capturable", "differentiable"}  # depend on others


# Factor on the peak learning rate by the number of devices (Goyal et al. 2017; Krizhevsky 2014).
_LR_SCALINGS: dict[str, Callable[[int], float]] = {"none": lambda _: 1.0, "linear": float, "sqrt": math.sqrt}


def scale_lr(groups: list[dict[str, Any]], lr_scaling: str, world_size: int) -> None:
    """Scale the peak learning rates of parameter groups by the number of devices."""
    for group in groups:
        group["lr"] *= _LR_SCALINGS[lr_scaling](world_size)


def build_optimizer(
    model: nn.Module, config: TrainConfig, device: torch.device, groups: ParameterGroups | None = None
) -> Optimizer:
    """Return the configured optimizer; `groups` None uses the result of `parameter_groups`.

    Raises:
        ObjectiveError: the optimizer does not support complex parameters, or needs pytorch-optimizer.
    """
    return FACTORIES[config.optimizer](parameter_groups(model, config) if groups is None else groups, config, device)


class SAM:
    """First pass of SAM (Foret et al. 2021), from pytorch-optimizer. The second pass is a step of the base optimizer.

    The `step` of pytorch-optimizer's SAM is not used, because the weights would stay perturbed if a GradScaler skipped
    this step.
    """

    def __init__(self, sam: Any) -> None:
        self._sam = sam
        self.base: Optimizer = sam.base_optimizer  # its `step` updates the weights

    @contextmanager
    def perturbed_weights(self, model: nn.Module) -> Iterator[None]:
        """Return a context in which the weights are perturbed along their gradients; the gradients are then cleared.

        The perturbation does not depend on the gradient's norm, so a scaled loss needs no unscaling. Batch norm does
        not update its running statistics, which belong to the unperturbed weights.
        """
        from pytorch_optimizer.optimizer.utils.model import disable_running_stats, enable_running_stats

        self._sam.first_step(zero_grad=True)
        disable_running_stats(model)
        try:
            yield
        finally:
            enable_running_stats(model)
            with torch.no_grad():
                for group in self._sam.param_groups:
                    for parameter in group["params"]:
                        if (kept := self._sam.state[parameter].pop("old_p", None)) is not None:
                            parameter.copy_(kept)


_TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Autocast and loss scaling. Only fp16 needs loss scaling, because bf16 has the range of fp32.

    Args:
        name: value of `TrainConfig.precision`.
        device: device of the model.
        cache_casts: whether autocast keeps the casts of all weights until the end of the forward pass.
    """

    def __init__(self, name: str, device: torch.device, *, cache_casts: bool = True) -> None:
        self._device, self._cache_casts = device.type, cache_casts
        self._dtype = _TYPES[name]
        self.scaled = name == "fp16"  # loss scaling skips steps with an infinite gradient
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.scaled)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context for a forward pass."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device, dtype=self._dtype, cache_enabled=self._cache_casts)

    def backward(self, loss: Tensor) -> None:
        """Add the scaled gradient of `loss` to the parameters' gradients."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer; return False if loss scaling skipped the step."""
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return bool(self.scaler.get_scale() >= before)
