"""The layers of a model in their order, and where each trainable parameter stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

# Normalisation layers, told by type: their names miss those inside a Sequential.
NORMS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
_CONTAINERS = (nn.Sequential, nn.ModuleList)


class Placed(NamedTuple):
    """A trainable parameter: its module, and the depth of its layer, 0 next to the input."""

    parameter: nn.Parameter
    module: nn.Module
    depth: int


def layers(model: nn.Module) -> list[nn.Module]:
    """The layers with trainable parameters, in the order in which they were registered: input first.

    Containers are opened, and so is the model itself; any other module, such as a residual block, is one layer unless
    it holds a ModuleList (as an encoder holds its blocks).
    """
    found = [layer for child in model.children() for layer in _opened(child) if _trains(layer)]
    if not found:
        return [model]
    if len(found) == 1 and any(_trains(child) for child in found[0].children()):
        return layers(found[0])  # a wrapper around the network
    return found


def placed(model: nn.Module) -> list[Placed]:
    """Every trainable parameter once, with its depth.

    A norm belongs to the layer before it. Parameters outside all layers (a class token, positions) stand at depth 0.
    """
    depths: dict[int, int] = {}
    depth = -1
    for layer in layers(model):
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
                result.append(Placed(parameter, module, depths.get(id(parameter), 0)))
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
