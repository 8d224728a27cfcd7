"""Uncommitted changes of the objective's source files, without secrets."""

from __future__ import annotations

import ast
import hashlib
import io
import logging
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.util import resolve_name
from pathlib import Path

from hpsearch.redaction import HIDDEN, redact

RECORD_CHANGES = "HPSEARCH_RECORD_CHANGES"  # 0 to record no changes
_MAX_LENGTH = 200_000  # characters
_DECODE_ERRORS = "backslashreplace"  # keeps the differences of files with another encoding

log = logging.getLogger("hpsearch.objectives.training")


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
    try:
        return _format_changes(source, len(sys.modules))
    except OSError as error:  # no temporary folder, for example because the disk is full
        log.warning("uncommitted changes of %s not recorded (%s)", source, error.strerror)
        return ""


@lru_cache
def _format_changes(source: Path, module_count: int) -> str:
    changed = compare_with_commit(source, module_count) or {}
    diff = "".join(_format_difference(name, before, after) for name, (before, after) in sorted(changed.items()))
    if not diff:
        return ""
    if (length := len(diff)) > _MAX_LENGTH:
        diff = f"{diff[:_MAX_LENGTH].rpartition(chr(10))[0]}\n[truncated: {length} characters in total]\n"
    return hide_secrets(diff)


@lru_cache
def compare_with_commit(source: Path, _module_count: int) -> dict[str, tuple[str, str]] | None:
    """Compare an objective's source file, and the files that it imports, with the commit of `read_commit`.

    git reads only objects and attributes here: if it compared files, it would run filters that the repository defines.

    Args:
        source: the source file.
        _module_count: number of loaded modules; part of the cache key, so that a new import causes a new comparison.

    Returns:
        The committed and the present text of each file that differs, by its name in the repository. Imported files that
        the commit does not contain are omitted. None if it does not contain the source file, or cannot be compared.
    """
    path = source.resolve()
    top = run_git(path.parent, "rev-parse", "--show-toplevel")
    if top is None or "site-packages" in path.parts or not path.is_relative_to(root := Path(top.removesuffix("\n"))):
        return None
    loaded = {file for module in list(sys.modules.values()) if (file := _find_file(module, root)) is not None}
    digests = _list_committed(root, read_commit(path.parent), {path, *loaded})
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


@lru_cache
def read_commit(folder: Path) -> str:
    """Return the last commit of a folder's repository at the first call; empty if there is none.

    It is cached, because later commits do not contain the code that is loaded.
    """
    return (run_git(folder, "rev-parse", "HEAD") or "").strip()


def _list_committed(root: Path, commit: str, files: set[Path]) -> dict[Path, str]:
    """Return the blob id of each of some files in a commit. Files that the commit does not contain are omitted."""
    names = sorted(file.relative_to(root).as_posix() for file in files)
    listing = run_git(root, "ls-tree", "-r", "-z", "--full-tree", commit, "--", *names) if commit else None
    entries = (line.partition("\t") for line in (listing or "").split("\0")[:-1])
    return {root / name: entry.split(" ")[2] for entry, _, name in entries}


def _hash_blob(content: bytes) -> str:
    """Return the blob id that git gives to the content of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _has_conversions(root: Path, files: set[Path]) -> bool:
    """Return whether git's attributes convert one of the files (filter, ident or encoding); True if git fails."""
    names = sorted(file.relative_to(root).as_posix() for file in files)
    found = run_git(root, "check-attr", "-z", "filter", "ident", "working-tree-encoding", "--", *names)
    return found is None or not {"unspecified", "unset"}.issuperset(found.split("\0")[2::3])


def _decode(content: bytes) -> str:
    """Return the text of a file as :func:`run_git` returns it: with the same errors and line ends."""
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors=_DECODE_ERRORS).read()


def _format_difference(name: str, before: str, after: str) -> str:
    """Return the difference of two texts as git shows it; empty if git fails.

    git compares copies of the texts, because `difflib` takes minutes for some long files.
    """
    with tempfile.TemporaryDirectory(prefix="hpsearch-") as folder:
        for side, text in (("a", before), ("b", after)):
            file = Path(folder, side, name)
            file.parent.mkdir(parents=True)
            file.write_text(text, encoding="utf-8", newline="")
        # Without the settings of a repository, the user and the system, which change the format or name programs.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        environment |= {"HOME": folder, "XDG_CONFIG_HOME": folder, "GIT_CEILING_DIRECTORIES": str(Path(folder).parent)}
        environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}
        command = ("git", "diff", "--no-index", "--no-prefix", "--text", f"a/{name}", f"b/{name}")
        return _run(command, environment, folder=folder, codes=(1,)) or ""  # code 1: the texts differ


def run_git(folder: Path, *arguments: str) -> str | None:
    """Run a git command that compares no files of the working tree.

    Returns:
        Its output; None if git is missing or fails, or if the repository has no entry `.git`: other users could create
        its files in a folder above, such as /tmp.
    """
    if not _has_git_entry(folder):
        return None
    # The settings of an untrusted repository can name programs: transports for missing objects, which are disabled
    # here, and filters and others, which run if git reads files. Only a protocol with a random name is allowed:
    # with a known name, the repository could define an alias that acts as its remote helper.
    environment = {**os.environ, "GIT_ALLOW_PROTOCOL": secrets.token_hex(16), "GIT_NO_LAZY_FETCH": "1"}
    environment |= {"GIT_LITERAL_PATHSPECS": "1"}
    settings = ("-c", "safe.bareRepository=explicit", "-c", "core.fsmonitor=false")
    command = ("git", "--no-optional-locks", *settings, "-C", str(folder), *arguments)
    return _run(command, environment, codes=(0,))


def _run(
    command: Sequence[str], environment: dict[str, str], *, codes: Sequence[int], folder: str | None = None
) -> str | None:
    """Return the output of a command; None if it is missing, takes too long, or exits with another code."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors=_DECODE_ERRORS,
            timeout=10,
            check=False,
            env=environment,
            cwd=folder,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode in codes else None


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
