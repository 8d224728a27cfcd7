"""Modules of objective files: their names, and their import in processes that code of the objective starts.

Processes with the start methods `spawn` and `forkserver` import the module of each function that they receive.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any

_paths: dict[str, Path] = {}  # by the name of the module


def make_module_name(path: Path, content: bytes) -> str:
    """Return the name of the module of an objective file.

    The name is unique: a file search.py or numpy.py hides no other module, and a notebook can overwrite its file.
    """
    return f"hpsearch_objective_{path.stem}_{hashlib.sha256(str(path).encode() + content).hexdigest()[:8]}"


def execute_file(module: ModuleType, path: Path, content: bytes) -> None:
    """Execute the content of an objective file, which was read from the path, in its module."""
    # The loader itself would read the file again, or run a compiled file in __pycache__.
    code = SourceFileLoader(module.__name__, str(path)).source_to_code(content, str(path))
    exec(code, vars(module))  # noqa: S102 the code of the objective


def share_module(name: str, path: Path) -> None:
    """Let processes that this process starts later import the module of an objective file."""
    if not _paths:
        _send_paths()
    _paths[name] = path


def _send_paths() -> None:
    make_data = spawn.get_preparation_data

    def make_data_with_paths(name: str) -> dict[str, Any]:
        return make_data(name) | {"hpsearch": _Paths(_paths)}

    spawn.get_preparation_data = make_data_with_paths


class _Paths(dict[str, Path]):
    """Paths by the name of the module, for which the process that unpickles them installs a finder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_paths, (dict(self),)


def _receive_paths(paths: dict[str, Path]) -> None:
    for name, path in paths.items():
        share_module(name, path)
    sys.meta_path.append(_Finder())


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 for modules of packages
        target: ModuleType | None = None,  # noqa: ARG002 for reload
    ) -> ModuleSpec | None:
        if (file := _paths.get(fullname)) is None:
            return None
        return importlib.util.spec_from_file_location(fullname, file, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        content = (path := _paths[module.__name__]).read_bytes()
        if make_module_name(path, content) != module.__name__:
            raise ImportError(f"{path} has changed since this search loaded it")
        execute_file(module, path, content)
