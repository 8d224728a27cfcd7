"""Optimizers by name, and which parameters they decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

if TYPE_CHECKING:
    from objectives.training.config import TrainConfig

Groups = list[dict[str, Any]]

# Normalisation layers, told by type: their names miss those inside a Sequential.
_NORMS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)


def parameter_groups(model: nn.Module, config: TrainConfig) -> Groups:
    """Two groups of trainable parameters: `decay`, and `no_decay` for biases, other vectors and norm layers."""
    kept: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": []}
    seen: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            plain = parameter.ndim < 2 or isinstance(module, _NORMS)
            kept["no_decay" if plain else "decay"].append(parameter)
    decay = {"decay": config.weight_decay, "no_decay": 0.0}
    return [{"params": params, "weight_decay": decay[name], "name": name} for name, params in kept.items() if params]


def _fused(device: torch.device) -> dict[str, bool]:
    """One kernel for all parameters of SGD, Adagrad and the Adams, where the device has it."""
    return {"fused": True} if device.type in {"cpu", "cuda"} else {"foreach": True}


def _sgd(groups: Groups, config: TrainConfig, device: torch.device) -> Optimizer:
    return SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, **_fused(device))


def _adam(groups: Groups, config: TrainConfig, device: torch.device) -> Optimizer:
    return Adam(groups, lr=config.lr, betas=(config.beta1, config.beta2), **_fused(device))


def _adamw(groups: Groups, config: TrainConfig, device: torch.device) -> Optimizer:
    return AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), **_fused(device))


def _nadam(groups: Groups, config: TrainConfig, _device: torch.device) -> Optimizer:
    betas = (config.beta1, config.beta2)
    return NAdam(groups, lr=config.lr, betas=betas, decoupled_weight_decay=True, foreach=True)


def _rmsprop(groups: Groups, config: TrainConfig, _device: torch.device) -> Optimizer:
    return RMSprop(groups, lr=config.lr, momentum=config.momentum, foreach=True)


def _adagrad(groups: Groups, config: TrainConfig, _device: torch.device) -> Optimizer:
    return Adagrad(groups, lr=config.lr, foreach=True)


OPTIMIZERS: dict[str, Callable[[Groups, TrainConfig, torch.device], Optimizer]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
    "nadam": _nadam,
    "rmsprop": _rmsprop,
    "adagrad": _adagrad,
}


def build_optimizer(model: nn.Module, config: TrainConfig, device: torch.device) -> Optimizer:
    """The configured optimizer over the model's parameter groups."""
    return OPTIMIZERS[config.optimizer](parameter_groups(model, config), config, device)
