"""Static check of `torch.export` programs, before they are loaded.

`torch.export.load` executes content of the file: it unpickles objects, resolves the names of operators to any function
below `torch`, evaluates symbolic sizes with sympy, and compiles guards to Python code. This module accepts a program
only if all these parts are plain, without loading the program. It does not check the metadata of nodes, by which torch
reads any attributes below `torch`, because torch must load only the copy of `plain_copy`, which has no metadata.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import operator
import re
import unicodedata
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpsearch.objectives.private_folders import use_private_compiler_cache

if TYPE_CHECKING:
    from torch.export.pt2_archive import PT2ArchiveReader

_TEXT_FILES = {"archive_format", "archive_version", "byteorder", "version", "serialization_id"}
_UNSAFE_OPERATORS = {"from_file", "save"}  # read or write files
# Internal operators that exported models contain. Others may not check their arguments, such as indices.
_INTERNAL_OPERATORS = {
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_assert_async", "_assert_scalar", "_assert_tensor_metadata"),
    *("_cdist_forward", "_embedding_bag", "_fft_c2c", "_fft_c2r", "_fft_r2c"),
    *("_linalg_det", "_linalg_eigh", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "_log_softmax"),
    *("_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "_native_multi_head_attention"),
    *("_pack_padded_sequence", "_pad_packed_sequence", "_prelu_kernel", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu", "_softmax", "_to_copy"),
    *("_transformer_encoder_layer_fwd", "_trilinear", "_unsafe_view", "_upsample_bicubic2d_aa"),
    *("_upsample_bilinear2d_aa", "_weight_norm", "_weight_norm_interface"),
}
# Higher-order operators, and the positions of the functions that they call.
_HIGHER_ORDER = {
    **{"cond": {1, 2}, "while_loop": {0, 1}, "scan": {0}, "associative_scan": {0}, "map_impl": {0}, "out_dtype": set()},
    **{"wrap_with_set_grad_enabled": {1}, "wrap_with_autocast": {4}},
}
_HIGHER_ORDER_PREFIX = "torch.ops.higher_order."
_POSITIONAL = 1  # `torch._export.serde.schema.ArgumentKind.POSITIONAL`
_SYMBOLIC_FUNCTIONS = {
    *("Abs", "Add", "And", "CeilDiv", "CeilToInt", "CleanDiv", "Eq", "Equality", "Float", "FloatPow", "FloatTrueDiv"),
    *("FloorDiv", "FloorToInt", "Ge", "GreaterThan", "Gt", "Identity", "IntTrueDiv", "Integer", "LShift", "Le"),
    *("LessThan", "Lt", "Max", "Min", "Mod", "ModularIndexing", "Mul", "Ne", "Not", "Or", "Piecewise", "Pow"),
    *("PowByNatural", "PythonMod", "RShift", "Rational", "RoundDecimal", "RoundToInt", "StrictGreaterThan"),
    *("StrictLessThan", "Symbol", "ToFloat", "TruncToFloat", "TruncToInt", "Unequality", "Where", "ceiling", "floor"),
}
# Functions whose first argument is a text, which sympy evaluates in other functions.
_TEXT_FUNCTIONS = {"Symbol": re.compile(r"[A-Za-z_]\w*"), "Float": re.compile(r"[\d.e+-]+|inf|nan")}
_SYMBOL = re.compile(r"[a-z]{1,3}\d+|true|false|oo|int_oo|nan|L")
_TENSOR_METHODS = {"size", "stride", "storage_offset", "dim", "numel"}
_NAME = re.compile(r"[\w.:+\-]*")  # names of types and devices
_IDENTIFIER = re.compile(r"([^\W\d]\w*)?")  # names of values and keyword arguments, which torch writes into code
_INPUT_NAME = re.compile(r"[\w.\-]*")  # texts in the structure of inputs; torch writes keys into code
_IDENTIFIER_KEYS = {"name", "as_name", "user_input_name", "forward_arg_names"}
# Names that the code of torch reads. A value with such a name would replace what torch reads.
_RESERVED_NAMES = frozenset(
    {"self", "torch", "device", "inf", "nan", "NoneType", "fx_pytree", "pytree", "getattr", "operator", "math"}
)
_VALUES_KEYS = {"tensor_values", "sym_int_values", "sym_float_values", "sym_bool_values", "custom_obj_values"}
_ATTRIBUTE_KEYS = {"parameter_name", "buffer_name", "tensor_constant_name", "custom_obj_name", "fqn"}
_JSON_KEYS = {"in_spec", "out_spec", "context"}  # the structures of inputs and outputs, which are JSON in JSON
_TEXT = re.compile(r"[\w.:+\-*/,<> ]*")  # texts without quotes and brackets, such as the equation of an einsum
_IMPORTS = re.compile(r"default_factory_module|__enum__")  # fields of structures that name a module to import
_NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Name, ast.Constant, ast.Load),
    *(ast.keyword, ast.Subscript, ast.Tuple, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
_TENSOR_FILE = re.compile(r"(weight|tensor)_\d+")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or an object has a name twice, of which readers use different values.
    """

    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("a name occurs twice in an object")
        return found

    return json.loads(text, object_pairs_hook=make_object)


