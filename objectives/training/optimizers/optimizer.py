"""Optimizers by name, and how each parameter is treated by them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.optimizers.layers import NORMS, Placed, placed

Groups = list[dict[str, Any]]
Factory = Callable[[Groups, TrainConfig, torch.device], Optimizer]


def parameter_groups(model: nn.Module, config: TrainConfig) -> Groups:
    """The trainable parameters by how they are treated: `decay` and `no_decay`, per layer where rates differ.

    Biases, other vectors and norm layers are not decayed. With `layer_decay` below 1 a layer learns at
    lr * layer_decay ** (layers above it) (Howard and Ruder 2018). For Muon, which is made for hidden matrices,
    `muon` holds those; embeddings, the output layer and vectors stay with AdamW.
    """
    found = placed(model)
    top = max(item.depth for item in found)
    by_depth = config.layer_decay < 1
    groups: dict[str, dict[str, Any]] = {}
    for item in found:
        kind = _kind(item, top, config)
        name = f"{kind}/{item.depth}" if by_depth else kind
        group = groups.setdefault(name, {"params": [], "name": name})
        group["params"].append(item.parameter)
        group["lr"] = config.lr * (config.layer_decay ** (top - item.depth) if by_depth else 1.0)
        group["weight_decay"] = 0.0 if kind == "no_decay" else config.weight_decay
    return [groups[name] for name in sorted(groups, key=_order)]


def _kind(item: Placed, top: int, config: TrainConfig) -> str:
    if item.parameter.ndim < 2 or isinstance(item.module, NORMS):
        return "no_decay"
    hidden = item.depth < top and not isinstance(item.module, (nn.Embedding, nn.EmbeddingBag))
    return "muon" if config.optimizer == "muon" and hidden else "decay"


def _order(name: str) -> tuple[int, int]:
    kind, _, depth = name.partition("/")
    return int(depth or 0), ("muon", "decay", "no_decay").index(kind)


def _fused(device: torch.device) -> dict[str, bool]:
    """One kernel for all parameters of SGD, Adagrad and the Adams, where the device has it."""
    return {"fused": True} if device.type in {"cpu", "cuda"} else {"foreach": True}


def _betas(config: TrainConfig) -> tuple[float, float]:
    return config.beta1, config.beta2


def _sgd(groups: Groups, config: TrainConfig, device: torch.device) -> Optimizer:
    # Where loss scaling skips the very first step, torch 2.13's fused SGD keeps a momentum that was never written.
    # And it has no kernel for weights that are spread over ranks.
    kernel = {"foreach": True} if config.precision == "fp16" or config.strategy == "fsdp" else _fused(device)
    return SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, **kernel)


def _adam(groups: Groups, config: TrainConfig, device: torch.device) -> Optimizer:
    return Adam(groups, lr=config.lr, betas=_betas(config), **_fused(device))


def _adamw(groups: Groups, config: TrainConfig, device: torch.device) -> Optimizer:
    return AdamW(groups, lr=config.lr, betas=_betas(config), **_fused(device))


def _nadam(groups: Groups, config: TrainConfig, _device: torch.device) -> Optimizer:
    return NAdam(groups, lr=config.lr, betas=_betas(config), decoupled_weight_decay=True, foreach=True)


def _rmsprop(groups: Groups, config: TrainConfig, _device: torch.device) -> Optimizer:
    return RMSprop(groups, lr=config.lr, momentum=config.momentum, foreach=True)


def _adagrad(groups: Groups, config: TrainConfig, _device: torch.device) -> Optimizer:
    return Adagrad(groups, lr=config.lr, foreach=True)


def _muon(groups: Groups, config: TrainConfig, _device: torch.device) -> Optimizer:
    for group in groups:
        group["use_muon"] = group["name"].startswith("muon")
        if not group["use_muon"]:
            group["betas"] = _betas(config)
    # The adjusted rate has the size of AdamW's updates (Liu et al. 2025): one `lr` then fits both.
    return _of_library("Muon", groups, momentum=config.momentum, use_adjusted_lr=True)


def _lamb(groups: Groups, config: TrainConfig, _device: torch.device) -> Optimizer:
    return _of_library("Lamb", groups, lr=config.lr, betas=_betas(config))


def _lars(groups: Groups, config: TrainConfig, _device: torch.device) -> Optimizer:
    return _of_library("LARS", groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)


def _lion(groups: Groups, config: TrainConfig, _device: torch.device) -> Optimizer:
    return _of_library("Lion", groups, lr=config.lr, betas=_betas(config))


def _ranger(groups: Groups, config: TrainConfig, _device: torch.device) -> Optimizer:
    # Without `degenerated_to_sgd` pytorch-optimizer 4.1 takes the first five steps uphill, until RAdam is rectified.
    return _of_library("Ranger", groups, lr=config.lr, betas=_betas(config), degenerated_to_sgd=True)


def _lookahead(groups: Groups, config: TrainConfig, device: torch.device) -> Optimizer:
    base = FACTORIES[config.base_optimizer](groups, config, device)
    return _of_library("Lookahead", base, k=config.lookahead_steps, alpha=config.lookahead_alpha)


def _sam(groups: Groups, config: TrainConfig, device: torch.device) -> Optimizer:
    # SAM makes its base from a class, bare of our settings: it is handed one that is made, whose groups it shares.
    base = FACTORIES[config.base_optimizer](groups, config, device)
    return _of_library("SAM", base.param_groups, lambda *_, **__: base, rho=config.sam_rho)


def _of_library(name: str, *args: Any, **settings: Any) -> Optimizer:
    try:
        library = importlib.import_module("pytorch_optimizer")
    except ModuleNotFoundError as error:
        raise ObjectiveError(f"optimizer {name} needs pytorch-optimizer: pip install pytorch-optimizer") from error
    made: Optimizer = getattr(library, name)(*args, **settings)
    return made


FACTORIES: dict[str, Factory] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
    "nadam": _nadam,
    "rmsprop": _rmsprop,
    "adagrad": _adagrad,
    "lion": _lion,
    "lamb": _lamb,
    "muon": _muon,
    "lars": _lars,
    "ranger": _ranger,
    "lookahead": _lookahead,
    "sam": _sam,
}


def checked_groups(model: nn.Module, config: TrainConfig, groups: Groups) -> Groups:
    """Parameter groups that an objective made, with a name, a rate and a decay each.

    Raises:
        ObjectiveError: a parameter is in none of them, or in two.
    """
    found: Groups = []
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
    model: nn.Module, config: TrainConfig, device: torch.device, groups: Groups | None = None
) -> Optimizer:
    """The configured optimizer over these parameter groups, or over the model's.

    Raises:
        ObjectiveError: the optimizer is one of pytorch-optimizer, which is not installed.
    """
    return FACTORIES[config.optimizer](parameter_groups(model, config) if groups is None else groups, config, device)
