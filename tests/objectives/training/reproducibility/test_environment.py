"""A run records its environment: the commit of the source code and the uncommitted changes."""

import hashlib
import inspect
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml

from hpsearch import TrainConfig, Trainer, load_objective
from hpsearch.objectives.training.loop.epoch import restore
from tests.objectives.training.support import built

SOURCE = """
from tests.objectives.training.support import Wine

class Mine(Wine):
    epochs = 2
"""


@pytest.fixture
def repository(tmp_path):
    def git(*command):
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        return subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True, capture_output=True, text=True)

    git("init", "--quiet")
    (tmp_path / "mine.py").write_text(SOURCE)
    git("add", "mine.py")
    git("commit", "--quiet", "--message", "first")
    return tmp_path, git("rev-parse", "HEAD").stdout.strip()


def _train(folder, run_dir):
    objective = load_objective(str(folder / "mine.py"))
    Trainer(objective, TrainConfig(), epochs=1, seed=0, run_dir=run_dir).fit()
    return yaml.safe_load((run_dir / "config.yaml").read_text())["environment"]


def test_a_clean_source_is_recorded_as_its_commit(repository, tmp_path):
    folder, sha = repository
    found = _train(folder, tmp_path / "run")
    assert (found["git_sha"], found["git_dirty"]) == (sha, False)
    assert not (tmp_path / "run" / "changes.diff").exists()


def test_changes_are_unknown_if_git_fails(repository, tmp_path):
    folder, sha = repository
    for tree in (folder / ".git" / "objects").glob("??/*"):
        if tree.parent.name + tree.name != sha:
            tree.unlink()
    found = _train(folder, tmp_path / "run")
    assert (found["git_sha"], found["git_dirty"]) == (sha, None)


def test_uncommitted_changes_are_stored_as_a_patch_without_passwords(repository, tmp_path):
    folder, sha = repository
    source = SOURCE.replace("epochs = 2", "epochs = 3") + "\nURL = 'postgresql://bob:hunter2@db/optuna'\n"
    (folder / "mine.py").write_text(source)
    found = _train(folder, tmp_path / "run")
    assert (found["git_sha"], found["git_dirty"]) == (sha, True)
    diff = tmp_path / "run" / "changes.diff"
    assert "-    epochs = 2\n+    epochs = 3" in diff.read_text()
    assert "hunter2" not in diff.read_text()
    subprocess.run(["git", "stash", "--quiet"], cwd=folder, check=True, env={"HOME": str(tmp_path), **_author()})
    subprocess.run(["git", "apply", str(diff)], cwd=folder, check=True)
    assert "epochs = 3" in (folder / "mine.py").read_text()


def _author():
    names = ("GIT_AUTHOR", "GIT_COMMITTER")
    return {f"{name}_NAME": "a" for name in names} | {f"{name}_EMAIL": "a@example.org" for name in names}


def test_the_environment_of_a_run_is_stored(wine, tmp_path):
    Trainer(wine, TrainConfig(), epochs=1, seed=0, run_dir=tmp_path).fit()
    found = yaml.safe_load((tmp_path / "config.yaml").read_text())["environment"]
    for library in ("numpy", "scikit-learn", "torchmetrics", "pytorch-optimizer"):
        assert found[library] == metadata.version(library)
    assert found["torch"] == torch.__version__
    assert found["python"] == platform.python_version()
    assert (found["device"], found["device_name"], found["threads"]) == ("cpu", "cpu", 1)
    assert found["machine"] == platform.machine()
    assert found["command"] == " ".join(sys.argv)
    source = Path(inspect.getsourcefile(type(wine)))
    assert found["source_sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert found["compiled"] is False


MATTERS = ("torch", "numpy", "pytorch-optimizer", "device_name", "machine", "threads", "compiled")


@pytest.mark.parametrize("name", MATTERS)
def test_a_resume_in_another_environment_is_marked_not_exact(wine, name):
    state, run = built(wine).state_dict(), built(wine)
    restore(run, state)
    assert run.resume_notes == []
    now = state["environment"][name]
    restore(run, {**state, "environment": {**state["environment"], name: "another"}})
    assert run.resume_notes == [f"results after epoch 0 may differ: {name} another -> {now}"]
