"""Restore a backup into new or existing services."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hpsearch.storage.database.migrate
from hpsearch.storage.attributes import CHECKPOINT_URL, MODEL, PENDING, RUN_ID, RUN_URL, TRACKING, TRACKING_URI
from hpsearch.storage.backup import archive, backup
from hpsearch.storage.backup.archive import Manifest, Reader, Unpacked
from hpsearch.storage.backup.backup import sweep
from hpsearch.storage.backup.dumps import Programs, check_server, count, find_programs, put_back, session
from hpsearch.storage.database.connect import make_engine
from hpsearch.storage.database.migrate import migrate
from hpsearch.storage.database.schema import IS_RESTORED_BY_HALF, RESTORING
from hpsearch.storage.embedded import stack
from hpsearch.storage.errors import StorageError
from hpsearch.storage.files import sha256
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.urls import redact


def check_known(manifest: Manifest) -> None:
    """Refuse a backup whose tables are of a newer version than is installed.

    Raises:
        StorageError: which version it is of.
    """
    import mlflow
    import optuna

    # What is installed has its migrations in these folders.
    places = (
        ("hpsearch", manifest.schema, Path(hpsearch.storage.database.migrate.__file__).with_name("migrations")),
        ("Optuna", manifest.optuna_schema, Path(optuna.__file__).parent / "storages" / "_rdb" / "alembic"),
        ("MLflow", manifest.mlflow_schema, Path(mlflow.__file__).parent / "store" / "db_migrations"),
    )
    for name, found, scripts in places:
        if found is not None and found not in _revisions(scripts):
            raise StorageError(
                f"the backup is of a newer {name} (schema {found}; made by hpsearch {manifest.hpsearch}): "
                "install the versions that made it"
            )


def _revisions(scripts: Path) -> Iterable[str]:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    return {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}


def upgrade_mlflow(url: str) -> None:
    """Bring MLflow's tables to the installed version, as ``mlflow db upgrade`` does, which takes a password openly."""
    from mlflow.store.db.utils import _upgrade_db

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    engine = make_engine(url, application_name="hpsearch-restore")
    try:
        _upgrade_db(engine)
    finally:
        engine.dispose()


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