def is_node(value: dict[str, Any]) -> bool:
    """Return whether a JSON object is a node of a graph."""
    return {"target", "inputs", "metadata"} <= value.keys()


def is_nested_json(value: Any, key: str) -> bool:
    """Return whether the value of a key is a text that torch reads as JSON."""
    return isinstance(value, str) and key in _JSON_KEYS and value.startswith(("[", "{", '"'))


def find_unsafe_part(path: Path) -> str:
    """Return a description of the first part of a `.pt2` file that may execute code; empty if there is none."""
    try:
        return next(list_unsafe_parts(path), "")
    except Exception as error:  # the readers raise errors of many types for damaged files
        return f"an unreadable program ({type(error).__name__})"


def open_archive(path: Path) -> PT2ArchiveReader:
    """Return torch's own reader of a `.pt2` file: a crafted file has other members for zipfile."""
    use_private_compiler_cache()  # otherwise the import creates a folder that other users can create first
    from torch.export.pt2_archive import PT2ArchiveReader

    return PT2ArchiveReader(str(path))


def list_unsafe_parts(path: Path) -> Iterator[str]:
    """Return descriptions of the parts of a `.pt2` file that may execute code; raises errors for damaged files."""
    # torch reads a file without a program in one folder as a program of an older format, and then with zipfile.
    with zipfile.ZipFile(path) as archive:
        stored = archive.namelist()
    reader = open_archive(path)
    names, root = reader.get_file_names(), stored[0].partition("/")[0]
    if sorted(stored) != sorted(f"{root}/{name}" for name in names):
        yield "files that not all readers find"
    if not any(re.fullmatch(r"models/[^/]+\.json", name) for name in names):
        yield "no program of the current format"
    for name in names:
        match name.split("/"):
            case ["models", file] if file.endswith(".json"):
                program = parse_json(reader.read_bytes(name))
                yield from _list_unsafe_values(program)
                paths = set(_list_attributes(program))
                yield from (
                    f"the path {path!r}, whose parent is a tensor" for path in paths if _has_parent(path, paths)
                )
            case ["data", "weights" | "constants", file] if file.endswith("_config.json"):
                yield from _list_pickled_tensors(parse_json(reader.read_bytes(name)))
            case ["data", "weights" | "constants", file] if _TENSOR_FILE.fullmatch(file):
                pass  # bytes of a tensor, unless a configuration declares them as pickled
            case ["data", "sample_inputs", file] if file.endswith(".pt"):
                if not _is_plain_pickle(reader.read_bytes(name)):
                    yield f"pickled objects in {name}"
            case [file] | [".data", file] if file in _TEXT_FILES:
                pass
            case _:
                yield f"the file {name}"


def _list_pickled_tensors(config: dict[str, Any]) -> Iterator[str]:
    for name, entry in config["config"].items():
        if entry.get("use_pickle") is not False or not _TENSOR_FILE.fullmatch(entry["path_name"]):
            yield f"the pickled object {name!r}"


def _is_plain_pickle(content: bytes) -> bool:
    """Return whether a file contains positional and keyword arguments of plain types."""
    try:
        arguments = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return list(map(type, arguments)) == [tuple, dict] and _is_plain(arguments, {})
    except Exception:  # of many types; without this check, torch falls back to an unrestricted unpickler
        return False


