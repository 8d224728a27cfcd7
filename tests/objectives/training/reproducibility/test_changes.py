"""The recorded changes are those of the objective's files, without secrets."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from hpsearch import load_objective
from hpsearch.objectives.training.reproducibility import changes
from hpsearch.objectives.training.reproducibility.changes import (
    RECORD_CHANGES,
    compare_with_commit,
    hide_secrets,
    read_changes,
    read_commit,
    run_git,
)
from hpsearch.objectives.training.reproducibility.environment import describe_environment

Commit = Callable[[dict[str, str]], None]


@pytest.fixture(autouse=True)
def _no_cached_changes() -> Iterator[None]:
    _clear_caches()
    yield
    _clear_caches()


def _clear_caches() -> None:
    for function in (changes._format_changes, compare_with_commit, read_commit):
        function.cache_clear()


@pytest.fixture
def commit(tmp_path: Path) -> Commit:
    """Return a function that writes and commits files in a new repository."""

    def git(*command: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True, capture_output=True)

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / name).write_text(text)
        git("init", "--quiet")
        git("add", ".")
        git("commit", "--quiet", "--message", "first")

    return write


OBJECTIVE = """
from tests.objectives.training.support import Wine

class Mine(Wine):
    epochs = 2
"""


def test_only_the_files_of_the_objective_are_recorded(commit: Commit, tmp_path: Path) -> None:
    """Row 9 of the audit: a secret in another file of the repository is not recorded."""
    files = {
        "mine.py": f"import changed_helper\nfrom changed_parts import layers\n{OBJECTIVE}",
        "changed_helper.py": "width = 1\n",
        "changed_parts/__init__.py": "",
        "changed_parts/layers.py": "from . import deeper\n",
        "changed_parts/deeper.py": "depth = 1\n",
        "changed_parts/unused.py": "unused = 1\n",
        "settings.py": "DEBUG = True\n",
        "settings.yaml": "debug: true\n",
    }
    commit(files)
    objective = load_objective(str(tmp_path / "mine.py"))
    for name in files:
        with (tmp_path / name).open("a") as file:
            file.write("# the secret hunter2\n" if name.startswith("settings") else "# edited\n")
    diff = read_changes(tmp_path / "mine.py")
    assert objective.epochs == 2
    assert "hunter2" not in diff
    recorded = {line.partition(" b/")[2] for line in diff.splitlines() if line.startswith("diff --git")}
    assert recorded == set(files) - {"settings.py", "settings.yaml", "changed_parts/unused.py"}
    subprocess.run(["git", "-C", tmp_path, "checkout", "--quiet", "."], check=True)
    subprocess.run(["git", "-C", tmp_path, "apply", "-"], input=diff, text=True, check=True)
    assert (tmp_path / "changed_parts" / "deeper.py").read_text() == "depth = 1\n# edited\n"


SECRETS = {
    "aws = 'AKIAIOSFODNN7REALKEY'": "AKIAIOSFODNN7REALKEY",
    "connect('postgresql://bob:hunt@r2@db/optuna')": "hunt@r2",
    "api_key = 'k3Jd92mXpQ7v'": "k3Jd92mXpQ7v",
    "password = 'correct-horse-battery'": "correct-horse-battery",
    "get('https://host/data?password=hunter2')": "hunter2",
    "key = '-----BEGIN RSA PRIVATE KEY-----\\nMIIEpAIBAAKCAQEA\\n-----END RSA PRIVATE KEY-----'": "MIIEpAIBAAKCAQEA",
    "headers = {'Authorization': 'Bearer abcdef0123456789'}": "abcdef0123456789",
    "h = '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'": "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",
}


@pytest.mark.parametrize("line", SECRETS)
def test_secrets_in_the_objective_are_hidden(line: str, commit: Commit, tmp_path: Path) -> None:
    commit({"mine.py": OBJECTIVE})
    with (tmp_path / "mine.py").open("a") as file:
        file.write(f"VALUE = 1\n{line}\n")
    diff = read_changes(tmp_path / "mine.py")
    assert "+VALUE = 1\n" in diff
    assert SECRETS[line] not in diff
    assert "***" in diff


def test_usual_code_is_not_hidden() -> None:
    lines = [
        "+tokens = tokenizer(text, pad_token='<pad>', max_tokens=512)",
        "+key = torch.nn.Linear(width, width)",
        "+secret_size = 3",
        "+host = '127.0.0.1'",
        "+url = 'https://example.org/data?page=1'",
        "-lr = 1e-3",
    ]
    assert hide_secrets("\n".join(lines)).split("\n") == lines


def test_changes_are_not_recorded_if_the_variable_is_zero(
    commit: Commit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit({"mine.py": "a = 1\n"})
    (tmp_path / "mine.py").write_text("a = 2\n")
    monkeypatch.setenv(RECORD_CHANGES, "0")
    assert read_changes(tmp_path / "mine.py") == ""
    monkeypatch.delenv(RECORD_CHANGES)
    _clear_caches()
    assert "+a = 2" in read_changes(tmp_path / "mine.py")


def test_the_size_of_the_changes_is_limited(commit: Commit, tmp_path: Path) -> None:
    commit({"mine.py": "a = 1\n"})
    (tmp_path / "mine.py").write_text(f"x = {'1' * 10_000}\n" * 40)
    diff = read_changes(tmp_path / "mine.py")
    assert len(diff) < 200_100
    assert "characters in total]" in diff


def test_outside_of_a_repository_there_are_no_changes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("a = 1\n")
    assert read_changes(tmp_path / "mine.py") == ""
    assert read_changes(None) == ""


SETTINGS = """
[core]
    fsmonitor = touch ran-monitor
    worktree = ../worktree