def restore(  # noqa: PLR0913 a keyword for each flag
    file: Path,
    *,
    owner_url: str | None = None,
    artifacts: str | None = None,
    tracking_uri: str | None = None,
    ui_url: str | None = None,
    home: str | None = None,
    dashboard: Sequence[str],
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
        dashboard: command of the embedded stack's dashboard.
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
        folder = backup.chosen_home(home)
        backup.check_choice(owner_url, artifacts, home=folder, must_exist=False)
        own = None if owner_url is None else _own(folder, owner_url, artifacts, manifest)
        if own is not None:
            _check_empty(own, manifest)
        elif backup.has_stack(folder):
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
        info = stack.up(folder, dashboard=dashboard, progress=progress)
        where, tracking_uri = _embedded(folder, manifest), info.tracking_uri
    if tracking_uri is not None:
        with _cursors(where) as (studies, mlflow):
            readdress(studies, mlflow, tracking_uri=tracking_uri, ui_url=ui_url or tracking_uri)
    return Restored(manifest, tracking_uri, others, sum(not entry.held for entry in unpacked.index))


def _major(version: str) -> int:
    return int(version.split(".", maxsplit=1)[0])


def _embedded(folder: Path, manifest: Manifest) -> backup.Places:
    return backup.embedded_places(folder, studies_only=not manifest.with_mlflow)


def _own(folder: Path, owner_url: str, artifacts: str | None, manifest: Manifest) -> backup.Places:
    """Return one's own services, which an archive with files needs a folder for."""
    where = backup.own_places(folder, owner_url, artifacts=artifacts, studies_only=not manifest.with_mlflow)
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


def _check_empty(where: backup.Places, manifest: Manifest) -> None:
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


def _was_cut_off(where: backup.Places) -> bool:
    """Whether an earlier restore into these databases was: what it left is put back anew."""
    with session(where.studies_url, setting=where.studies_setting) as cursor:
        cursor.execute(IS_RESTORED_BY_HALF)
        return bool(cursor.fetchone() == (True,))


def _put_all(
    unpacked: Unpacked, where: backup.Places, programs: Programs, progress: Progress, *, again: bool
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
        release_trials(studies)
        if with_mlflow and mlflow is not None:
            reconcile(studies, mlflow)
        others = forget_home(studies, unpacked.manifest.home)
        studies.execute(f"DROP SCHEMA {RESTORING}")
    return others


def _check_free(moves: Sequence[tuple[Path, Path]]) -> None:
    """Refuse to replace a file by another one."""
    for source, target in moves:
        if os.path.lexists(target) and not (target.is_file() and sha256(target) == sha256(source)):
            raise StorageError(f"{str(target)!r} is there already and is another file: nothing is overwritten")


@contextmanager
def _cursors(where: backup.Places) -> Iterator[tuple[Any, Any]]:
    """Yield a cursor on each database, the second None where MLflow's is left out; what is written is committed."""
    with ExitStack() as opened:
        cursors: list[Any] = []
        for url, setting in ((where.studies_url, where.studies_setting), (where.mlflow_url, where.mlflow_setting)):
            cursors.append(None if url is None else opened.enter_context(session(url, setting=setting)))
        yield cursors[0], cursors[1]


_RUN_PAGE = "/#/experiments/"  # what follows a server's address in that of a run's page

# As a worker does that gives its trial back: it costs no retry, and who claims next goes on with it. The workers of
# the old place are told of as gone: nothing here is theirs.
_RELEASE = """
    WITH ended AS (
        UPDATE hpsearch_attempts SET ended_at = clock_timestamp(), outcome = 'released' WHERE ended_at IS NULL
        RETURNING trial_id
    )
    UPDATE trials SET state = 'WAITING'
     WHERE state = 'RUNNING' AND trial_id IN (SELECT trial_id FROM ended);
    UPDATE hpsearch_workers SET left_at = clock_timestamp(), left_as = 'restored elsewhere' WHERE left_at IS NULL;
"""


def release_trials(cursor: Any) -> None:
    """Give back the trials that were running: their workers are elsewhere."""
    cursor.execute(_RELEASE)


@dataclass(frozen=True)
class _Run:
    run_id: str
    finished: bool
    study: str
    number: int
    parent: str | None
    model: str | None


def reconcile(studies: Any, mlflow: Any) -> None:
    """Bring the two databases in line: MLflow's was read a moment after that of the studies.

    Runs of trials that began in between are marked as deleted, for the trials of these numbers are still to come. What
    MLflow got whole in between is noted so: its checkpoint may be gone, and nobody will send it again.

    Args:
        studies: a cursor on the database of the studies.
        mlflow: one on MLflow's.
    """
    runs = _trial_runs(mlflow)
    studies.execute(
        """
        SELECT s.study_name, r.value_json::jsonb #>> '{}', (SELECT count(*) FROM trials t WHERE t.study_id = s.study_id)
          FROM studies s JOIN study_user_attributes r ON r.study_id = s.study_id AND r.key = %s
        """,
        (RUN_ID,),
    )
    known = {name: (parent, trials) for name, parent, trials in studies.fetchall()}
    later = [
        r.run_id for r in runs if r.study in known and r.parent == known[r.study][0] and r.number >= known[r.study][1]
    ]
    mlflow.execute(
        """
        UPDATE runs
           SET lifecycle_stage = 'deleted', deleted_time = (extract(epoch FROM clock_timestamp()) * 1000)::bigint
         WHERE run_uuid = ANY(%s) AND NOT EXISTS (SELECT FROM model_versions v WHERE v.run_id = run_uuid)
        """,
        (later,),
    )
    studies.execute(
        """
        SELECT s.study_name, t.number, t.trial_id
          FROM trials t JOIN studies s USING (study_id)
          JOIN trial_user_attributes a ON a.trial_id = t.trial_id AND a.key = %s
         WHERE t.state = 'COMPLETE' AND starts_with(a.value_json::jsonb #>> '{}', %s)
        """,
        (TRACKING, PENDING),
    )
    pending = {(name, number): trial for name, number, trial in studies.fetchall()}
    for run in runs:
        mine = run.study in known and run.parent == known[run.study][0]
        if mine and run.finished and (trial := pending.get((run.study, run.number))) is not None:
            _note_arrived(studies, trial, run)


def _trial_runs(mlflow: Any) -> list[_Run]:
    mlflow.execute(
        """
        SELECT r.run_uuid, r.status = 'FINISHED', study.value, trial.value, parent.value, model.value
          FROM runs r
          JOIN tags study ON study.run_uuid = r.run_uuid AND study.key = %s
          JOIN tags trial ON trial.run_uuid = r.run_uuid AND trial.key = %s
          LEFT JOIN tags parent ON parent.run_uuid = r.run_uuid AND parent.key = 'mlflow.parentRunId'
          LEFT JOIN tags model ON model.run_uuid = r.run_uuid AND model.key = %s
         WHERE r.lifecycle_stage = 'active' AND trial.value ~ '^[0-9]{1,9}$'
        """,
        (tag_names.STUDY, tag_names.TRIAL, tag_names.MODEL_ID),
    )
    return [_Run(run, ended, study, int(trial), parent, model) for run, ended, study, trial, parent, model in mlflow]


def _note_arrived(studies: Any, trial: int, run: _Run) -> None:
    for key, value in ((RUN_ID, run.run_id), (MODEL, run.model)):
        if value is not None:
            studies.execute(
                "INSERT INTO trial_user_attributes (trial_id, key, value_json) VALUES (%s, %s, %s) "
                "ON CONFLICT (trial_id, key) DO UPDATE SET value_json = excluded.value_json",
                (trial, key, json.dumps(value)),
            )
    studies.execute("DELETE FROM trial_user_attributes WHERE trial_id = %s AND key = %s", (trial, TRACKING))


def readdress(studies: Any, mlflow: Any | None, *, tracking_uri: str, ui_url: str) -> None:
    """Let links lead to the MLflow server that has the runs now, wherever they are shown.

    Args:
        studies: a cursor on the database of the studies.
        mlflow: one on MLflow's, where that was restored.
        tracking_uri: the server's address.
        ui_url: where browsers reach it.
    """
    studies.execute(
        "UPDATE study_user_attributes SET value_json = %s WHERE key = %s",
        (json.dumps(tracking_uri.rstrip("/")), TRACKING_URI),
    )
    studies.execute(
        """
        SELECT DISTINCT split_part(value_json::jsonb #>> '{}', %s, 1) FROM (
            SELECT value_json FROM study_user_attributes WHERE key = %s
            UNION ALL SELECT value_json FROM trial_user_attributes WHERE key = %s) AS shown
        """,
        (_RUN_PAGE, RUN_URL, RUN_URL),
    )
    new = ui_url.rstrip("/") + _RUN_PAGE
    for (base,) in studies.fetchall():
        old = f"{base}{_RUN_PAGE}"
        if not base or old == new:
            continue
        for table in ("study_user_attributes", "trial_user_attributes", "study_system_attributes"):
            studies.execute(
                f"UPDATE {table} SET value_json = replace(value_json, %s, %s) WHERE strpos(value_json, %s) > 0",  # noqa: S608 names of ours
                (old, new, old),
            )
        studies.execute(
            "UPDATE hpsearch_promotions SET evidence = replace(evidence::text, %s, %s)::jsonb "
            "WHERE strpos(evidence::text, %s) > 0",
            (old, new, old),
        )
        if mlflow is not None:  # the pages of promoted versions
            mlflow.execute(
                "UPDATE model_versions SET description = left(replace(description, %s, %s), 5000) "
                "WHERE strpos(description, %s) > 0",
                (old, new, old),
            )


def forget_home(studies: Any, home: str) -> list[tuple[str, str]]:
    """Let studies whose checkpoints lay in the old home have them in this one, where they were put.

    Returns:
        The other studies that name a place for their checkpoints: name and URL.
    """
    places = [f"{head}{home}/checkpoints" for head in ("", "file://")]
    studies.execute(
        "DELETE FROM study_user_attributes WHERE key = %s AND rtrim(value_json::jsonb #>> '{}', '/') = ANY(%s)",
        (CHECKPOINT_URL, places),
    )
    studies.execute(
        "SELECT s.study_name, a.value_json::jsonb #>> '{}' FROM studies s "
        "JOIN study_user_attributes a USING (study_id) WHERE a.key = %s ORDER BY s.study_name",
        (CHECKPOINT_URL,),
    )
    return [(str(name), str(url)) for name, url in studies.fetchall()]
