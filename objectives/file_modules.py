"""Modules of objective files: their names, and their import in processes that code of the objective starts.

Processes with the start methods `spawn` and `forkserver` import the module of each function that they receive.
"""

from __future__ import annotations

import hashlib
import importlib.util
import site
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any

_files: dict[str, tuple[Path, bytes]] = {}  # path and content by the name of the module


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


def share_module(name: str, path: Path, content: bytes) -> None:
    """Let processes that this process starts later import the module of an objective file."""
    if not _files:
        _send_files()
    _files[name] = path, content


def _send_files() -> None:
    make_data = spawn.get_preparation_data

    def make_data_with_files(name: str) -> dict[str, Any]:
        return make_data(name) | {"hpsearch folder": _Package(), "hpsearch files": _Files(_files)}

    spawn.get_preparation_data = make_data_with_files


class _Package:
    """The folder of this package, which the process that unpickles the object adds to `sys.path` if necessary."""

    def __reduce__(self) -> tuple[Any, ...]:
        folder = str(Path(sys.modules["hpsearch"].__path__[0]).parent)
        is_known = folder in {*site.getsitepackages(), site.getusersitepackages()}
        return (bool, ()) if is_known else (site.addsitedir, (folder,))


class _Files(dict[str, tuple[Path, bytes]]):
    """Files by the name of the module, for which the process that unpickles them installs a finder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_files, (dict(self),)


def _receive_files(files: dict[str, tuple[Path, bytes]]) -> None:
    for name, (path, content) in files.items():
        share_module(name, path, content)
    sys.meta_path.append(_Finder())


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 for modules of packages
        target: ModuleType | None = None,  # noqa: ARG002 for reload
    ) -> ModuleSpec | None:
        if fullname not in _files:
            return None
        return importlib.util.spec_from_file_location(fullname, _files[fullname][0], loader=self)

    def exec_module(self, module: ModuleType) -> None:
        execute_file(module, *_files[module.__name__])
