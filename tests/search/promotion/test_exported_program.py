"""The static check of `torch.export` programs finds every part that torch would execute."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export.pt2_archive import PT2ArchiveReader

from hpsearch.search.promotion.exported_program import find_unsafe_part, list_unsafe_parts
from hpsearch.search.promotion.model_files import find_code
from hpsearch.search.promotion.predict_isolated import load_single_input_predictor
from hpsearch.storage.mlflow.model_export import export_model, write_checkpoint_model
from tests.search.promotion.program_attacks import (
    Members,
    edit_program,
    evaluate_size,
    guard,
    guard_message,
    guard_with_line_feed,
    hidden_key_as_code,
    input_key_as_code,
    keyword_as_code,
    parameter_as_code,
    parameter_as_globals,
    pickle_inputs,
    pickle_weight,
    rewrite,
    value_as_module,
    write_file,
)


class OddNames(nn.Module):
    """A model whose layers and inputs have names with other characters than ASCII letters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a-b": nn.Linear(4, 4), "x y": nn.Linear(4, 4), "größe": nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor, *, maß: torch.Tensor) -> torch.Tensor:  # noqa: PLC2401 as users may
        for layer in self.layers.values():
            x = layer(x)
        return x * maß


@pytest.mark.parametrize("strict", [False, True])
def test_names_of_layers_and_inputs_are_no_code(tmp_path: Path, strict: bool) -> None:
    program = torch.export.export(OddNames(), (torch.randn(3, 4),), {"maß": torch.ones(4)}, strict=strict)
    torch.export.save(program, tmp_path / "model.pt2")
    assert find_unsafe_part(tmp_path / "model.pt2") == ""


def test_an_exported_model_and_a_checkpoint_have_no_code(exported: Path, tmp_path: Path) -> None:
    assert find_code(exported) == ""
    weights = tmp_path / "best.pt"
    weights.write_bytes(b"weights")
    write_checkpoint_model(weights, tmp_path / "checkpoint", objective="digits", reason="why")
    assert find_code(tmp_path / "checkpoint") == ""


def test_names_in_the_requirements_of_a_model_are_not_imported(exported: Path) -> None:
    """MLflow imports each name that is no installed distribution, to look up its version."""
    with (exported / "requirements.txt").open("a") as file:
        file.write("\nthis\n")
    sys.modules.pop("this", None)
    load_single_input_predictor(str(exported))
    assert "this" not in sys.modules


class Product(nn.Module):
    """A model with two inputs."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y


def test_an_exported_model_with_several_inputs_has_no_code(tmp_path: Path) -> None:
    inputs = [("x", torch.randn(4, 6)), ("y", torch.randn(4, 6))]
    export_model(Product().eval(), inputs, [{0}] * 2, tmp_path / "model")
    assert find_code(tmp_path / "model") == ""


class Symbolic(nn.Module):
    """A model with symbolic sizes, a branch on data, and operators with texts as arguments."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        size = x.shape[1] // 2 + y.shape[1] % 3
        product = torch.einsum("bi,bj->bij", x, y)
        chosen = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))
        return {"product": torch.div(product, 2, rounding_mode="floor"), "chosen": chosen[:, :1].expand(-1, size)}


def test_symbolic_sizes_and_control_flow_are_no_code(tmp_path: Path) -> None:
    inputs = [("x", torch.randn(4, 6)), ("y", torch.randn(4, 5))]
    sizes = [{0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}] * 2
    program = torch.export.export(Symbolic(), tuple(x for _, x in inputs), dynamic_shapes=sizes)
    torch.export.save(program, tmp_path / "model.pt2")
    assert find_unsafe_part(tmp_path / "model.pt2") == ""


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda members: members.update({"version": b"8.14"}), "an unreadable program (RuntimeError)"),
        (lambda members: members.pop(next(n for n in members if n.endswith("models/model.json"))), "no program of the"),
    ],
    ids=["file outside of the folder", "no program"],
)
def test_files_that_torch_reads_as_an_older_format_are_detected(
    exported: Path, change: Callable[[Members], object], part: str
) -> None:
    """Older formats contain pickles."""
    rewrite(exported / "data" / "model.pt2", change)
    assert find_code(exported).startswith(part)


def test_a_file_with_other_members_for_zipfile_is_detected(exported: Path) -> None:
    """torch's own reader takes the zip64 record at the stored offset, and zipfile the one at the end."""
    path = exported / "data" / "model.pt2"
    shown, count, directory, start = split_zip(path.read_bytes())
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("version", b"8.14")
        archive.writestr("serialized_state_dict.pt", b"a pickle")
    hidden, hidden_count, hidden_directory, hidden_start = split_zip(other.getvalue())
    first = zip64_record(count, len(directory), start)
    base = len(shown) + len(directory) + len(first)
    moved, position = bytearray(hidden_directory), 0
    while position < len(moved):  # the offsets of the members in the file
        lengths = struct.unpack("<HHH", moved[position + 28 : position + 34])
        offset = struct.unpack("<I", moved[position + 42 : position + 46])[0]
        moved[position + 42 : position + 46] = struct.pack("<I", offset + base)
        position += 46 + sum(lengths)
    last = zip64_record(hidden_count, len(moved), base + hidden_start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + len(directory), 1)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(shown + directory + first + hidden + moved + last + locator + end)
    assert zipfile.ZipFile(path).namelist() == ["version", "serialized_state_dict.pt"]
    assert any(name.startswith("models/") for name in PT2ArchiveReader(str(path)).get_file_names())
    assert find_code(exported).startswith("files that not all readers find")


