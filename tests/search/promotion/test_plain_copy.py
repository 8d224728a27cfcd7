"""torch loads a plain copy of an exported program, which has only what was checked."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpsearch.search.promotion.exported_program import find_unsafe_part
from hpsearch.search.promotion.plain_copy import replace_by_plain_copy
from tests.search.promotion.program_attacks import edit_program, rewrite


class Net(nn.Module):
    """A model with a buffer, a symbolic size and a dictionary as output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mean of rows": self.norm(self.layer(x)).mean(dim=1) / x.shape[0]}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    found = torch.export.export(Net().eval(), (torch.randn(3, 4),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    torch.export.save(found, path := tmp_path / "model.pt2")
    return path


def test_a_copy_computes_the_same(program: Path) -> None:
    x = torch.randn(7, 4)
    expected = torch.export.load(program).module()(x)
    replace_by_plain_copy(program)
    torch.testing.assert_close(torch.export.load(program).module()(x), expected, rtol=0, atol=0)
    assert find_unsafe_part(program) == ""


def test_a_copy_has_no_other_bytes_and_no_metadata(program: Path) -> None:
    """A file can be a library too, which begins before the archive. By metadata, torch loads a library."""

    def change(content: Any) -> None:
        content["graph_module"]["graph"]["nodes"][0]["metadata"]["source_fn_stack"] = "x,torch.ctypes.cdll.library"

    rewrite(program, lambda members: edit_program(change)(members, ""))
    with zipfile.ZipFile(program) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    program.write_bytes(b"\x7fELF")
    with zipfile.ZipFile(program, "a") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    replace_by_plain_copy(program)
    assert program.read_bytes().startswith(b"PK")
    with zipfile.ZipFile(program) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("models/model.json"))
        nodes = json.loads(archive.read(name))["graph_module"]["graph"]["nodes"]
    assert [node["metadata"] for node in nodes] == [{}] * len(nodes)


@pytest.mark.parametrize("context", ['{"a": {"\\u005f_enum__": true}, "a": 1}', '{"a": 1, "\\u0061": 2}'])
def test_a_name_that_occurs_twice_is_an_error(program: Path, context: str) -> None:
    """torch imports a module that the first of the two values names; `json.loads` returns the second value."""

    def change(content: Any) -> None:
        signature = content["graph_module"]["module_call_graph"][0]["signature"]
        spec = {"type": "builtins.dict", "context": context, "children_spec": []}
        signature["out_spec"] = json.dumps([1, spec])

    rewrite(program, lambda members: edit_program(change)(members, ""))
    assert find_unsafe_part(program) == "an unreadable program (ValueError)"
    with pytest.raises(ValueError, match="a name occurs twice"):
        replace_by_plain_copy(program)
