"""References to objectives: what they name, without importing it."""

from __future__ import annotations

import os
import shlex
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from hpsearch.objectives.errors import suggest_names

BUILTIN: dict[str, str] = {
    "digits": "hpsearch.objectives.builtin.digits:Digits",
    "breast_cancer": "hpsearch.objectives.builtin.breast_cancer:BreastCancer",
    "text": "hpsearch.objectives.builtin.text:Text",
    "molecules": "hpsearch.objectives.builtin.molecules:Molecules",
    "gan": "hpsearch.objectives.builtin.gan:Gan",
    "denoise": "hpsearch.objectives.builtin.denoise:Denoise",
    "language": "hpsearch.objectives.builtin.language:Language",
    "series": "hpsearch.objectives.builtin.series:Series",
}


_FORMER_PATHS = {path.replace("hpsearch.objectives.builtin.", "objectives."): name for name, path in BUILTIN.items()}


def normalize_reference(reference: str) -> str:
    """Replace the former module path of a built-in objective by its name; return other references unchanged."""
    return _FORMER_PATHS.get(reference, reference)


def is_file_reference(reference: str) -> bool:
    """Return whether a reference is a path to a file, and not a built-in name or a module."""
    return split_file_reference(reference) is not None


def locate_source(reference: str) -> Path | None:
    """Return the file that a reference would import, without importing it; None if there is no such file."""
    return files[-1].resolve() if (files := locate_sources(reference)) else None


def locate_sources(reference: str) -> list[Path]:
    """Return the files that a reference would import, without importing them; empty if the last file is missing.

    Before the file of the objective, a module has the `__init__.py` of its packages, because they run first. Links in
    the absolute paths are not resolved.
    """
    reference = normalize_reference(reference)
    reference = BUILTIN.get(reference, reference)
    if (file := split_file_reference(reference)) is not None:
        return [file[0].absolute()] if has_kind(file[0], stat.S_ISREG) else []
    parts, spec, folders, files = reference.partition(":")[0].split("."), None, None, list[Path | None]()
    if not all(parts):
        return []
    for number in range(1, len(parts) + 1):
        spec, folders = _find_spec(".".join(parts[:number]), folders)
        if spec is None and not folders:
            return []
        origin = Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None
        files.append(origin.absolute() if origin is not None and origin.is_file() else None)
    return [file for file in files if file is not None] if files[-1] is not None else []


def _find_spec(name: str, folders: list[str] | None) -> tuple[ModuleSpec | None, list[str]]:
    """Return the spec of a module and the folders of its submodules.

    Unlike `importlib.util.find_spec`, this imports no parent package.
    """
    spec = None
    try:
        for finder in sys.meta_path:
            if (spec := finder.find_spec(name, folders)) is not None:
                break
        if spec is None and folders is None:
            spec = PathFinder.find_spec(name, [str(Path.cwd())])
        return spec, [] if spec is None else [*(spec.submodule_search_locations or ())]
    except KeyError:  # a namespace package below a package that is not imported
        return None, [str(path) for folder in folders or () if (path := Path(folder, name.rpartition(".")[2])).is_dir()]


def describe_unknown_reference(reference: str) -> str:
    """Return the error message for a reference that names no built-in objective, module or file."""
    if "." in reference:
        return f"objective {reference!r} is incomplete; write package.module:Class, or a path that ends in .py"
    if has_kind(Path(f"{reference}.py"), stat.S_ISREG):
        return f"unknown objective {reference!r}; did you mean the file {reference}.py?"
    return f"unknown objective {reference!r}; {suggest_names(reference, list(BUILTIN))}"


def split_file_reference(reference: str) -> tuple[Path, str] | None:
    """Return the file and the class name (may be empty) of a reference to a file; None for other references."""
    head, _, name = reference.rpartition(":")
    head = head[:-1] if head.endswith(".py:") else head  # FILE.py::CLASS, as pytest writes it
    path, name = (head, name) if head and not name.endswith(".py") else (reference, "")
    if Path(path).suffix != ".py" and os.sep not in path:
        return None
    with suppress(RuntimeError):  # `~USER` of an unknown user is not a home folder
        return Path(path).expanduser(), name
    return Path(path), name


def has_kind(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Return whether the path is that of a file of a kind; False if the system does not accept the path."""
    try:
        return is_kind(path.stat().st_mode)
    except (OSError, ValueError):  # such as a name of more than 255 bytes
        return False


def suggest_file(path: Path) -> str:
    """Return the objective with a similar name that a missing file may mean, else the command that creates the file."""
    if str(path).startswith(("http:/", "https:/", "file:/")):
        return "give the path of a file on this machine"
    known = {f"{name}.py": name for name in BUILTIN}
    with suppress(OSError):
        known |= {entry.name: str(entry) for entry in path.parent.glob("*.py") if entry.exists()}
    if close := get_close_matches(path.name, known, n=1, cutoff=0.8):
        return f"did you mean {known[close[0]]!r}?"
    return f"create it with: hpsearch init {shlex.quote(str(path))}"
