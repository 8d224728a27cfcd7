"""A worker's role cannot choose the folders that the victim's commands remove."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
import sqlalchemy as sa
from optuna.study import StudyDirection

from hpsearch.search.cli import run_command
from hpsearch.search.errors import SearchError
from hpsearch.search.study import checkpoints, cleanup
from hpsearch.search.study.cleanup import find_garbage
from hpsearch.search.study.study import StoredStudy, load_study, load_study_by_id
from hpsearch.storage.attributes import CHECKPOINT_URL, FOLDER_NAME, SPEC
from hpsearch.storage.study_storage.storage import PostgresStorage
from tests.factories import spec_of
from tests.search.study.untrusted.support import TOKEN, make_study, read_error


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Return a folder with a file of the victim, which has the layout of a study's checkpoints."""
    file = tmp_path / f"s-{TOKEN}" / "0000" / "0001-1.pt"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"mine")
    return file


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


@pytest.mark.parametrize("name", ["s", "other"])
@pytest.mark.parametrize("folder", [f"other-{TOKEN}", f"s-other-{TOKEN}", f"s{TOKEN}", "other-1"])
def test_delete_and_gc_reject_the_folder_of_another_study(
    home: Path, storage: PostgresStorage, capsys: pytest.CaptureFixture[str], folder: str, name: str
) -> None:
    kept = [home / kind / folder / "0000" / "0001-1.pt" for kind in ("runs", "outbox", "checkpoints")]
    for file in kept:
        file.parent.mkdir(parents=True)
        file.touch()
    spec = {**spec_of(name="none").model_dump(), "name": name}
    make_study(storage, **{FOLDER_NAME: folder, SPEC: spec})
    assert run_command(["delete", "s", "--yes"]) == 2
    error = read_error(capsys)
    assert (f"has the folder name '{folder}'" if name == "s" else "study 's' was renamed") in error
    run_command(["gc", "s", "--yes"])
    assert all(file.exists() for file in kept)


@pytest.mark.parametrize("command", [["delete"], ["gc"], ["report"], ["show"], ["stop"]])
def test_a_study_cannot_direct_commands_to_another_study(
    home: Path, storage: PostgresStorage, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    folder = f"victim-{TOKEN}"
    kept = home / "runs" / folder / "0000" / "file"
    kept.parent.mkdir(parents=True)
    kept.touch()
    spec = {**spec_of(name="none").model_dump(), "name": "victim"}
    victim = optuna.create_study(study_name="victim", storage=storage)
    for key, value in {SPEC: spec, FOLDER_NAME: folder}.items():
        storage.set_study_user_attr(victim._study_id, key, value)
    make_study(storage, **{SPEC: spec, FOLDER_NAME: f"s-{TOKEN}"})
    assert run_command([*command, "s", *(["--yes"] if command[0] in {"delete", "gc"} else [])]) == 2
    assert "study 's' was renamed: its settings have the name 'victim'" in read_error(capsys)
    assert kept.exists()
    load_study(storage, "victim")


@pytest.mark.parametrize("folder", [f"s-2-{TOKEN}", "s-2"])
def test_delete_rejects_the_folder_of_a_study_whose_name_ends_in_a_number(
    home: Path, storage: PostgresStorage, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    """Earlier versions generated NAME-ID-TOKEN and NAME-ID."""
    kept = home / "runs" / folder / "0000" / "0001-1.pt"
    kept.parent.mkdir(parents=True)
    kept.touch()
    make_study(storage, **{FOLDER_NAME: folder})  # its id is 1
    assert run_command(["delete", "s", "--yes"]) == 2
    assert f"has the folder name '{folder}'" in read_error(capsys)
    assert kept.exists()


@pytest.mark.parametrize(("victim", "stored"), [("s-1", "s-1"), ("renamed", "s-1"), ("S-1", "S-1")])
def test_a_folder_of_an_earlier_version_is_accepted_unless_another_study_has_it(
    storage: PostgresStorage, victim: str, stored: str
) -> None:
    """A worker's role can also rename the study whose folder it claims; some file systems ignore the case."""
    make_study(storage, **{FOLDER_NAME: f"s-1-{TOKEN}"})
    study = load_study(storage, "s")
    assert study.folder == f"s-1-{TOKEN}"
    other = optuna.create_study(study_name=victim, storage=storage)
    storage.set_study_user_attr(other._study_id, FOLDER_NAME, f"{stored}-{TOKEN}")
    with pytest.raises(SearchError, match=f"has the folder name 's-1-{TOKEN}', which hpsearch did not generate"):
        _ = study.folder


def test_delete_rejects_a_study_that_has_got_the_name_of_a_finalist_study(
    storage: PostgresStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every worker's database role can exchange the names of two studies after the command has read them."""
    make_study(storage)
    victim = storage.create_new_study([StudyDirection.MAXIMIZE], "victim")
    storage.set_study_user_attr(victim, SPEC, {**spec_of(name="none").model_dump(), "name": "victim"})
    monkeypatch.setattr(cleanup, "read_finalist_studies", lambda *_: ["victim"])
    with pytest.raises(SearchError, match="study 'victim' no longer belongs to study 's'; repeat the command"):
        cleanup.list_studies_to_delete(load_study(storage, "s"))


def test_a_name_that_another_study_has_got_after_a_command_has_read_it_is_rejected(storage: PostgresStorage) -> None:
    make_study(storage)
    study = load_study(storage, "s")
    with storage.engine.begin() as connection:
        connection.execute(sa.text("UPDATE studies SET study_name = 'gone' WHERE study_name = 's'"))
    make_study(storage)
    assert load_study(storage, "s").study_id != study.study_id
    with pytest.raises(SearchError, match="the name 's' now belongs to the study with the id 2 instead of 1; repeat"):
        study.open()
    with pytest.raises(SearchError, match="the study with the id 1 no longer has the name 's'; repeat the command"):
        load_study_by_id(storage, study.study_id)
    storage.drop_caches(study.study_id)
    with pytest.raises(SearchError, match="study 'gone' was renamed"):
        load_study_by_id(storage, study.study_id)
    storage.delete_study(study.study_id)
    with pytest.raises(SearchError, match="the study with the id 1 was deleted; repeat the command"):
        load_study_by_id(storage, study.study_id)


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


def test_a_checkpoint_url_that_is_stored_after_the_check_is_not_used(
    home: Path, storage: PostgresStorage, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every worker's database role can add it between two statements of the command."""
    make_study(storage, **{FOLDER_NAME: f"s-{TOKEN}"})
    study, read = load_study(storage, "s"), checkpoints.read_checkpoint_url

    def read_and_add(study: StoredStudy) -> str | None:
        url = read(study)
        storage.set_study_user_attr(study.study_id, CHECKPOINT_URL, str(victim.parents[2]))
        return url

    monkeypatch.setattr(checkpoints, "read_checkpoint_url", read_and_add)
    checkpoints.open_removable_checkpoints(study, home, None).delete()
    assert victim.exists()


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
