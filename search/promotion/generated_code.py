"""Check of the code that torch has generated from a `torch.export` program, before this code runs.

The static check of `exported_program` accepts a program by its content. This second check does not depend on how torch
writes names into code: it accepts only code that calls operators of tensors, reads tensors of the module, and computes
with numbers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from hpsearch.search.promotion.exported_program import (
    get_function_positions,
    is_module_attribute,
    is_reserved,
    is_safe_operator,
)

_STRUCTURES = {"_in_spec", "_out_spec", "_guards_fn"}  # attributes of the module that are no tensors
_FUNCTIONS = {"fx_pytree.tree_flatten_spec", "pytree.tree_unflatten", "self._guards_fn", "device"}
_TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format)
_NODES = (
    *(ast.Assign, ast.Return, ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Starred, ast.Subscript, ast.Slice),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.keyword, ast.arguments, ast.expr_context),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)


def find_unsafe_code(program: Path) -> str:
    """Return a description of the first part of the code of a checked `.pt2` file that may do anything else.

    The function loads the program, but does not call it. An empty text means that there is no such part.
    """
    try:
        module = torch.export.load(program).module()
    except Exception as error:  # torch raises errors of many types for damaged programs
        return f"a program that cannot be loaded ({type(error).__name__})"
    graphs = (each for each in module.modules() if isinstance(each, torch.fx.GraphModule))
    return next((part for graph in graphs for part in list_unsafe_code(graph.code, graph)), "")


def list_unsafe_code(code: str, module: nn.Module) -> Iterator[str]:
    """Return descriptions of unsafe parts of the code of a `GraphModule`, which may read its tensors and subgraphs."""
    match ast.parse(code).body:
        case [ast.FunctionDef(name="forward", decorator_list=[], returns=None) as function]:
            pass
        case _:
            yield "code outside of forward()"
            return
    first, *others = [*function.args.posonlyargs, *function.args.args]
    others += [*function.args.kwonlyargs, *filter(None, (function.args.vararg, function.args.kwarg))]
    if first.arg != "self" or any(is_reserved(each.arg) or each.annotation for each in others):
        yield f"the arguments {ast.unparse(function.args)[:80]!r}"
    names = _list_names_of_subgraphs(function, module)
    nodes: list[ast.AST] = [*function.args.defaults, *filter(None, function.args.kw_defaults), *function.body]
    while nodes:
        node = nodes.pop()
        if (parts := _list_parts(node, module)) is None or not _calls_subgraphs_only(node, names):
            yield f"the code {ast.unparse(node)[:80]!r}"
        else:
            nodes += parts


def _list_names_of_subgraphs(function: ast.FunctionDef, module: nn.Module) -> set[str]:
    """Return the variables to which the function assigns only subgraphs of its module, and None at the end."""
    names, other = set(), {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            targets = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and each.id != "self"}
            match node.value:
                case ast.Attribute(value=ast.Name(id="self"), attr=name) if _is_subgraph(module, name):
                    names |= targets
                case ast.Constant(value=None):
                    pass
                case _:
                    other |= {
                        each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)
                    }
    return names - other


def _calls_subgraphs_only(node: ast.AST, names: set[str]) -> bool:
    """Return whether a node is no call of a higher-order operator, or one of subgraphs with these names."""
    if not isinstance(node, ast.Call):
        return True
    places = get_function_positions(ast.unparse(node.func))
    return all(place < len(node.args) and ast.unparse(node.args[place]) in names for place in places)


def _list_parts(node: ast.AST, module: nn.Module) -> list[ast.AST] | None:
    """Return the parts of a safe node that must be checked too; None if the node is unsafe."""
    match node:
        case ast.Name(id=name, ctx=ast.Load()):
            return [] if name in {"inf", "nan"} or not is_reserved(name) else None
        case ast.Name(id=name):
            return None if is_reserved(name) else []
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant()], keywords=[]):
            return [] if _is_own(module, _read_path(node)) else None
        case ast.Call(func=function, args=arguments, keywords=keywords):
            return [*arguments, *keywords] if _is_function(function) else None
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return [] if isinstance(getattr(torch, name, None), _TORCH_VALUES) else None
        case ast.Attribute(value=ast.Name(id="self"), attr=name) if name in _STRUCTURES:
            return []
        case ast.Attribute():
            return [] if _is_own(module, _read_path(node)) or _is_function(node) else None
    return list(ast.iter_child_nodes(node)) if isinstance(node, _NODES) else None


def _is_function(function: ast.expr) -> bool:
    name = ast.unparse(function)
    is_path = all(map(str.isidentifier, name.split(".")))
    return name in _FUNCTIONS or (is_path and is_safe_operator(name.replace("operator.", "_operator.", 1)))


def _is_own(module: nn.Module, path: list[str]) -> bool:
    """Return whether a path leads through modules to a tensor or a subgraph."""
    for name in path[:-1]:
        if (below := module._modules.get(name)) is None:
            return False
        module = below
    return bool(path) and (_is_subgraph(module, path[-1]) or _is_tensor(module, path[-1]))


def _is_subgraph(module: nn.Module, name: str) -> bool:
    return isinstance(module._modules.get(name), torch.fx.GraphModule)


def _is_tensor(module: nn.Module, name: str) -> bool:
    found = (module._parameters.get(name), module._buffers.get(name), vars(module).get(name))
    return any(isinstance(each, torch.Tensor) for each in found)


def _read_path(node: ast.expr) -> list[str]:
    """Return the path of `self.a.b` or `getattr(self.a, "b")`; empty for other code, and attributes of all modules."""
    match node:
        case (
            ast.Attribute(value=value, attr=str() as name)
            | ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str() as name)], keywords=[])
        ):
            is_self = isinstance(value, ast.Name) and value.id == "self"
            above = _read_path(value)
            return [*above, name] if (above or is_self) and not is_module_attribute(name) else []
    return []
