"""Putting a backup back: into empty databases, all of it or, of each database, nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpsearch.storage.backup import adapt, archive, places
from hpsearch.storage.backup.archive import Manifest, Reader, Unpacked
from hpsearch.storage.backup.dumps import check_server, count, put_back, session
from hpsearch.storage.backup.leftovers import sweep
from hpsearch.storage.backup.programs import Programs, find_programs
from hpsearch.storage.backup.schemas import check_known, upgrade_mlflow
from hpsearch.storage.database.migrate import migrate
from hpsearch.storage.database.schema import IS_RESTORED_BY_HALF, RESTORING
from hpsearch.storage.embedded import stack
from hpsearch.storage.errors import StorageError
from hpsearch.storage.files import sha256
from hpsearch.storage.urls import redact

Progress = Callable[[str], None]

_STUDIES = ("studies",)
_MLFLOW = ("runs", "registered_models")


@dataclass(frozen=True)
class Restored:
    """What was put back, and what the restored studies still refer to outside of it.

    Attributes:
        manifest: of the backup.
        tracking_uri: the MLflow server that has the runs now; None where nobody has named it.
        checkpoints: studies whose checkpoints are in a place of their own, and where.
        left_out: how many files of artifacts the backup knows of and does not hold.
    """

    manifest: Manifest
    tracking_uri: str | None
    checkpoints: Sequence[tuple[str, str]]
    left_out: int


def restore(
    file: Path,
    *,
    owner_url: str | None = None,
    artifacts: str | None = None,
    tracking_uri: str | None = None,
    ui_url: str | None = None,
    home: str | None = None,
    progress: Progress = lambda _: None,
) -> Restored:
    """Put a backup back where there are no studies, no runs and no registered models.

    Args:
        file: what `backup` wrote.
        owner_url: Postgres of the studies, as its owner; MLflow's database is then that of MLFLOW_BACKEND_STORE_URI.
            Without it the embedded stack takes it, which is started.
        artifacts: folder of MLflow's artifacts, for services of one's own.
        tracking_uri: address of one's own MLflow server; by default what the studies say.
        ui_url: where browsers reach the MLflow server, where that is not where workers do.
        home: folder of the embedded stack and of checkpoints; by default the user's.
        progress: is told what is being done, a line at a time.

    Raises:
        StorageError: the file is no whole backup that this version can read, or there is something already; nothing
            was changed. Or a service fails meanwhile.
    """
    file = file.expanduser().absolute()
    with Reader.opened(file) as reader:
        manifest = reader.manifest
        check_known(manifest)
        programs = find_programs(_major(manifest.dumped_by), why="the backup")
        folder = places.chosen_home(home)
        places.check_choice(owner_url, artifacts, home=folder, must_exist=False)
        own = None if owner_url is None else _own(folder, owner_url, artifacts, manifest)
        if own is not None:
            _check_empty(own, manifest)
        elif places.has_stack(folder):
            with stack.held(folder, progress=progress):
                _check_empty(_embedded(folder, manifest), manifest)
        try:
            with _workshop(folder) as workshop:
                progress(f"reading {file.name}")
                unpacked = reader.unpack(workshop / "files", progress=progress)
                if own is not None:
                    others = _put_all(unpacked, own, programs, progress, again=_was_cut_off(own))
                else:
                    with stack.held(folder, progress=progress) as held:
                        own_stack = _embedded(folder, manifest)
                        _check_empty(own_stack, manifest)
                        held.stop_services()
                        others = _put_all(unpacked, own_stack, programs, progress, again=_was_cut_off(own_stack))
        except OSError as error:
            raise StorageError(f"{str(folder)!r} cannot be written ({error}): the restore is not whole") from None
    where = own
    if where is None:
        info = stack.up(folder, progress=progress)
        where, tracking_uri = _embedded(folder, manifest), info.tracking_uri
    if tracking_uri is not None:
        with _cursors(where) as (studies, mlflow):
            adapt.readdress(studies, mlflow, tracking_uri=tracking_uri, ui_url=ui_url or tracking_uri)
    return Restored(manifest, tracking_uri, others, sum(not entry.held for entry in unpacked.index))


def _major(version: str) -> int:
    return int(version.split(".", maxsplit=1)[0])


def _embedded(folder: Path, manifest: Manifest) -> places.Places:
    return places.embedded_places(folder, studies_only=not manifest.with_mlflow)


def _own(folder: Path, owner_url: str, artifacts: str | None, manifest: Manifest) -> places.Places:
    """Return one's own services, which an archive with files needs a folder for."""
    where = places.own_places(folder, owner_url, artifacts=artifacts, studies_only=not manifest.with_mlflow)
    if manifest.files and artifacts is None:
        raise StorageError(
            "--artifacts is missing: the backup has the files of MLflow's artifacts; give their folder, as "
            "'serve mlflow' has it"
        )
    if manifest.files and where.artifacts_folder is None:
        raise StorageError(f"--artifacts {artifacts!r} is no folder: the files can be put into one alone")
    return where


