"""Uncommitted changes of the objective's source files, without secrets."""

from __future__ import annotations

import ast
import difflib
import hashlib
import io
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import resolve_name
from pathlib import Path

from hpsearch.redaction import HIDDEN, redact

RECORD_CHANGES = "HPSEARCH_RECORD_CHANGES"  # 0 to record no changes
_MAX_LENGTH = 200_000  # characters
_MAX_COMPARED_LINES = 4000  # of both files; difflib's time grows with the square
_DECODE_ERRORS = "backslashreplace"  # keeps the differences of files with another encoding


@lru_cache
def read_changes(source: Path | None) -> str:
    """Return the differences of an objective's source file, and of the files that it imports, to the last commit.

    Other files of the repository may contain secrets, and the text leaves this machine.

    Args:
        source: source file of the objective; None if it has no file.

    Returns:
        A unified diff without secrets; empty if there are no differences, no repository or no git, or if
        `HPSEARCH_RECORD_CHANGES` is 0.
    """
    if source is None or os.environ.get(RECORD_CHANGES) == "0":
        return ""
    changed = compare_with_commit(source, len(sys.modules)) or {}
    diff = "".join(_format_difference(name, before, after) for name, (before, after) in sorted(changed.items()))
    if not diff:
        return ""
    if (length := len(diff)) > _MAX_LENGTH:
        diff = f"{diff[:_MAX_LENGTH].rpartition(chr(10))[0]}\n[truncated: {length} characters in total]\n"
    return hide_secrets(diff)


@lru_cache
def compare_with_commit(source: Path, _n_modules: int) -> dict[str, tuple[str, str]] | None:
    """Compare an objective's source file, and the files that it imports, with the last commit.

    git reads only objects and attributes here: if it compared files, it would run filters that the repository defines.

    Args:
        source: the source file.
        _n_modules: number of loaded modules, so that the result is cached until another module is loaded.

    Returns:
        The committed and the present text of each file that differs, by its name in the repository. Imported files that
        the commit does not contain are omitted. None if it does not contain the source file, or cannot be compared.
    """
    path = source.resolve()
    top = run_git(path.parent, "rev-parse", "--show-toplevel")
    if top is None or "site-packages" in path.parts or not path.is_relative_to(root := Path(top.removesuffix("\n"))):
        return None
    loaded = {file for module in list(sys.modules.values()) if (file := _find_file(module, root)) is not None}
    digests = _list_committed(root, {path, *loaded})
    if path not in digests:
        return None
    try:
        contents = {file: file.read_bytes() for file in digests if file.exists()}
    except OSError:
        return None
    # In a repository with SHA-256, all files seem to differ here, and their texts are compared.
    differing = {file for file, content in contents.items() if _hash_blob(content) != digests[file]}
    if not differing:
        return {}
    # The imports are searched only now: to parse all files of a repository, such as hpsearch's own, can take a second.
    differing &= _find_imported_files(path, root)
    if differing and _has_conversions(root, differing):
        return None
    changed: dict[str, tuple[str, str]] = {}
    for file in differing:
        after = _decode(contents[file])
        if (before := run_git(root, "cat-file", "blob", digests[file])) is None:
            return None
        if before != after:
            changed[file.relative_to(root).as_posix()] = before, after
    return changed


def _list_committed(root: Path, files: set[Path]) -> dict[Path, str]:
    """Return the names of the contents that the last commit has for some files; other files are omitted."""
    names = sorted(file.relative_to(root).as_posix() for file in files)
    listing = run_git(root, "ls-tree", "-r", "-z", "--full-tree", "HEAD", "--", *names) or ""
    entries = (line.partition("\t") for line in listing.split("\0")[:-1])
    return {root / name: entry.split(" ")[2] for entry, _, name in entries}


