"""Which objective files a command may import: every worker's database role can write the reference in a study."""

from __future__ import annotations

import ast
import json
import re
import site
import stat
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpsearch.changeable_paths import find_changeable_part
from hpsearch.objectives.references import BUILTIN, is_file_reference, locate_sources
from hpsearch.search.console import format_command
from hpsearch.search.errors import SearchError
from hpsearch.storage.attributes import RESTORED, SOURCE_SHA256
from hpsearch.storage.files import compute_sha256, normalize_case, write_private
from hpsearch.storage.home import prepare_home, read_own_text, resolve_home
from hpsearch.storage.mlflow.locations import ARTIFACT_PATH

_RELATIVE = "its path is not absolute"
_RESTORED = "the study was restored from a backup"
_MISSING = "this machine has no Python file at this place"

_LIBRARIES = ("purelib", "platlib")  # names of the folders of installed packages

_RECORD = "trusted-objectives.json"  # hash by path of the files that the user has named or confirmed


@dataclass(frozen=True)
class Code:
    """The code of an objective, located without importing it.

    Attributes:
        file: resolved path of the objective's file.
        sha256: hexadecimal SHA-256 of this file.
        located: paths of the files that an import runs, the objective's file last; their links are not resolved.
    """

    file: Path
    sha256: str
    located: Sequence[Path]


def read_code(reference: str) -> Code | None:
    """Return the code at the reference of an objective; None if this machine has no Python file there."""
    if not (located := locate_sources(reference)):
        return None
    file = located[-1].resolve()
    if file.suffix != ".py":  # reading another file, such as /proc/kmsg, may never end
        return None
    try:
        return Code(file, compute_sha256(file), located)
    except FileNotFoundError:  # removed meanwhile
        return None


def check_source(name: str, reference: str, attrs: Mapping[str, Any], *, allow_changed: bool = False) -> Code | None:
    """Check, without importing it, that the code of a study's objective may be imported.

    Built-in objectives and files that the user has named or confirmed may be imported. Another file may be imported if
    no other user can change or replace it, if it defines the class, and if it has the hash of the study's creation. The
    same holds for the packages of a module, unless they are installed.

    Args:
        name: name of the study.
        reference: stored reference of the objective.
        attrs: user attributes of the study.
        allow_changed: whether to accept any file that is at the stored reference. A worker does this, because starting
            a worker is a request to run the study's code. A restored study still needs a confirmation, and a missing
            file is rejected.

    Returns:
        The code that may be imported; None for a built-in objective.

    Raises:
        SearchError: the user has to confirm the code.
    """
    if reference in BUILTIN:
        return None
    code = read_code(reference)
    reason = _find_distrust(reference, attrs, code)
    if reason is None or (allow_changed and reason not in (_RESTORED, _RELATIVE, _MISSING)):
        return code
    if reason == _MISSING:
        raise SearchError(
            f"the objective {reference} of study {name!r} is not imported, because {reason}; copy the file to this "
            "place, or run hpsearch in the folder of its module"
        )
    raise SearchError(
        f"the objective {reference} of study {name!r} is not imported, because {reason}; if you trust this "
        f"code, confirm it with: {format_command('trust', name)}"
    )


def find_distrust(reference: str, attrs: Mapping[str, Any]) -> str | None:
    """Return why the user has to confirm the code of a study's objective; None if it may be imported."""
    return None if reference in BUILTIN else _find_distrust(reference, attrs, read_code(reference))


def _find_distrust(reference: str, attrs: Mapping[str, Any], code: Code | None) -> str | None:
    is_file = is_file_reference(reference)
    if is_file and not reference.startswith("/"):
        return _RELATIVE
    # The import of a module follows links again, unlike that of a file.
    if code is not None and _is_recorded(reference, code) and (is_file or not _has_changeable_link(code)):
        return None
    if attrs.get(RESTORED):
        return _RESTORED
    if code is None:
        return _MISSING
    if attrs.get(SOURCE_SHA256) != code.sha256:
        return "its code has changed since the study was created"
    if not _defines_class(code.file, reference):
        return "its file does not define this class, or is not confirmed for this function"
    return _find_foreign_code(code, is_file=is_file)


def _is_recorded(reference: str, code: Code) -> bool:
    """Return whether the user has confirmed the code of an objective; a function only by its own name.

    Functions of the same file may have other purposes, and would be called to get a search space.
    """
    record = _read_record()
    names = [str(code.file)] if _defines_class(code.file, reference) else []
    return any(record.get(name) == code.sha256 for name in [*names, _make_function_key(reference, code)])


def _make_function_key(reference: str, code: Code) -> str:
    return f"{code.file}:{reference.rpartition(':')[2]}"


def _defines_class(file: Path, reference: str) -> bool:
    """Return whether a file may define the objective, which has a base class; an import also runs all other code."""
    wanted = reference.rpartition(":")[2] if not reference.endswith(".py") else None
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    found = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.bases)
    return any(wanted in (None, node.name) for node in found)


def _has_changeable_link(code: Code) -> bool:
    return code.located[-1] != code.file and find_changeable_part(code.located[-1]) is not None


def _find_foreign_code(code: Code, *, is_file: bool) -> str | None:
    # A module can also import modules of the working folder.
    for path in code.located if is_file else [*code.located, Path.cwd()]:
        # Clients of an MLflow server of this user can upload it. Some file systems ignore the case of paths.
        if any(ARTIFACT_PATH.search(normalize_case(str(each))) for each in (path, path.resolve())):
            return "the file is an artifact of MLflow"
        if any(map(_is_temporary_folder, path.resolve().parents)):
            return "the file is in a temporary folder, where it may be a download or an upload"
        if not is_file and _is_installed(path):
            continue
        if (part := find_changeable_part(path)) is not None:
            return f"another user can change {str(part)!r}"
        if any((folder / "stack.json").exists() for folder in path.resolve().parents):
            return "the file is in a home folder of hpsearch"
    return None


_TEMPORARY = re.compile(r"(tmp|hpsearch-)[a-z0-9_]{8}")  # names that Python's `tempfile` gives to folders


def _is_temporary_folder(folder: Path) -> bool:
    """Return whether a folder is as Python's `tempfile` makes it; MLflow and the dashboard keep artifacts there."""
    if _TEMPORARY.fullmatch(folder.name) is None or stat.S_IMODE(folder.stat().st_mode) != 0o700:
        return False
    parent = folder.parent
    is_known = parent.name in ("tmp", "mlflow-tmp") or parent == Path(tempfile.gettempdir()).resolve()
    return is_known or bool(parent.stat().st_mode & stat.S_ISVTX)


def _is_installed(path: Path) -> bool:
    folders = {*site.getsitepackages(), site.getusersitepackages(), *(sysconfig.get_path(n) for n in _LIBRARIES)}
    return any(path.is_relative_to(folder) for folder in folders)


def record_trust(reference: str, code: Code | None) -> None:
    """Record code as trusted on this machine; a built-in objective needs no record.

    The record is in the folder of $HPSEARCH_HOME or, without this variable, in the user's data folder.

    Raises:
        StorageError: the folder cannot be written.
    """
    if reference in BUILTIN or code is None:
        return
    record, keys = _read_record(), [str(code.file), _make_function_key(reference, code)]
    if any(record.get(key) != code.sha256 for key in keys):
        write_private(prepare_home() / _RECORD, json.dumps({**record, **dict.fromkeys(keys, code.sha256)}, indent=2))


def _read_record() -> dict[str, str]:
    try:
        found = json.loads(read_own_text(resolve_home() / _RECORD))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