[include]
    path = /proc/self/cwd/included
"""


def test_programs_of_a_repository_do_not_run(commit: Commit, tmp_path: Path) -> None:
    """git runs filters and hooks if it compares files. The include hides the filter: it exists in one folder only."""
    commit({"mine/mine.py": OBJECTIVE, "other.txt": "a", ".gitattributes": "*.txt filter=x\n"})
    (tmp_path / "worktree").mkdir()
    for name in ("mine", "other.txt", ".gitattributes"):
        (tmp_path / name).rename(tmp_path / "worktree" / name)
    filters = '[filter "x"]\n clean = touch ran-filter\n required = true\n'
    (tmp_path / "worktree" / "included").write_text(filters)
    (tmp_path / ".git" / "config").write_text(f"{(tmp_path / '.git' / 'config').read_text()}{SETTINGS}")
    hook = tmp_path / ".git" / "hooks" / "post-index-change"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\ntouch ran-hook\n")
    hook.chmod(0o755)
    (tmp_path / "worktree" / ".git").write_text(f"gitdir: {tmp_path / '.git'}\n")
    (tmp_path / "worktree" / "other.txt").write_text("b")
    source = tmp_path / "worktree" / "mine" / "mine.py"
    source.write_text(f"{OBJECTIVE}\n")
    assert "+\n" in read_changes(source)
    assert describe_environment(torch.device("cpu"), source)["git_dirty"] is True
    assert list(tmp_path.rglob("ran-*")) == []
    subprocess.run(["git", "-C", source.parent, "status"], check=False, capture_output=True)
    assert {path.name for path in tmp_path.rglob("ran-*")} == {"ran-monitor", "ran-filter", "ran-hook"}


def test_a_repository_without_a_git_folder_is_not_used(commit: Commit, tmp_path: Path) -> None:
    """In a folder above, such as /tmp, another user can create its files, and change its settings between two calls."""
    commit({"objective/mine.py": OBJECTIVE})
    for path in (tmp_path / ".git").iterdir():
        path.rename(tmp_path / path.name)
    (tmp_path / ".git").rmdir()
    for name, value in (("core.bare", "false"), ("core.worktree", str(tmp_path))):
        subprocess.run(["git", "config", "--file", tmp_path / "config", name, value], check=True)
    (tmp_path / "objective" / "mine.py").write_text(f"{OBJECTIVE}\n")
    git = ["git", "-C", str(tmp_path / "objective"), "rev-parse", "HEAD"]
    assert subprocess.run(git, capture_output=True, text=True, check=True).stdout
    assert run_git(tmp_path / "objective", "rev-parse", "HEAD") is None


@pytest.mark.parametrize("url", ["ext::touch {}", "none::x"])
def test_missing_objects_of_a_repository_are_not_fetched(
    commit: Commit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    commit({"mine.py": OBJECTIVE})
    command = url.format(tmp_path / "ran")
    old_git = tmp_path / "bin" / "git"  # before 2.45, git does not know the variable
    old_git.parent.mkdir()
    old_git.write_text(f'#!/bin/sh\nunset GIT_NO_LAZY_FETCH\nexec {shutil.which("git")} "$@"\n')
    old_git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{old_git.parent}{os.pathsep}{os.environ['PATH']}")
    for setting, value in {
        "alias.remote-none": f"!touch {tmp_path / 'ran'}",
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "protocol.ext.allow": "always",
        "remote.origin.url": command,
        "remote.origin.promisor": "true",
    }.items():
        subprocess.run(["git", "config", setting, value], cwd=tmp_path, check=True)
    blob = subprocess.run(
        ["git", "rev-parse", "HEAD:mine.py"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    name = blob.stdout.strip()
    (tmp_path / ".git" / "objects" / name[:2] / name[2:]).unlink()
    (tmp_path / "mine.py").write_text(f"{OBJECTIVE}\n")
    assert read_changes(tmp_path / "mine.py") == ""
    assert not (tmp_path / "ran").exists()


def test_files_with_other_line_ends_and_long_files(commit: Commit, tmp_path: Path) -> None:
    """git checks files out with the line ends of the system, without a difference."""
    commit({"a.py": "a = 1\n", "end.py": "a = 1", "long.py": "a = 1\n" * 3000, "tab\t.py": "a = 1\n"})
    (tmp_path / "a.py").write_bytes(b"a = 1\r\n")
    assert compare_with_commit(tmp_path / "a.py", 0) == {}
    changed = {"end.py": "a = 1\x0cb\na = 2", "long.py": "b = 1\na = 1\n" * 1500, "tab\t.py": "a = 2\n"}
    for name, text in changed.items():
        (tmp_path / name).write_text(text)
    diffs = [read_changes(tmp_path / name) for name in changed]
    subprocess.run(["git", "-C", tmp_path, "checkout", "--quiet", "."], check=True)
    for diff in diffs:
        subprocess.run(["git", "-C", tmp_path, "apply", "-"], input=diff, text=True, check=True)
    assert {name: (tmp_path / name).read_text() for name in changed} == changed


def test_files_of_unknown_state_are_not_recorded(commit: Commit, tmp_path: Path) -> None:
    """git may store a file encrypted, and an ignored file or an installed package is no change of the user."""
    attributes = "secret.py filter=x\nident.py ident\n"
    names = ("secret.py", "ident.py", "lib/site-packages/mine.py")
    commit({".gitattributes": attributes, ".gitignore": "ignored.py\n", **dict.fromkeys(names, "a = 1\n")})
    for name in (*names, "ignored.py"):
        (tmp_path / name).write_text("a = 'Miller'\n")
        assert compare_with_commit(tmp_path / name, 0) is None
        assert read_changes(tmp_path / name) == ""


def test_a_module_that_the_objective_imports_later_is_recorded(
    commit: Commit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit({"late.py": "def run():\n    import late_helper\n", "late_helper.py": "a = 1\n"})
    (tmp_path / "late_helper.py").write_text("a = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_module("late")
    assert describe_environment(torch.device("cpu"), tmp_path / "late.py")["git_dirty"] is False
    import_module("late").run()
    assert describe_environment(torch.device("cpu"), tmp_path / "late.py")["git_dirty"] is True
    assert "+a = 2" in read_changes(tmp_path / "late.py")


def test_one_changed_line_of_a_long_file_is_recorded_with_its_surroundings(commit: Commit, tmp_path: Path) -> None:
    lines = [f"x{number} = {number}\n" for number in range(20_000)]
    commit({"long.py": "".join(lines)})
    (tmp_path / "long.py").write_text("".join(["import a\n", *lines[:19_000], "y = 1\n", *lines[19_000:]]))
    assert len(diff := read_changes(tmp_path / "long.py")) < 1000
    assert {"+import a", "+y = 1"} < set(diff.splitlines())


def test_a_commit_during_the_process_does_not_change_what_the_loaded_code_is(commit: Commit, tmp_path: Path) -> None:
    """The process still runs the code that it loaded, which the first commit does not contain."""
    commit({"mine.py": "a = 1\n"})
    (tmp_path / "mine.py").write_text("a = 2\n")
    device = torch.device("cpu")
    before = describe_environment(device, tmp_path / "mine.py")
    commit({"other.py": "", "mine.py": "a = 2\n"})
    compare_with_commit.cache_clear()  # as after another import
    after = describe_environment(device, tmp_path / "mine.py")
    assert [after[key] for key in ("git_sha", "git_dirty")] == [before["git_sha"], True]
    assert "+a = 2" in read_changes(tmp_path / "mine.py")


def test_settings_of_git_change_no_difference(commit: Commit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit({"mine.py": "a = 1\n"})
    (tmp_path / "mine.py").write_text("a = 2\n")
    (home := tmp_path / "home").mkdir()
    settings = f"[color]\nui = always\n[diff]\nmnemonicPrefix = true\nexternal = touch {tmp_path / 'ran'}\n"
    (home / ".gitconfig").write_text(settings)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", f"touch {tmp_path / 'ran'}")
    assert read_changes(tmp_path / "mine.py").startswith("diff --git a/mine.py b/mine.py\n")
    assert not (tmp_path / "ran").exists()


def test_without_a_temporary_folder_the_changes_are_not_recorded(
    commit: Commit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit({"mine.py": "a = 1\n"})
    (tmp_path / "mine.py").write_text("a = 2\n")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert read_changes(tmp_path / "mine.py") == ""


def test_an_objective_that_is_edited_and_loaded_again_differs_from_the_commit(commit: Commit, tmp_path: Path) -> None:
    commit({"mine.py": OBJECTIVE})
    device = torch.device("cpu")
    for text, is_dirty in ((OBJECTIVE, False), (f"{OBJECTIVE}    batch = 4\n", True)):
        (tmp_path / "mine.py").write_text(text)
        load_objective(str(tmp_path / "mine.py"))
        assert describe_environment(device, tmp_path / "mine.py")["git_dirty"] is is_dirty
    assert "+    batch = 4" in read_changes(tmp_path / "mine.py")
