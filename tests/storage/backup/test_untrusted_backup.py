"""Attacks by the author of a backup file."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from optuna.study import StudyDirection

from hpsearch.search.cli import run_command
from hpsearch.search.services import DASHBOARD_COMMAND
from hpsearch.storage.attributes import RESTORED, SOURCE_SHA256, SPEC
from hpsearch.storage.backup.archive import CHECKPOINTS, STUDIES_DUMP, ArchiveReader, create_archive
from hpsearch.storage.backup.backup import backup
from hpsearch.storage.backup.dumps import find_programs, require_restricted
from hpsearch.storage.backup.restore import restore
from hpsearch.storage.database.roles import OWNER, WORKER
from hpsearch.storage.errors import StorageError
from hpsearch.storage.files import compute_sha256
from hpsearch.storage.study_storage.storage import open_storage
from tests.conftest import PostgresServer
from tests.factories import spec_of

EVIL = "from pathlib import Path\nPath(__file__).with_name('imported').touch()\n"


@pytest.fixture
def other(postgres_server: PostgresServer) -> Iterator[str]:
    """Return the name of a database without tables, into which the victim restores."""
    name = f"untrusted_{os.getpid()}"
    postgres_server.execute("CREATE DATABASE {} OWNER {} TEMPLATE template0 STRATEGY file_copy", name, OWNER)
    yield name
    postgres_server.execute("DROP DATABASE {} WITH (FORCE)", name)


def make_backup(file: Path, owner_url: str, database_url: str, objective: str, files: dict[str, Path]) -> None:
    """Write a backup with a study of this objective, and with additional files below its checkpoints."""
    storage = open_storage(database_url, application_name="attacker")
    study_id = storage.create_new_study([StudyDirection.MAXIMIZE], "s")
    storage.set_study_user_attr(study_id, SPEC, {**spec_of(name="none").model_dump(), "objective": objective})
    for source in files.values():
        storage.set_study_user_attr(study_id, SOURCE_SHA256, compute_sha256(source))
    storage.engine.dispose()
    honest, folder = file.with_name("honest.tar"), file.with_name("unpacked")
    home = str(file.with_name("attacker"))
    backup(honest, owner_url=owner_url, studies_only=True, home=home, dashboard=DASHBOARD_COMMAND)
    folder.mkdir()
    with ArchiveReader.open(honest) as reader, create_archive(file) as writer:
        reader.unpack(folder, progress=lambda _: None)
        writer.write_manifest(reader.manifest)
        writer.add_file(STUDIES_DUMP, folder / STUDIES_DUMP)
        for name, source in files.items():
            writer.add_file(CHECKPOINTS + name, source)
        writer.write_index()


def restore_there(file: Path, server: PostgresServer, other: str, home: Path) -> None:
    url = server.url(other, user=OWNER)
    restore(file, owner_url=url, home=str(home), dashboard=DASHBOARD_COMMAND)


def test_restore_places_only_files_with_names_of_checkpoints(
    owner_url: str, database_url: str, postgres_server: PostgresServer, other: str, tmp_path: Path
) -> None:
    source = tmp_path / "content"
    source.write_text(EVIL)
    good = ("s-1/0000/0001-1.pt", "s-1/0000/0001.120-1.pt", "s-1/0000/0001-1.pt.0_0.distcp")
    bad = ("x/evil.py", "evil.py", "s-1/0000/0001-1.pt.py", "s-1/0000/evil.pt/__init__.py", "s-1/0000/0001-1.pt.so")
    make_backup(tmp_path / "b.tar", owner_url, database_url, "digits", dict.fromkeys([*good, *bad], source))
    restore_there(tmp_path / "b.tar", postgres_server, other, tmp_path / "home")
    root = tmp_path / "home" / "checkpoints"
    assert {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} == set(good)


@pytest.mark.parametrize("place", ["home", "elsewhere"])
def test_the_objective_of_a_backup_is_not_imported(
    owner_url: str,
    database_url: str,
    postgres_server: PostgresServer,
    other: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
) -> None:
    """The backup places the file with the code, and its study refers to this file, with the right hash."""
    source = tmp_path / "evil.py"
    source.write_text(EVIL)
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(tmp_path))
    if place == "home":
        reference, imported = "~/home/checkpoints/x/evil.py:Digits", home / "checkpoints" / "x" / "imported"
    else:  # an artifact of MLflow, for example
        reference, imported = f"{source}:Digits", tmp_path / "imported"
    make_backup(tmp_path / "b.tar", owner_url, database_url, reference, {"x/evil.py": source})
    restore_there(tmp_path / "b.tar", postgres_server, other, home)
    monkeypatch.setenv("HPSEARCH_STORAGE_URL", url := postgres_server.url(other, user=WORKER))
    monkeypatch.setenv("HPSEARCH_HOME", str(home))
    for command in ("doctor s", "doctor s --import-objective", "worker --study s --tracking-uri http://127.0.0.1:1"):
        assert run_command(command.split()) != 0
        assert not imported.exists(), command
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    if place == "elsewhere":
        assert "because the study was restored from a backup; if you trust this code, confirm it" in captured.err

        monkeypatch.setattr("sys.stdin", io.StringIO())
        assert run_command(["trust", "s"]) == 2, "stdin is no terminal"
        assert run_command(["trust", "s", "--yes"]) == 0
        assert not imported.exists()
        assert open_storage(url, application_name="test").get_study_user_attrs(1)[RESTORED] is None
        run_command(["doctor", "s", "--import-objective"])
        assert imported.exists()


def test_a_script_in_which_psql_would_run_shell_commands_is_rejected(tmp_path: Path) -> None:
    """This is the script of a pg_restore without the correction of CVE-2025-8714."""
    script, programs = tmp_path / "script.sql", find_programs(15, why="the test")
    script.write_text("--\n-- PostgreSQL database dump\n--\n\n-- Dumped from database version 16.1\n\\! touch /tmp/x\n")
    with pytest.raises(StorageError, match="runs shell commands from a changed backup: install Postgres") as raised:
        require_restricted(script, programs)
    assert "\n" not in str(raised.value)
