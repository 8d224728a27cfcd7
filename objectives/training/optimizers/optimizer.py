"""Build optimizers: parameter groups, layer-wise learning rates, SAM, gradient scaling."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.config import TrainConfig

# Normalisation layers, told by type: their names miss those inside a Sequential.
NORMS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
_CONTAINERS = (nn.Sequential, nn.ModuleList)


class ParameterWithDepth(NamedTuple):
    """A trainable parameter: its module, and the depth of its layer, 0 next to the input."""

    parameter: nn.Parameter
    module: nn.Module
    depth: int


def list_layers(model: nn.Module) -> list[nn.Module]:
    """The layers with trainable parameters, in the order in which they were registered: input first.

    Containers are opened, and so is the model itself; any other module, such as a residual block, is one layer unless
    it holds a ModuleList (as an encoder holds its blocks).
    """
    found = [layer for child in model.children() for layer in _opened(child) if _trains(layer)]
    if not found:
        return [model]
    if len(found) == 1 and any(_trains(child) for child in found[0].children()):
        return list_layers(found[0])  # a wrapper around the network
    return found


def list_parameters(model: nn.Module) -> list[ParameterWithDepth]:
    """Every trainable parameter once, with its depth.

    A norm belongs to the layer before it. Parameters outside all layers (a class token, positions) stand at depth 0.
    """
    depths: dict[int, int] = {}
    depth = -1
    for layer in list_layers(model):
        if depth < 0 or not isinstance(layer, NORMS):
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


def _opened(module: nn.Module) -> Iterator[nn.Module]:
    holds_list = any(isinstance(child, nn.ModuleList) and _trains(child) for child in module.children())
    if isinstance(module, _CONTAINERS) or holds_list:
        for child in module.children():
            yield from _opened(child)
    else:
        yield module


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


ParameterGroups = list[dict[str, Any]]
Factory = Callable[[ParameterGroups, TrainConfig, torch.device], Optimizer]


def parameter_groups(model: nn.Module, config: TrainConfig) -> ParameterGroups:
    """The trainable parameters by how they are treated: `decay` and `no_decay`, per layer where rates differ.

    Biases, other vectors and norm layers are not decayed. With `layer_decay` below 1 a layer learns at
    lr * layer_decay ** (layers above it) (Howard and Ruder 2018). For Muon, which is made for hidden matrices,
    `muon` holds those; embeddings, the output layer and vectors stay with AdamW.
    """
    found = list_parameters(model)
    top = max(item.depth for item in found)
    by_depth = config.layer_decay < 1
    groups: dict[str, dict[str, Any]] = {}
    for item in found:
        hidden = item.depth < top and not isinstance(item.module, (nn.Embedding, nn.EmbeddingBag))
        kind = "muon" if config.optimizer == "muon" and hidden else "decay"
        if item.parameter.ndim < 2 or isinstance(item.module, NORMS):
            kind = "no_decay"
        name = f"{kind}/{item.depth}" if by_depth else kind
        group = groups.setdefault(name, {"params": [], "name": name})
        group["params"].append(item.parameter)
        group["lr"] = config.lr * (config.layer_decay ** (top - item.depth) if by_depth else 1.0)
        group["weight_decay"] = 0.0 if kind == "no_decay" else config.weight_decay
    return [groups[name] for name in sorted(groups, key=_order)]


def _order(name: str) -> tuple[int, int]:
    kind, _, depth = name.partition("/")
    return int(depth or 0), ("muon", "decay", "no_decay").index(kind)


def _fused(device: torch.device) -> dict[str, Any]:
    """One kernel for all parameters of SGD, Adagrad and the Adams, where the device has it."""
    return {"fused": True} if device.type in {"cpu", "cuda"} else {"foreach": True}


def _adam_like(config: TrainConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": (config.beta1, config.beta2)}


def _sgd(groups: ParameterGroups, config: TrainConfig, device: torch.device) -> Optimizer:
    # Where loss scaling skips the very first step, torch 2.13's fused SGD keeps a momentum that was never written.
    # And it has no kernel for weights that are spread over ranks.
    kernel = {"foreach": True} if config.precision == "fp16" or config.strategy == "fsdp" else _fused(device)
    return SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, **kernel)


def _muon(groups: ParameterGroups, config: TrainConfig, _device: torch.device) -> Optimizer:
    for group in groups:
        group["use_muon"] = group["name"].startswith("muon")
        if not group["use_muon"]:
            group["betas"] = config.beta1, config.beta2
    # The adjusted rate has the size of AdamW's updates (Liu et al. 2025): one `lr` then fits both.
    return _of_library("Muon", groups, momentum=config.momentum, use_adjusted_lr=True)


def _lookahead(groups: ParameterGroups, config: TrainConfig, device: torch.device) -> Optimizer:
    base = FACTORIES[config.base_optimizer](groups, config, device)
    return _of_library("Lookahead", base, k=config.lookahead_steps, alpha=config.lookahead_alpha)


def _sam(groups: ParameterGroups, config: TrainConfig, device: torch.device) -> Optimizer:
    # SAM makes its base from a class, bare of our settings: it is handed one that is made, whose groups it shares.
    base = FACTORIES[config.base_optimizer](groups, config, device)
    return _of_library("SAM", base.param_groups, lambda *_, **__: base, rho=config.sam_rho)


def _of_library(name: str, *args: Any, **settings: Any) -> Optimizer:
    try:
        library = importlib.import_module("pytorch_optimizer")
    except ModuleNotFoundError as error:
        raise ObjectiveError(f"optimizer {name} needs pytorch-optimizer: pip install pytorch-optimizer") from error
    return cast("Optimizer", getattr(library, name)(*args, **settings))


FACTORIES: dict[str, Factory] = {
    "sgd": _sgd,
    "adam": lambda groups, config, device: Adam(groups, **_adam_like(config), **_fused(device)),
    "adamw": lambda groups, config, device: AdamW(groups, **_adam_like(config), **_fused(device)),
    "nadam": lambda groups, config, _: NAdam(groups, **_adam_like(config), decoupled_weight_decay=True, foreach=True),
    "rmsprop": lambda groups, config, _: RMSprop(groups, lr=config.lr, momentum=config.momentum, foreach=True),
    "adagrad": lambda groups, config, _: Adagrad(groups, lr=config.lr, foreach=True),
    "lion": lambda groups, config, _: _of_library("Lion", groups, **_adam_like(config)),
    "lamb": lambda groups, config, _: _of_library("Lamb", groups, **_adam_like(config)),
    "muon": _muon,
    "lars": lambda groups, config, _: _of_library(
        "LARS", groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov
    ),
    # Without `degenerated_to_sgd` pytorch-optimizer 4.1 takes the first five steps uphill, until RAdam is rectified.
    "ranger": lambda groups, config, _: _of_library("Ranger", groups, **_adam_like(config), degenerated_to_sgd=True),
    "lookahead": _lookahead,
    "sam": _sam,
}


def complete_groups(model: nn.Module, config: TrainConfig, groups: ParameterGroups) -> ParameterGroups:
    """Return parameter groups of an objective with a name, a rate and a decay each.

    Raises:
        ObjectiveError: a parameter is in no group, or in two.
    """
    found: ParameterGroups = []
    for number, group in enumerate(groups):
        defaults = {"name": f"group{number}", "lr": config.lr, "weight_decay": config.weight_decay}
        found.append({**defaults, **group, "params": list(group["params"])})
    ids = [id(parameter) for group in found for parameter in group["params"]]
    if len(ids) > len(set(ids)):
        raise ObjectiveError("a parameter is in two groups, or twice in one")
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in set(ids)]
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise ObjectiveError(
            f"no group has {', '.join(left[:3])}{more}: freeze by requires_grad_(False) what is not to train"
        )
    return found


def build_optimizer(
    model: nn.Module, config: TrainConfig, device: torch.device, groups: ParameterGroups | None = None
) -> Optimizer:
    """Return the configured optimizer over these parameter groups; None are those of `parameter_groups`.

    Raises:
        ObjectiveError: the optimizer is one of pytorch-optimizer, which is not installed.
    """
    return FACTORIES[config.optimizer](parameter_groups(model, config) if groups is None else groups, config, device)


class SAM:
    """The first of SAM's two passes (Foret et al. 2021), by pytorch-optimizer; the second is a step of its base.

    Its own `step` takes a closure, which a GradScaler cannot skip: weights would stay displaced.
    """

    def __init__(self, sam: Any) -> None:
        self._sam = sam
        self.base: Optimizer = sam.base_optimizer  # takes the step

    @contextmanager
    def perturbed_weights(self, model: nn.Module) -> Iterator[None]:
        """A region with the weights moved uphill along their gradients, which are cleared for the second pass.

        The direction does not depend on the gradients' size, so a scaled loss needs no unscaling. Batch norm's
        running statistics stand still: they belong to the weights that are kept.
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
    """Runs forward passes in the configured type. Only fp16 scales the loss: bf16 has the range of fp32."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device.type
        self._dtype = _TYPES[name]
        self.scaled = name == "fp16"  # then steps with an infinite gradient are skipped
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.scaled)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device, dtype=self._dtype)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of `loss`, scaled, to the parameters' gradients."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer; return False if loss scaling skipped the step."""
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return bool(self.scaler.get_scale() >= before)
