"""Commands of an ordinary user with homes and files that the user may not use: one line, exit code 2, no changes."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpsearch.search.cli import run_command
from tests.second_user import UID, act_as_second_user, needs_root

pytestmark = [needs_root, pytest.mark.slow]
_MODULES = (  # which the commands import, and which the second user may be unable to read
    "hpsearch.objectives.builtin.digits",
    "hpsearch.objectives.template",
    "hpsearch.objectives.training.checks.data_leaks",
    "hpsearch.objectives.training.checks.smoke",
    "hpsearch.search.api.opening",
    "hpsearch.search.api.study",
    "hpsearch.search.cli.probe",
    "hpsearch.search.fleet.rank_launcher",
    "hpsearch.search.run.search",
    "hpsearch.storage.backup.restore",
    "filelock",
    "fsspec.implementations.local",
    "psycopg2",
    "sklearn.datasets",
    "sklearn.model_selection",
    "typer._adapters",
    "typer._click.decorators",
)


@pytest.fixture(autouse=True, scope="module")
def _load_modules() -> None:
    for name in _MODULES:
        importlib.import_module(name)


def run_as_user(*arguments: str, folder: Path, **environment: str) -> list[int | str]:
    """Return the exit code and the errors of a command that runs as the second user."""

    def act() -> list[int | str]:
        os.chdir(folder)
        os.environ.update(environment)
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            code = run_command(list(arguments))
        return [code, errors.getvalue()]

    found: list[int | str] = act_as_second_user(act)
    return found


def own(path: Path, mode: int = 0o700) -> Path:
    """Create a folder of the second user."""
    path.mkdir()
    os.chown(path, UID, UID)
    path.chmod(mode)
    return path


def _read_only(home: Path) -> None:
    own(home, 0o500)


def _of_root(home: Path) -> None:
    home.mkdir(mode=0o755)


def _link_to_folder_of_another_user(home: Path) -> None:
    own(target := home.with_name("target"))
    os.chown(target, UID - 1, UID - 1)
    home.symlink_to(target)


def _file_as_logs(home: Path) -> None:
    own(home)
    (home / "logs").touch()


def _folder_as_state(home: Path) -> None:
    own(home)
    (home / "stack.json").mkdir()
    os.chown(home / "stack.json", UID, UID)


def _folder_as_lock(home: Path) -> None:
    own(home)
    (home / "stack.lock").mkdir()
    os.chown(home / "stack.lock", UID, UID)


def _unreadable_state(home: Path) -> None:
    own(home)
    (home / "stack.json").write_text("{}")
    (home / "stack.json").chmod(0)
    os.chown(home / "stack.json", UID, UID)


def _below_a_file(home: Path) -> None:
    home.parent.rmdir()
    home.parent.touch()


def _below_a_folder_of_root(home: Path) -> None:
    os.chown(home.parent, 0, 0)


HOMES = [
    (_read_only, "is not writable for this user"),
    (_of_root, "is not writable for this user"),
    (_link_to_folder_of_another_user, f"belongs to uid {UID - 1}"),
    (_file_as_logs, "'logs' cannot be a private folder"),
    (_folder_as_state, "it is not a regular file"),
    (_folder_as_lock, "Is a directory"),
    (_unreadable_state, "Permission denied"),
    (_below_a_file, "cannot be created (File exists)"),
    (_below_a_folder_of_root, "cannot be created (Permission denied)"),
]


@pytest.mark.parametrize(("prepare", "cause"), HOMES, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("command", ["up", "down", "status", "studies"])
def test_a_home_that_the_user_may_not_use(
    open_folder: Path, prepare: Callable[[Path], None], cause: str, command: str
) -> None:
    home = own(open_folder / "parent", 0o755) / "home"
    prepare(home)
    code, errors = run_as_user(command, folder=open_folder, HPSEARCH_HOME=str(home))
    if command in {"down", "status"} and code != 2:
        assert (code, errors) in [(0, ""), (3, "")], "there are no services"
        return
    assert isinstance(errors, str)
    assert (code, errors.count("\n")) == (2, 1), errors
    can_read = act_as_second_user(lambda: os.access(Path(__file__), os.R_OK))
    assert cause in errors or (
        not can_read and "the package mlflow" in errors
    )  # it cannot see that mlflow is installed


@pytest.mark.parametrize(
    "arguments",
    [
        ["init", "closed/x.py"],
        ["objective", "show", "closed/x.py"],
        ["objective", "show", "unreadable.py"],
        ["run", "--spec", "unreadable.py"],
        ["run", "digits", "--enqueue", "unreadable.py"],
        ["run", "digits", "--checkpoint-url", "closed/checkpoints"],
        ["train", "digits", "--run-dir", "closed/run"],
        ["smoke", "digits", "--run-dir", "closed/run"],
        ["restore", "unreadable.py"],
    ],
    ids=" ".join,
)
def test_files_that_the_user_may_not_use(open_folder: Path, arguments: list[str]) -> None:
    home = own(open_folder / "home")
    (open_folder / "closed").mkdir(mode=0o700)
    (open_folder / "unreadable.py").touch(mode=0o600)
    before = sorted(open_folder.rglob("*"))
    code, errors = run_as_user(*arguments, folder=open_folder, HPSEARCH_HOME=str(home))
    assert isinstance(errors, str)
    assert (code, errors.count("\n")) == (2, 1), errors
    assert [path for path in sorted(open_folder.rglob("*")) if home not in path.parents] == before
