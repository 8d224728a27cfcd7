"""Uncommitted changes of the objective's source files, without secrets."""

from __future__ import annotations

import ast
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


@lru_cache
def read_changes(source: Path | None) -> str:
    """Return the git diff of an objective's source file and of the files that it imports, without secrets.

    Other files of the repository may contain secrets, and the diff leaves this machine.

    Args:
        source: source file of the objective; None if it has no file.

    Returns:
        The diff to the last commit; empty if there are no changes, no repository or no git, or if
        `HPSEARCH_RECORD_CHANGES` is 0.
    """
    if source is None or os.environ.get(RECORD_CHANGES) == "0":
        return ""
    root = run_git(source.parent, "rev-parse", "--show-toplevel")
    names = run_git(source.parent, "diff", "--no-ext-diff", "--name-only", "-z", "HEAD")
    if not root or not names:
        return ""
    changed = {Path(root, name).resolve(): name for name in names.split("\0") if name.endswith(".py")}
    imported = _find_imported_files(source.resolve(), Path(root).resolve()) if changed else set()
    files = [name for path, name in changed.items() if path in imported]
    options = "--no-ext-diff", "--no-textconv", "--no-color"
    if not files or not (diff := run_git(Path(root), "diff", *options, "HEAD", "--", *sorted(files))):
        return ""
    if (length := len(diff)) > _MAX_LENGTH:
        diff = f"{diff[:_MAX_LENGTH].rpartition(chr(10))[0]}\n[truncated: {length} characters in total]"
    return hide_secrets(diff) + "\n"


def _list_users_filters(folder: Path) -> list[str] | None:
    """Return the user's own filters, such as ``filter.lfs``; None if the repository itself defines filters."""
    try:
        found = _call_git(folder, "config", "--show-scope", "--name-only", "--get-regexp", r"^filter\.")
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line.split("\t", 1) for line in found.stdout.splitlines()]
    if found.returncode not in (0, _NO_SETTING) or any(scope in ("local", "worktree") for scope, *_ in lines):
        return None
    return sorted({name.rpartition(".")[0] for _, name in lines})


def run_git(folder: Path, *arguments: str) -> str | None:
    """Run git in a folder and return its output.

    The output is None if git is missing or fails, or if files are to be compared and the settings of the repository
    define filters. A repository may be untrusted, and its own settings can name programs: filters, a monitor of files,
    hooks, and transports for missing objects. All but filters are disabled. Submodules are not compared, because they
    may have filters. A repository without an entry `.git` is not used: other users could create its files in a folder
    above, such as /tmp, and change its settings between two calls.
    """
    if not _has_git_entry(folder):
        return None
    subcommand, *rest = arguments
    settings: list[str] = []
    if subcommand in {"status", "diff"}:
        if (filters := _list_users_filters(folder)) is None:
            return None
        # The settings of the repository can extend git-lfs by programs.
        settings = [f"{name}.{key}" for name in filters for key in ("clean=", "process=", "required=false")]
        rest = ["--ignore-submodules=all", *rest]
    try:
        done = _call_git(folder, subcommand, *rest, settings=settings)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _has_git_entry(folder: Path) -> bool:
    """Return whether the repository has an entry `.git`, which git rejects if it belongs to another user."""
    return any(os.path.lexists(parent / ".git") for parent in (folder.absolute(), *folder.absolute().parents))


_NO_SETTING = 1  # exit code of `git config` if no setting matches
_SAFE = (
    "safe.bareRepository=explicit",
    "core.fsmonitor=false",
    f"core.hooksPath={os.devnull}",
    "diff.autoRefreshIndex=false",
)


def _call_git(folder: Path, *arguments: str, settings: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    options = [option for setting in (*_SAFE, *settings) for option in ("-c", setting)]
    # A random name of a protocol: a repository cannot define an alias that acts as its remote helper.
    environment = {**os.environ, "GIT_ALLOW_PROTOCOL": secrets.token_hex(16), "GIT_NO_LAZY_FETCH": "1"}
    command = ("git", "--no-optional-locks", *options, "-C", str(folder), *arguments)
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=10, check=False, env=environment
    )


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