def _is_plain(value: Any, plain: dict[int, Any]) -> bool:
    """Return whether a value contains only plain values, containers and tensors; subclasses could hide content.

    Args:
        value: the value.
        plain: the values by id that are known to be plain; a value can occur many times.
    """
    if id(value) in plain:
        return True
    if type(value) in (tuple, list):
        is_plain = all(_is_plain(part, plain) for part in value)
    elif type(value) in (dict, OrderedDict):  # torch writes the keys into the messages of guards, which are code
        items = list(dict.items(value))
        is_shown = list(value) == [key for key, _ in items] and not _has_attributes(value)
        is_plain = is_shown and all(_is_plain_text(key) and _is_plain(part, plain) for key, part in items)
    elif type(value) in (torch.Tensor, torch.nn.Parameter):
        is_plain = not _has_attributes(value)
    else:
        is_plain = _is_plain_text(value) or type(value) in (bool, int, float, type(None))
    if is_plain:
        plain[id(value)] = value
    return is_plain


def _has_attributes(value: Any) -> bool:
    attributes = getattr(value, "__dict__", {})
    return type(attributes) is not dict or bool(attributes)


def _is_plain_text(value: Any) -> bool:
    return type(value) is str and _TEXT.fullmatch(value) is not None


def _list_unsafe_values(value: Any, key: str = "", *, is_argument: bool = False) -> Iterator[str]:
    """Return the descriptions of unsafe values below a JSON value of the program.

    Args:
        value: the JSON value.
        key: key of the value, or of the list that contains it, in its parent.
        is_argument: whether the value is an argument of an operator, whose name may be reserved, such as `self`.
    """
    if isinstance(value, dict):
        yield from _list_unsafe_items(value, key, is_argument=is_argument)
    elif isinstance(value, list):
        for item in value:
            yield from _list_unsafe_values(item, key)
    elif isinstance(value, str) and not _is_safe_text(value, key):
        yield f"{key} {value[:80]!r}"


def _list_unsafe_items(value: dict[str, Any], key: str, *, is_argument: bool) -> Iterator[str]:
    if has_call := is_node(value):
        yield from _list_unsafe_calls(value["target"], value["inputs"])
    for name, item in value.items():
        if not _NAME.fullmatch(name) or _IMPORTS.search(name) or (key in _VALUES_KEYS and is_reserved(name)):
            yield f"the name {name[:80]!r}"
        if has_call and name == "metadata":
            pass  # not in the copy
        elif has_call and name == "inputs":
            for each in item:
                yield from _list_unsafe_values(each, name, is_argument=True)
        elif key == "as_graph" and name == "name" and not _is_safe_attribute(item):
            yield f"the name {item[:80]!r}"
        elif name == "as_string_to_argument" and any("as_graph" in argument for argument in item.values()):
            yield "a subgraph in a dictionary"
        elif not (has_call and name == "target"):
            yield from _list_unsafe_values(item, "argument" if is_argument and name == "name" else name)


def _list_unsafe_calls(target: str, inputs: list[dict[str, Any]]) -> Iterator[str]:
    """Return a description if the operator of a node is unsafe, or if it calls something other than a subgraph."""
    if not is_safe_operator(target):
        yield f"the operator {target[:80]!r}"
        return
    graphs = {place for place, each in enumerate(inputs) if "as_graph" in each["arg"]}
    is_positional = all(each.get("kind") == _POSITIONAL or not each["name"] for each in inputs)
    if graphs != get_function_positions(target) or (graphs and not is_positional):
        yield f"the arguments of the operator {target[:80]!r}"


def get_function_positions(target: str) -> set[int]:
    """Return the positions of the arguments that an operator calls."""
    name = target.removeprefix(_HIGHER_ORDER_PREFIX)
    return set() if name == target else _HIGHER_ORDER[name]


def is_reserved(name: str) -> bool:
    """Return whether Python reads the name of a value as one that the code of torch uses otherwise."""
    return unicodedata.normalize("NFKC", name) in _RESERVED_NAMES


def _is_safe_text(text: str, key: str) -> bool:
    if key == "as_operator":
        return is_safe_operator(text)
    if key in {"expr_str", "guards_code"}:
        return _is_safe_expression(text, is_guard=key == "guards_code")
    if key == "argument":
        return _IDENTIFIER.fullmatch(text) is not None
    if key in _IDENTIFIER_KEYS:
        return _IDENTIFIER.fullmatch(text) is not None and not is_reserved(text)
    if key in _ATTRIBUTE_KEYS:
        return _is_safe_attribute(text)
    if key == "in_spec" and not all(map(_INPUT_NAME.fullmatch, _list_texts(text))):
        return False
    if is_nested_json(text, key):
        return not _IMPORTS.search(text) and next(_list_unsafe_values(parse_json(text), key), None) is None
    return bool(_TEXT.fullmatch(text)) and not _IMPORTS.search(text)


