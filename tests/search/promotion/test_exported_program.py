"""The static check of `torch.export` programs finds every part that torch would execute."""

from __future__ import annotations

import io
import json
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

from hpsearch.search.promotion.exported_program import find_unsafe_part
from hpsearch.search.promotion.model_files import find_code
from hpsearch.storage.mlflow.model_export import export_model, write_checkpoint_model


class OddNames(nn.Module):
    """A model whose layers and inputs have names with other characters than ASCII letters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a-b": nn.Linear(4, 4), "x y": nn.Linear(4, 4), "größe": nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor, *, maß: torch.Tensor) -> torch.Tensor:  # noqa: PLC2401 as users may
        for layer in self.layers.values():
            x = layer(x)
        return x * maß


def test_names_of_layers_and_inputs_are_no_code(tmp_path: Path) -> None:
    program = torch.export.export(OddNames(), (torch.randn(3, 4),), {"maß": torch.ones(4)})
    torch.export.save(program, tmp_path / "model.pt2")
    assert find_unsafe_part(tmp_path / "model.pt2") == ""


Members = dict[str, bytes]


def test_an_exported_model_and_a_checkpoint_have_no_code(exported: Path, tmp_path: Path) -> None:
    assert find_code(exported) == ""
    weights = tmp_path / "best.pt"
    weights.write_bytes(b"weights")
    write_checkpoint_model(weights, tmp_path / "checkpoint", objective="digits", reason="why")
    assert find_code(tmp_path / "checkpoint") == ""


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


def edit_program(change: Callable[[Any], None]) -> Callable[[Members, str], None]:
    """Return a function that changes the JSON of the program in an archive."""

    def edit(members: Members, _: str) -> None:
        name = next(name for name in members if name.endswith("models/model.json"))
        program = json.loads(members[name])
        change(program)
        members[name] = json.dumps(program).encode()

    return edit


class Opened:
    """An object whose unpickling creates a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (self._path, "w")


def write_file(members: Members, path: str) -> None:
    """Add an operator that creates a file."""
    values = {"filename": {"as_string": path}, "shared": {"as_bool": True}, "size": {"as_int": 1}}
    arguments = [{"name": name, "arg": value, "kind": 1} for name, value in values.items()]

    def change(program: Any) -> None:
        graph = program["graph_module"]["graph"]
        graph["tensor_values"]["made"] = next(iter(graph["tensor_values"].values()))
        output = {"as_tensor": {"name": "made"}}
        node = {"target": "torch.ops.aten.from_file.default", "inputs": arguments, "outputs": [output], "metadata": {}}
        graph["nodes"].insert(0, {**graph["nodes"][0], **node, "name": "made"})

    edit_program(change)(members, path)


def guard(members: Members, path: str) -> None:
    edit_program(lambda program: program["guards_code"].append(f"open({path!r}, 'w') is not None"))(members, path)


def evaluate_text(path: str) -> str:
    """Return code without quotation marks that creates a file."""
    return f"eval({'+'.join(f'chr({each})' for each in f'open({path!r}, {chr(39)}w{chr(39)})'.encode())})"


def guard_message(members: Members, path: str) -> None:
    """Add a guard whose bytes end the text of the message that torch writes into its code."""
    code = f"1 != b'\"); {evaluate_text(path)} #'"
    edit_program(lambda program: program["guards_code"].append(code))(members, path)


def guard_with_line_feed(members: Members, path: str) -> None:
    """Hide the end of the text in an escape that is complete after torch has removed the line feeds."""
    code = f"1 != '\\\nx22); {evaluate_text(path)} #'"
    edit_program(lambda program: program["guards_code"].append(code))(members, path)


def evaluate_size(members: Members, path: str) -> None:
    def change(program: Any) -> None:
        values = program["graph_module"]["graph"]["tensor_values"]
        next(iter(values.values()))["sizes"][0] = {"as_expr": {"expr_str": evaluate_text(path), "hint": None}}

    edit_program(change)(members, path)


def pickle_weight(members: Members, path: str) -> None:
    name = next(name for name in members if name.endswith("weights/model_weights_config.json"))
    config = json.loads(members[name])
    entry = next(iter(config["config"].values()))
    entry["use_pickle"] = True
    members[name] = json.dumps(config).encode()
    members[f"{name.rpartition('/')[0]}/{entry['path_name']}"] = save(Opened(path))


def pickle_inputs(members: Members, path: str) -> None:
    name = next(name for name in members if "sample_inputs" in name)
    members[name] = save(Opened(path))


def save(value: object) -> bytes:
    torch.save(value, file := io.BytesIO())
    return file.getvalue()


def rewrite(path: Path, change: Callable[[Members], None]) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


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


def test_internal_operators_that_do_not_check_their_indices_are_detected(exported: Path) -> None:
    target = "torch.ops.aten._convert_indices_from_csr_to_coo.default"

    def change(program: Any) -> None:
        nodes = program["graph_module"]["graph"]["nodes"]
        nodes.insert(0, {**nodes[0], "target": target, "name": "made"})

    rewrite(exported / "data" / "model.pt2", lambda members: edit_program(change)(members, ""))
    assert find_code(exported) == f"the operator {target!r} in data/model.pt2"


