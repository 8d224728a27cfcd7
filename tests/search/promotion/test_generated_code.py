"""The check of the generated code of a program accepts only operators of tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from hpsearch.search.promotion.generated_code import find_unsafe_code, list_unsafe_code
from tests.search.promotion.program_attacks import (
    Members,
    keyword_as_code,
    parameter_as_code,
    parameter_as_globals,
    rewrite,
    value_as_module,
)


@pytest.mark.parametrize("attack", [parameter_as_code, parameter_as_globals, keyword_as_code, value_as_module])
def test_unsafe_code_of_a_loaded_program_is_detected_without_the_check_of_the_program(
    exported: Path, tmp_path: Path, attack: Callable[[Members, str], None]
) -> None:
    path, marker = exported / "data" / "model.pt2", tmp_path / "marker"
    assert find_unsafe_code(path) == ""
    rewrite(path, lambda members: attack(members, str(marker)))
    assert find_unsafe_code(path).startswith("the code ")
    assert not marker.exists()


def make_module() -> nn.Module:
    """Return a module with a layer `linear` and a subgraph `part`."""
    module = nn.Module()
    module.linear = nn.Linear(2, 2)
    module.part = torch.fx.GraphModule(nn.Module(), torch.fx.Graph())
    return module


def test_tensors_of_the_module_are_safe() -> None:
    code = "def forward(self, x):\n    y = self.linear.weight; z = getattr(self.linear, 'bias')\n    return (y, z)"
    assert list(list_unsafe_code(code, make_module())) == []


@pytest.mark.parametrize(
    "statement",
    [
        "x.register_hook",
        "x.register_hook(y)",
        "x(y)",
        "eval('1')",
        "self.__class__",
        "self.forward(x)",
        "self.linear",
        "self.linear.weight.register_hook",
        "self.missing",
        "self.training",
        "self.train(x)",
        "getattr(self, '__class__')",
        "getattr(x, 'data')",
        "eval(self, 'weight').bias",
        "torch.os",
        "torch.load('file')",
        "torch.ops.aten.from_file.default('file')",
        "torch.ops.aten.x().y(1)",
        "torch.ops.higher_order.wrap_with_set_grad_enabled(True, x, y)",
        "torch.ops.higher_order.wrap_with_set_grad_enabled(True, self.weight, y)",
        "[each for each in x]",
        "lambda: x",
        "f'{x}'",
        "(x := y)",
        "fx_pytree",
    ],
)
def test_code_other_than_operators_of_tensors_is_unsafe(statement: str) -> None:
    code = "def forward(self, x, y):\n    {}\n    return (x,)"
    safe = "part = self.part; z = torch.ops.higher_order.wrap_with_set_grad_enabled(True, part, y); part = None"
    assert list(list_unsafe_code(code.format(safe), make_module())) == []
    assert list(list_unsafe_code(code.format(safe), nn.Module()))
    assert list(list_unsafe_code(code.format(f"z = {statement}"), make_module()))


@pytest.mark.parametrize(
    "code",
    [
        "def forward(self, torch):\n    return (torch,)",
        "def forward(self, x, *self):\n    return (x,)",
        "def forward(self, x: eval('1')):\n    return (x,)",
        "def forward(self, x=eval('1')):\n    return (x,)",
        "def forward(self, x):\n    self = x\n    return (x,)",
        "def forward(self, x):\n    getattr, = x\n    return (x,)",
        "def forward(self, x):\n    x.data = x\n    return (x,)",
        "def forward(self, x):\n    import os\n    return (x,)",
        "import os\ndef forward(self, x):\n    return (x,)",
        "@x\ndef forward(self, x):\n    return (x,)",
        "def forward(self, part):\n    z = torch.ops.higher_order.map_impl(part); part = self.part\n    return (z,)",
    ],
)
def test_other_statements_and_names_are_unsafe(code: str) -> None:
    assert list(list_unsafe_code(code, make_module()))