def _list_attributes(value: Any) -> Iterator[str]:
    """Return the paths of tensors in the loaded module that a JSON value of the program names."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in _ATTRIBUTE_KEYS - {"fqn"} and isinstance(item, str):
                yield item
            else:
                yield from _list_attributes(item)
    elif isinstance(value, list):
        for item in value:
            yield from _list_attributes(item)


def _has_parent(path: str, paths: set[str]) -> bool:
    """Return whether one of the paths is a parent of `path`: torch would read an attribute of this tensor."""
    parts = path.split(".")
    return any(".".join(parts[:length]) in paths for length in range(1, len(parts)))


def _is_safe_attribute(path: str) -> bool:
    """Return whether no part of the path is an attribute that each GraphModule has, which torch would read instead."""
    return _TEXT.fullmatch(path) is not None and not any(map(is_module_attribute, path.split(".")))


def is_module_attribute(name: str) -> bool:
    """Return whether each GraphModule has an attribute with this name."""
    return unicodedata.normalize("NFKC", name) in _list_module_attributes()  # as Python normalizes names in code


@functools.cache
def _list_module_attributes() -> frozenset[str]:
    return frozenset(dir(torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())))


def is_safe_operator(target: str) -> bool:
    """Return whether the operator with this name in a program computes only with tensors and numbers."""
    match target.split("."):
        case ["torch", "ops", "aten" | "prims", name, *overload]:
            is_internal = name.startswith("_") and name not in _INTERNAL_OPERATORS
            is_plain = len(overload) <= 1 and not any(each.startswith("__") for each in overload)
            return is_plain and not is_internal and name not in _UNSAFE_OPERATORS
        case ["torch", "ops", "higher_order", name]:
            return name in _HIGHER_ORDER
        case ["torch", name]:
            return re.fullmatch(r"_?sym_\w+", name) is not None
        case ["_operator", name]:
            return name not in {"attrgetter", "methodcaller", "call", "setitem", "delitem"} and name in operator.__all__
        case ["math", name]:
            return not name.startswith("_")
    return False


def _list_texts(text: str) -> Iterator[str]:
    """Return the texts in a JSON text, and in the JSON texts that it contains."""
    values: list[Any] = [text]
    while values:
        value = values.pop()
        if isinstance(value, str) and value.startswith(("[", "{", '"')):
            values.append(parse_json(value))
        elif isinstance(value, str):
            yield value
        elif isinstance(value, list | dict):
            values += value if isinstance(value, list) else [*value, *value.values()]


def _is_safe_expression(text: str, *, is_guard: bool) -> bool:
    """Return whether an expression has only sizes of tensors, numbers, and the functions of symbolic sizes."""
    if not text.isprintable() or "\\" in text or "#" in text:  # torch removes line feeds before it runs the text
        return False
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except SyntaxError:
        return False
    texts = {id(each) for node in nodes for each in _list_plain_texts(node, is_guard=is_guard)}
    return all(id(node) in texts or _is_safe_node(node) for node in nodes)


def _list_plain_texts(node: ast.AST, *, is_guard: bool) -> Iterator[ast.Constant]:
    """Return the constants in a node that are names of symbols, floats, or keys of the inputs that a guard checks."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str() as text) as constant, *_]):
            if name in _TEXT_FUNCTIONS and _TEXT_FUNCTIONS[name].fullmatch(text):
                yield constant
        case ast.Subscript(slice=ast.Constant(value=str() as text) as constant):
            if is_guard and _NAME.fullmatch(text):
                yield constant


def _is_safe_node(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name in _SYMBOLIC_FUNCTIONS
        case ast.Call(func=ast.Attribute()):
            return True  # the case of the attribute rejects the names of other methods
        case ast.Call():
            return False
        case ast.Name(id=name):
            return name in _SYMBOLIC_FUNCTIONS or _SYMBOL.fullmatch(name) is not None
        case ast.Attribute(attr=name):
            return name in _TENSOR_METHODS
        case ast.Constant(value=value):  # not bytes: torch writes the expression into a text of the code that it runs
            return value is None or isinstance(value, int | float)
    return isinstance(node, _NODES)
