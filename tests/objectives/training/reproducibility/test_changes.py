"""The recorded changes are those of the objective's files, without secrets."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hpsearch import load_objective
from hpsearch.objectives.training.reproducibility.changes import RECORD_CHANGES, hide_secrets, read_changes, run_git
from hpsearch.objectives.training.reproducibility.environment import describe_environment

Commit = Callable[[dict[str, str]], None]


@pytest.fixture(autouse=True)
def _no_cached_changes() -> Iterator[None]:
    read_changes.cache_clear()
    yield
    read_changes.cache_clear()


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
    read_changes.cache_clear()
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


@pytest.mark.parametrize("setting", ["core.fsmonitor", "filter.x.clean"])
def test_programs_in_the_settings_of_a_repository_do_not_run(commit: Commit, tmp_path: Path, setting: str) -> None:
    commit({"mine.py": OBJECTIVE, ".gitattributes": "*.py filter=x\n"})
    subprocess.run(["git", "config", setting, f"touch {tmp_path / 'ran'}"], cwd=tmp_path, check=True)
    (tmp_path / "mine.py").write_text(f"{OBJECTIVE}\n")
    read_changes(tmp_path / "mine.py")
    assert not (tmp_path / "ran").exists()


def test_a_repository_without_a_git_folder_is_not_used(commit: Commit, tmp_path: Path) -> None:
    """In a folder above, such as /tmp, another user can create its files, and change its settings between two calls."""
    commit({"objective/mine.py": OBJECTIVE})
    for path in (tmp_path / ".git").iterdir():
        path.rename(tmp_path / path.name)
    (tmp_path / ".git").rmdir()
    for name, value in (("core.bare", "false"), ("core.worktree", str(tmp_path))):
        subprocess.run(["git", "config", "--file", tmp_path / "config", name, value], check=True)
    (tmp_path / "objective" / "mine.py").write_text(f"{OBJECTIVE}\n")
    git = ["git", "-C", str(tmp_path / "objective"), "diff", "--name-only", "HEAD"]
    assert subprocess.run(git, capture_output=True, text=True, check=True).stdout == "objective/mine.py\n"
    assert run_git(tmp_path / "objective", "diff", "--name-only", "HEAD") is None


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


def test_filters_of_a_submodule_do_not_run(commit: Commit, tmp_path: Path) -> None:
    commit({"sub/.gitattributes": "* filter=x\n", "sub/a.py": "a = 1\n", "mine.py": OBJECTIVE})
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")

    def git(*command: str, folder: Path = tmp_path) -> None:
        subprocess.run(["git", *identity, *command], cwd=folder, check=True, capture_output=True)

    git("rm", "-r", "--cached", "--quiet", "sub")
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "first"]):
        git(*command, folder=tmp_path / "sub")
    git("add", "sub")
    git("commit", "--quiet", "--message", "second")
    git("config", "filter.x.clean", f"touch {tmp_path / 'ran'}", folder=tmp_path / "sub")
    (tmp_path / "sub" / "a.py").write_text("a = 2\n")
    read_changes(tmp_path / "mine.py")
    describe_environment(torch.device("cpu"), tmp_path / "mine.py")
    assert not (tmp_path / "ran").exists()


def test_hooks_of_a_repository_do_not_run(commit: Commit, tmp_path: Path) -> None:
    commit({"mine.py": OBJECTIVE, "other.txt": "a"})
    hook = tmp_path / ".git" / "hooks" / "post-index-change"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    hook.chmod(0o755)
    os.utime(tmp_path / "other.txt", (1, 1))  # git compares its content, and updates the index
    (tmp_path / "mine.py").write_text(f"{OBJECTIVE}\n")
    assert read_changes(tmp_path / "mine.py")
    assert not (tmp_path / "ran").exists()


def test_the_users_own_filters_do_not_run(commit: Commit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of the repository can extend git-lfs by programs."""
    commit({"mine.py": OBJECTIVE, ".gitattributes": "*.py filter=lfs\n"})
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "config").write_text(
        f'[filter "lfs"]\n clean = touch {tmp_path / "ran"} && cat\n required = true\n'
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "user" / "config"))
    (tmp_path / "mine.py").write_text(f"{OBJECTIVE}\n")
    assert read_changes(tmp_path / "mine.py")
    assert not (tmp_path / "ran").exists()
