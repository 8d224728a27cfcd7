"""Attacks by a holder of the worker's database role, on the person who runs commands on the same database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest

from hpsearch.search.cli import run_command
from hpsearch.search.study.cleanup import find_garbage
from hpsearch.search.study.study import load_study
from hpsearch.storage.attributes import CHECKPOINT_URL, FOLDER_NAME, SPEC
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from tests.factories import spec_of

TOKEN = "0123456789abcdef"


@pytest.fixture
def storage(database_url: str) -> PostgresStorage:
    return open_storage(database_url, application_name="attacker")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str) -> Path:
    """Return the home folder of the victim, whose commands use the database of the attacker."""
    monkeypatch.setenv("HPSEARCH_STORAGE_URL", database_url)
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Return a folder with a file of the victim, which has the layout of a study's checkpoints."""
    file = tmp_path / f"s-{TOKEN}" / "0000" / "0001-1.pt"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"mine")
    return file


def make_study(storage: PostgresStorage, **attrs: Any) -> int:
    """Create a study as a worker's role can, with attributes of the attacker's choice and a finished trial."""
    study = optuna.create_study(study_name="s", storage=storage)
    for key, value in {SPEC: spec_of(name="none").model_dump(), **attrs}.items():
        storage.set_study_user_attr(study._study_id, key, value)
    study.add_trial(optuna.trial.create_trial(value=0.5))
    return study._study_id


def read_error(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the only line on stderr."""
    error = capsys.readouterr().err
    assert error.startswith("hpsearch: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("folder", ["../../victim", "victim", "", ".", "..", f"s-{TOKEN}/../../victim", f"s-{TOKEN}\n"])
def test_delete_rejects_folder_names_that_hpsearch_does_not_generate(
    home: Path, storage: PostgresStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    kept = tmp_path / "victim" / "file"
    kept.parent.mkdir()
    kept.touch()
    for name in ("runs", "outbox", "checkpoints"):
        (home / name / "victim").mkdir(parents=True)
    make_study(storage, **{FOLDER_NAME: folder})
    assert run_command(["delete", "s", "--yes"]) == 2
    assert "study 's' has the folder name" in read_error(capsys)
    assert run_command(["gc", "s", "--yes"]) == 2
    assert kept.exists()
    assert len(list(home.glob("*/victim"))) == 3
    load_study(storage, "s")


def test_delete_removes_checkpoints_only_below_configured_addresses(
    home: Path, storage: PostgresStorage, victim: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = victim.parents[2]
    make_study(storage, **{FOLDER_NAME: f"s-{TOKEN}", CHECKPOINT_URL: str(root)})
    assert run_command(["delete", "s", "--yes"]) == 2
    assert f"add --checkpoint-url {root}" in read_error(capsys)
    assert victim.exists()
    load_study(storage, "s")

    assert run_command(["delete", "s", "--yes", "--checkpoint-url", str(root)]) == 0
    assert not victim.exists()
    assert home.exists()


def test_gc_removes_checkpoints_only_below_configured_addresses(
    home: Path, storage: PostgresStorage, victim: Path
) -> None:
    root = str(victim.parents[2])
    make_study(storage, **{FOLDER_NAME: f"s-{TOKEN}", CHECKPOINT_URL: root})
    study = load_study(storage, "s")
    found, (problem,) = find_garbage(study, home=home, tracking=None)
    assert found == []
    assert f"add --checkpoint-url {root}" in problem
    (garbage,), problems = find_garbage(study, home=home, tracking=None, checkpoint_url=root)
    assert (garbage.size, problems) == (4, [])


@pytest.mark.parametrize("linked", ["", f"s-{TOKEN}", f"s-{TOKEN}/0000"])
def test_removal_does_not_follow_links(home: Path, storage: PostgresStorage, victim: Path, linked: str) -> None:
    root = victim.parents[2]
    link = home / "checkpoints" / (linked or "link")
    link.parent.mkdir(parents=True)
    link.symlink_to(root / linked)
    attrs = {FOLDER_NAME: f"s-{TOKEN}", **({} if linked else {CHECKPOINT_URL: str(link)})}
    make_study(storage, **attrs)
    run_command(["gc", "s", "--yes"])
    run_command(["delete", "s", "--yes"])
    assert victim.exists()


@pytest.mark.parametrize("url", ["~/x", "file://~/x", "x", "../x", "simplecache::s3://bucket/x"])
def test_stored_checkpoint_addresses_are_not_expanded(
    home: Path, storage: PostgresStorage, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    make_study(storage, **{FOLDER_NAME: f"s-{TOKEN}", CHECKPOINT_URL: url})
    assert run_command(["delete", "s", "--yes"]) == 2
    assert "neither an absolute path nor a URL" in read_error(capsys)
    assert home.exists()


def test_gc_keeps_files_that_are_not_checkpoints(home: Path, storage: PostgresStorage) -> None:
    folder = home / "checkpoints" / f"s-{TOKEN}" / "0000"
    folder.mkdir(parents=True)
    (folder / "notes.txt").touch()
    (folder / "0001-1.pt").touch()
    make_study(storage, **{FOLDER_NAME: f"s-{TOKEN}"})
    assert run_command(["gc", "s", "--yes"]) == 0
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