@pytest.mark.parametrize("name", ["self", "ｓelf"])  # noqa: RUF001 Python reads both as the same name
def test_values_that_replace_the_module_are_detected(exported: Path, name: str) -> None:
    """In the code that torch writes, `self` would be this value, and paths of parameters its attributes."""

    def change(program: Any) -> None:
        nodes = program["graph_module"]["graph"]["nodes"]
        nodes.insert(0, {**nodes[0], "outputs": [{"as_tensor": {"name": name}}]})

    rewrite(exported / "data" / "model.pt2", lambda members: edit_program(change)(members, ""))
    assert find_code(exported).startswith("a value with the name of the module in torch's code")


def call(name: str, function: Any, *arguments: str, keyword: str = "") -> dict[str, Any]:
    """Return a node that calls a function with texts, as if it were a subgraph."""
    texts = [{"name": keyword, "arg": {"as_string": text}, "kind": 2 if keyword else 1} for text in arguments]
    function = [] if function is None else [{"name": "", "arg": {"as_tensor": {"name": function}}, "kind": 1}]
    return {
        "target": "torch.ops.higher_order.wrap_with_set_grad_enabled",
        "inputs": [{"name": "", "arg": {"as_bool": True}, "kind": 1}, *function, *texts],
        "outputs": [{"as_tensor": {"name": name}}],
        "metadata": {},
        "is_hop_single_tensor_return": True,
        "name": name,
    }


def add_nodes(program: Any, *nodes: dict[str, Any]) -> None:
    graph = program["graph_module"]["graph"]
    for node in nodes:
        graph["tensor_values"][node["name"]] = next(iter(graph["tensor_values"].values()))
    graph["nodes"][:0] = nodes


def add_parameter(members: Members, program: Any, path: str) -> None:
    """Add a parameter `p_made` that torch looks up at a path in the loaded module."""
    module = program["graph_module"]
    specs, graph = module["signature"]["input_specs"], module["graph"]
    made = json.loads(json.dumps(next(spec for spec in specs if "parameter" in spec)))
    former, arg = made["parameter"]["parameter_name"], made["parameter"]["arg"]
    graph["tensor_values"]["p_made"] = graph["tensor_values"][arg["name"]]
    made["parameter"]["parameter_name"], arg["name"] = path, "p_made"
    specs.insert(0, made)
    graph["inputs"].insert(0, {"as_tensor": {"name": "p_made"}})
    name = next(name for name in members if name.endswith("weights/model_weights_config.json"))
    config = json.loads(members[name])
    config["config"][path] = config["config"][former]
    members[name] = json.dumps(config).encode()


def parameter_as_code(members: Members, path: str) -> None:
    """Name a parameter so that torch writes `getattr(self, "NAME")` with a closing quotation mark in the name."""

    def change(program: Any) -> None:
        add_parameter(members, program, '["*0,eval or "]')
        add_nodes(program, call("first", "p_made", "torch.os.mknod"), call("second", "first", path))

    edit_program(change)(members, path)


def parameter_as_globals(members: Members, path: str) -> None:
    """Name a parameter so that torch reads the global variables of a method of the loaded module."""

    def get(name: str, source: str, key: str) -> dict[str, Any]:
        values = [{"as_tensor": {"name": source}}, {"as_string": key}]
        node = call(name, None)
        return node | {
            "target": "_operator.getitem",
            "inputs": [{"name": "", "arg": value, "kind": 1} for value in values],
            "outputs": [{"as_tensor": {"name": name}}],
        }

    def change(program: Any) -> None:
        add_parameter(members, program, "__class__.named_parameters.__globals__")
        builtins, evaluate = get("builtins", "p_made", "__builtins__"), get("evaluate", "builtins", "eval")
        function, result = call("function", "evaluate", "torch.os.mknod"), call("result", "function", path)
        add_nodes(program, builtins, evaluate, function, result)

    edit_program(change)(members, path)


def keyword_as_code(members: Members, path: str) -> None:
    edit_program(lambda program: add_nodes(program, call("first", None, path, keyword="torch.os.mknod, path")))(
        members, path
    )


def input_key_as_code(members: Members, path: str) -> None:
    """Name an input so that the message of a guard becomes an expression."""
    name = next(name for name in members if "sample_inputs" in name)
    members[name] = save((({f"%torch.os.mknod('{path}')or ": torch.randn(4, 1, 8, 8)},), {}))


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
        (keyword_as_code, "name 'torch.os.mknod, path'"),
        (input_key_as_code, "pickled objects in data/sample_inputs/model.pt"),
    ],
)
@pytest.mark.parametrize("with_effect", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_program_that_executes_code_is_detected(
    exported: Path, tmp_path: Path, attack: Callable[[Members, str], None], part: str, with_effect: bool
) -> None:
    """Each program creates a file when torch loads and calls it, and `find_code` describes the reason."""
    path, marker = exported / "data" / "model.pt2", tmp_path / "marker"
    rewrite(path, lambda members: attack(members, str(marker)))
    found = find_code(exported)
    assert found.startswith(part), found
    assert found.endswith(" in data/model.pt2")
    assert not marker.exists()
    if with_effect:
        code = f"import torch; torch.export.load({str(path)!r}).module()(torch.randn(4, 1, 8, 8))"
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        assert marker.exists(), "the attack has no effect, so the test shows nothing"