def split_zip(content: bytes) -> tuple[bytes, int, bytes, int]:
    """Return the members, their number, the central directory, and its offset."""
    end = content.rfind(b"PK\5\6")
    count, size, start = struct.unpack("<HII", content[end + 10 : end + 20])
    return content[:start], count, content[start : start + size], start


def zip64_record(count: int, size: int, start: int) -> bytes:
    return struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)


@pytest.mark.parametrize("name", ["__enum__", "\\u005f_enum__", "default_factory_modul\\u0065"])
def test_structures_that_import_a_module_are_detected(exported: Path, name: str) -> None:
    def change(program: Any) -> None:
        program["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = f'[1, {{"{name}": true}}]'

    rewrite(exported / "data" / "model.pt2", lambda members: edit_program(change)(members, ""))
    assert "in_spec" in find_code(exported) or "the name" in find_code(exported)


@pytest.mark.parametrize(
    "expression", ["Max('open.__self__', s0)", "Symbol('lambda:s0')", "Symbol('s0', 'x.y')", "L['x.y']"]
)
def test_texts_that_sympy_would_evaluate_are_detected(exported: Path, expression: str) -> None:
    def change(program: Any) -> None:
        values = program["graph_module"]["graph"]["tensor_values"]
        next(iter(values.values()))["sizes"][0] = {"as_expr": {"expr_str": expression, "hint": None}}

    rewrite(exported / "data" / "model.pt2", lambda members: edit_program(change)(members, ""))
    assert find_code(exported) == f"expr_str {expression!r} in data/model.pt2"


def test_names_of_inputs_with_an_annotation_are_detected(exported: Path) -> None:
    def change(program: Any) -> None:
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        context = '{"type": "builtins.dict", "context": "[\\"a,b:torch.ctypes.cdll.x\\"]", "children_spec": []}'
        signature["in_spec"] = f"[1, {context}]"

    rewrite(exported / "data" / "model.pt2", lambda members: edit_program(change)(members, ""))
    assert find_code(exported).startswith("in_spec ")


def test_internal_operators_that_do_not_check_their_indices_are_detected(exported: Path) -> None:
    target = "torch.ops.aten._convert_indices_from_csr_to_coo.default"

    def change(program: Any) -> None:
        nodes = program["graph_module"]["graph"]["nodes"]
        nodes.insert(0, {**nodes[0], "target": target, "name": "made"})

    rewrite(exported / "data" / "model.pt2", lambda members: edit_program(change)(members, ""))
    assert find_code(exported) == f"the operator {target!r} in data/model.pt2"


@pytest.mark.parametrize(
    ("attack", "part"),
    [
        (write_file, "the operator 'torch.ops.aten.from_file.default'"),
        (guard, 'guards_code "open('),
        (guard_message, "guards_code '1 != b"),
        (guard_with_line_feed, "guards_code "),
        (evaluate_size, "expr_str 'eval("),
        (pickle_weight, "the pickled object 'linear.weight'"),
        (pickle_inputs, "pickled objects in data/sample_inputs/model.pt"),
        (parameter_as_code, "parameter_name '["),
        (parameter_as_globals, "parameter_name '__class__.named_parameters.__globals__'"),
        (keyword_as_code, "argument 'torch.os.mknod, path'"),
        (value_as_module, "name 'self'"),
        (input_key_as_code, "pickled objects in data/sample_inputs/model.pt"),
        (hidden_key_as_code, "pickled objects in data/sample_inputs/model.pt"),
    ],
)
@pytest.mark.parametrize("with_effect", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_program_that_executes_code_is_detected(
    exported: Path, tmp_path: Path, attack: Callable[[Members, str], None], part: str, with_effect: bool
) -> None:
    """Each program creates a file when torch loads and calls it, and `find_code` describes the reason."""
    path, marker = exported / "data" / "model.pt2", tmp_path / "marker"
    rewrite(path, lambda members: attack(members, str(marker)))
    assert find_code(exported).endswith(" in data/model.pt2")
    found = list(list_unsafe_parts(path))
    assert any(each.startswith(part) for each in found), found
    assert not marker.exists()
    if with_effect:
        code = f"import torch; torch.export.load({str(path)!r}).module()(torch.randn(4, 1, 8, 8))"
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        assert marker.exists(), "the attack has no effect, so the test shows nothing"