def _hash_blob(content: bytes) -> str:
    """Return the name that git gives to the content of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _has_conversions(root: Path, files: set[Path]) -> bool:
    """Return whether git stores one of the files in another form, for example encrypted."""
    names = sorted(file.relative_to(root).as_posix() for file in files)
    found = run_git(root, "check-attr", "-z", "filter", "ident", "working-tree-encoding", "--", *names)
    return found is None or not {"unspecified", "unset"}.issuperset(found.split("\0")[2::3])


def _decode(content: bytes) -> str:
    """Return the text of a file as :func:`run_git` returns it: with the same errors and line ends."""
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors=_DECODE_ERRORS).read()


def _format_difference(name: str, before: str, after: str) -> str:
    """Return a difference in the format of git, which `git apply` reads."""
    shown = name if name.isprintable() else ascii(name)
    old, new = (io.StringIO(text).readlines() for text in (before, after))
    if len(old) + len(new) <= _MAX_COMPARED_LINES:
        lines = [*difflib.unified_diff(old, new, f"a/{shown}", f"b/{shown}")]
    else:
        lines = [f"--- a/{shown}\n", f"+++ b/{shown}\n", f"@@ -1,{len(old)} +1,{len(new)} @@\n"]
        lines += [f"-{line}" for line in old] + [f"+{line}" for line in new]
    head = f"diff --git a/{shown} b/{shown}\n"
    return head + "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def run_git(folder: Path, *arguments: str) -> str | None:
    """Run a git command that compares no files of the working tree.

    Returns:
        Its output; None if git is missing or fails, or if the repository has no entry `.git`: other users could create
        its files in a folder above, such as /tmp.
    """
    if not _has_git_entry(folder):
        return None
    # The settings of an untrusted repository can name programs: transports for missing objects, which are disabled
    # here, and filters and others, which run if git reads files. A random name of a protocol is allowed instead of
    # none: a repository cannot define an alias that acts as its remote helper.
    environment = {**os.environ, "GIT_ALLOW_PROTOCOL": secrets.token_hex(16), "GIT_NO_LAZY_FETCH": "1"}
    environment |= {"GIT_LITERAL_PATHSPECS": "1"}
    settings = ("-c", "safe.bareRepository=explicit", "-c", "core.fsmonitor=false")
    command = ("git", "--no-optional-locks", *settings, "-C", str(folder), *arguments)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors=_DECODE_ERRORS,
            timeout=10,
            check=False,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _has_git_entry(folder: Path) -> bool:
    """Return whether the repository has an entry `.git`, which git rejects if it belongs to another user."""
    return any(os.path.lexists(parent / ".git") for parent in (folder.absolute(), *folder.absolute().parents))


def hide_secrets(diff: str) -> str:
    """Return a diff of Python code in which the values that look like secrets are replaced."""
    # Imported here because it loads all its detectors, which only a changed source needs.
    from detect_secrets.core.scan import scan_file
    from detect_secrets.settings import default_settings

    lines = redact(diff).split("\n")
    with tempfile.TemporaryDirectory(prefix="hpsearch-") as folder, default_settings() as settings:
        settings.disable_plugins("IPPublicDetector")  # addresses are no secrets
        file = Path(folder) / "changes.py"
        file.write_text("\n".join(line[1:].replace("\r", " ") for line in lines), encoding="utf-8", errors="replace")
        for secret in scan_file(str(file)):
            if secret.secret_value:
                number = secret.line_number - 1
                lines[number] = lines[number].replace(secret.secret_value, HIDDEN)
    return "\n".join(lines)


def _find_imported_files(source: Path, root: Path) -> set[Path]:
    """Return the source file and the loaded files below `root` that it imports, directly or through other such files.

    Files elsewhere cannot be in the diff. To parse them too, such as hpsearch's own, takes about a second.
    """
    file_by_name = {name: file for name, module in list(sys.modules.items()) if (file := _find_file(module, root))}
    names_by_file: dict[Path, list[str]] = {}
    for name, file in file_by_name.items():
        names_by_file.setdefault(file, []).append(name)
    found, waiting = {source}, [source]
    while waiting:
        file = waiting.pop()
        for name in _list_imports(file, names_by_file.get(file, [])):
            imported = file_by_name.get(name)
            if imported is not None and imported not in found:
                found.add(imported)
                waiting.append(imported)
    return found


def _find_file(module: object, root: Path) -> Path | None:
    """Return the source file of a module; None if it is not below `root`, or in an installed package."""
    file = getattr(module, "__dict__", {}).get("__file__")
    if not isinstance(file, str) or not file.endswith(".py") or "site-packages" in file:
        return None
    path = Path(file).resolve()
    return path if path.is_relative_to(root) and not path.is_relative_to(_STANDARD_LIBRARY) else None


_STANDARD_LIBRARY = Path(os.__file__).resolve().parent  # a home folder may be a repository, with Python in it


def _list_imports(file: Path, names: list[str]) -> Iterator[str]:
    """Return the absolute names of the modules, and possible modules, that a file imports, with their parents.

    Args:
        file: Python file.
        names: names under which the file is loaded; relative imports refer to their packages.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    packages = {str(getattr(sys.modules.get(name), "__package__", "") or "") for name in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            bases = {resolve_name(start, package) for package in packages if package} if node.level else {start}
            imported = [each for base in bases for each in (base, *(f"{base}.{alias.name}" for alias in node.names))]
        else:
            continue
        for name in imported:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