@contextmanager
def _workshop(home: Path) -> Iterator[Path]:
    sweep(home, ".restore-")
    folder = Path(tempfile.mkdtemp(prefix=".restore-", dir=home))
    try:
        (folder / "files").mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_empty(where: places.Places, manifest: Manifest) -> None:
    """Refuse databases that hold anything, and servers older than the backup's.

    Raises:
        StorageError: what there is.
    """
    urls: list[tuple[str, str, Sequence[str]]] = [(where.studies_url, where.studies_setting, _STUDIES)]
    if where.mlflow_url is not None:
        urls.append((where.mlflow_url, where.mlflow_setting, _MLFLOW))
    found = []
    for url, setting, tables in urls:
        check_server(url, manifest.postgres, setting=setting)
        with session(url, setting=setting) as cursor:
            numbers = {table: count(cursor, table) for table in tables}
        found += [f"{table.replace('_', ' ')}: {number}" for table, number in numbers.items() if number]
    if found and not _was_cut_off(where):
        place = f"the stack in {str(where.home)!r}" if where.embedded else redact(where.studies_url)
        what = "give --home, or set HPSEARCH_HOME to another folder" if where.embedded else "give empty databases"
        raise StorageError(f"{place} is not empty ({', '.join(found)}): nothing is overwritten; {what}")


def _was_cut_off(where: places.Places) -> bool:
    """Whether an earlier restore into these databases was: what it left is put back anew."""
    with session(where.studies_url, setting=where.studies_setting) as cursor:
        cursor.execute(IS_RESTORED_BY_HALF)
        return bool(cursor.fetchone() == (True,))


def _put_all(
    unpacked: Unpacked, where: places.Places, programs: Programs, progress: Progress, *, again: bool
) -> Sequence[tuple[str, str]]:
    """Put files and databases in place, what is referred to first; return the places of studies' own checkpoints."""
    with session(where.studies_url, setting=where.studies_setting) as cursor:
        cursor.execute(f"CREATE SCHEMA IF NOT EXISTS {RESTORING}")
    folder, with_mlflow = unpacked.folder, unpacked.manifest.with_mlflow
    moves = [(source, where.checkpoints / path) for path, source in unpacked.held(archive.CHECKPOINTS)]
    if (artifacts := where.artifacts_folder) is not None:
        moves += [(source, artifacts / path) for path, source in unpacked.held(archive.ARTIFACTS)]
    if not again:
        _check_free(moves)
    progress(f"putting {len(moves)} files in place")
    for source, target in moves:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(source, target)
    script = folder / "script.sql"
    if where.mlflow_url is not None:
        progress("restoring MLflow's database")
        dump = folder / archive.MLFLOW_DUMP
        put_back(dump, where.mlflow_url, must_be_empty=() if again else _MLFLOW, script=script, programs=programs)
        upgrade_mlflow(where.mlflow_url)
    progress("restoring the studies")
    dump = folder / archive.STUDIES_DUMP
    put_back(dump, where.studies_url, must_be_empty=() if again else _STUDIES, script=script, programs=programs)
    migrate(where.studies_url, setting=where.studies_setting)
    with _cursors(where) as (studies, mlflow):
        adapt.release_trials(studies)
        if with_mlflow and mlflow is not None:
            adapt.reconcile(studies, mlflow)
        others = adapt.forget_home(studies, unpacked.manifest.home)
        studies.execute(f"DROP SCHEMA {RESTORING}")
    return others


def _check_free(moves: Sequence[tuple[Path, Path]]) -> None:
    """Refuse to replace a file by another one."""
    for source, target in moves:
        if os.path.lexists(target) and not (target.is_file() and sha256(target) == sha256(source)):
            raise StorageError(f"{str(target)!r} is there already and is another file: nothing is overwritten")


@contextmanager
def _cursors(where: places.Places) -> Iterator[tuple[Any, Any]]:
    """Yield a cursor on each database, the second None where MLflow's is left out; what is written is committed."""
    with ExitStack() as opened:
        cursors: list[Any] = []
        for url, setting in ((where.studies_url, where.studies_setting), (where.mlflow_url, where.mlflow_setting)):
            cursors.append(None if url is None else opened.enter_context(session(url, setting=setting)))
        yield cursors[0], cursors[1]
