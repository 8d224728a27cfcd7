"""Restore a backup into new or existing services."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpsearch.storage.attributes import CHECKPOINT_URL, MODEL, PENDING, RUN_ID, RUN_URL, TRACKING, TRACKING_URI
from hpsearch.storage.backup import archive, backup
from hpsearch.storage.backup.archive import Manifest, Reader, Unpacked
from hpsearch.storage.backup.dumps import count, find_programs, put_back, session
from hpsearch.storage.database.connect import make_engine
from hpsearch.storage.database.migrate import MIGRATIONS, known_revisions, migrate
from hpsearch.storage.database.schema import IS_RESTORED_BY_HALF, RESTORING
from hpsearch.storage.embedded import stack
from hpsearch.storage.embedded.postgres_binaries import Binaries
from hpsearch.storage.embedded.services import EmbeddedStack
from hpsearch.storage.errors import StorageError
from hpsearch.storage.files import sha256
from hpsearch.storage.home import home_dir
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.urls import redact


def check_known(manifest: Manifest) -> None:
    """Reject a backup whose tables are of a newer version than is installed.

    Raises:
        StorageError: with the version that made the backup.
    """
    import mlflow
    import optuna

    # What is installed has its migrations in these folders.
    places = (
        ("hpsearch", manifest.schema, MIGRATIONS),
        ("Optuna", manifest.optuna_schema, Path(optuna.__file__).parent / "storages" / "_rdb" / "alembic"),
        ("MLflow", manifest.mlflow_schema, Path(mlflow.__file__).parent / "store" / "db_migrations"),
    )
    for name, found, scripts in places:
        if found is not None and found not in known_revisions(scripts):
            raise StorageError(
                f"the backup is of a newer {name} (schema {found}; made by hpsearch {manifest.hpsearch}): "
                "install the versions that made it"
            )


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
        folder = home_dir(home).resolve()
        backup.check_choice(owner_url, artifacts)
        services = partial(_empty_services, folder, owner_url, artifacts, manifest, progress)
        if owner_url is not None or backup.has_stack(folder):
            with services():
                pass  # a mistake is reported before the file is read
        try:
            with backup.temporary_folder(folder, "restore") as workshop:
                progress(f"reading {file.name}")
                unpacked = reader.unpack(workshop, progress=progress)
                with services() as (where, held):
                    if held is not None:
                        held.stop_services()
                    others = _put_all(unpacked, where, programs, progress)
        except OSError as error:
            raise StorageError(f"{str(folder)!r} cannot be written ({error}): the restore is not whole") from None
    if owner_url is None:
        tracking_uri = stack.up(folder, dashboard=dashboard, progress=progress).tracking_uri
        where = backup.embedded_places(folder, studies_only=not manifest.with_mlflow)
    if tracking_uri is not None:
        with _cursors(where) as (studies, mlflow):
            readdress(studies, mlflow, tracking_uri=tracking_uri, ui_url=ui_url or tracking_uri)
    return Restored(manifest, tracking_uri, others, sum(not entry.held for entry in unpacked.index))


def _major(version: str) -> int:
    return int(version.split(".", maxsplit=1)[0])


@contextmanager
def _empty_services(
    folder: Path, owner_url: str | None, artifacts: str | None, manifest: Manifest, progress: Progress
) -> Iterator[tuple[backup.Places, EmbeddedStack | None]]:
    """Yield the services, which are empty, with the embedded stack if it is theirs; only this process may stop it.

    Raises:
        StorageError: they hold anything, are older than those of the backup, or have no folder for its artifacts.
    """
    studies_only = not manifest.with_mlflow
    with nullcontext() if owner_url is not None else stack.held(folder, progress=progress) as held:
        if owner_url is None:
            where = backup.embedded_places(folder, studies_only=studies_only)
        else:
            where = backup.own_places(folder, owner_url, artifacts=artifacts, studies_only=studies_only)
        if manifest.files and where.artifacts is None:
            raise StorageError(
                "--artifacts is missing: the backup has the files of MLflow's artifacts; give their folder, as "
                "'serve mlflow' has it"
            )
        if manifest.files and where.artifacts_folder is None:
            raise StorageError(f"--artifacts {artifacts!r} is no folder: the files can be put into one alone")
        _check_empty(where, manifest)
        yield where, held


def _check_empty(where: backup.Places, manifest: Manifest) -> None:
    """Reject databases that hold anything, and servers older than the backup's.

    Raises:
        StorageError: with the numbers of rows. What a restore that was cut off has left is no reason.
    """
    found: list[str] = []
    was_cut_off = False
    for database, tables in ((where.studies, _STUDIES), (where.mlflow, _MLFLOW)):
        if database is None:
            continue
        with session(*database) as cursor:
            here = cursor.connection.server_version // 10_000
            if here < _major(manifest.postgres):
                raise StorageError(
                    f"the archive is of Postgres {manifest.postgres}, and the server is of Postgres {here}: "
                    "use a newer one"
                )
            was_cut_off = was_cut_off or _was_cut_off(cursor)
            numbers = {table: count(cursor, table) for table in tables}
        found += [f"{table.replace('_', ' ')}: {number}" for table, number in numbers.items() if number]
    if found and not was_cut_off:
        place = f"the stack in {str(where.home)!r}" if where.embedded else redact(where.studies.url)
        what = "give --home, or set HPSEARCH_HOME to another folder" if where.embedded else "give empty databases"
        raise StorageError(f"{place} is not empty ({', '.join(found)}): nothing is overwritten; {what}")


def _was_cut_off(cursor: Any) -> bool:
    """Whether an earlier restore into this database was cut off: the content that it left is replaced."""
    cursor.execute(IS_RESTORED_BY_HALF)
    return bool(cursor.fetchone()[0])


def _put_all(
    unpacked: Unpacked, where: backup.Places, programs: Binaries, progress: Progress
) -> Sequence[tuple[str, str]]:
    """Put files and databases in place, what is referred to first; return the places of studies' own checkpoints."""
    with session(*where.studies) as cursor:
        again = _was_cut_off(cursor)
        cursor.execute(f"CREATE SCHEMA IF NOT EXISTS {RESTORING}")
    moves = [(source, where.checkpoints / path) for path, source in unpacked.held(archive.CHECKPOINTS)]
    if (artifacts := where.artifacts_folder) is not None:
        moves += [(source, artifacts / path) for path, source in unpacked.held(archive.ARTIFACTS)]
    if not again:
        _check_free(moves)
    progress(f"putting {len(moves)} files in place")
    for source, target in moves:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(source, target)
    if where.mlflow is not None:
        progress("restoring MLflow's database")
        dump = unpacked.folder / archive.MLFLOW_DUMP
        put_back(dump, where.mlflow.url, must_be_empty=() if again else _MLFLOW, programs=programs)
        upgrade_mlflow(where.mlflow.url)
    progress("restoring the studies")
    dump = unpacked.folder / archive.STUDIES_DUMP
    put_back(dump, where.studies.url, must_be_empty=() if again else _STUDIES, programs=programs)
    migrate(where.studies.url, setting=where.studies.setting)
    with _cursors(where) as (studies, mlflow):
        release_trials(studies)
        if mlflow is not None:
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
    with session(*where.studies) as studies, session(*where.mlflow) if where.mlflow else nullcontext() as mlflow:
        yield studies, mlflow


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


# Of trials whose run MLflow received whole after the snapshot of the studies.
_NOTE_ARRIVED = """
    WITH arrived AS (
        SELECT DISTINCT ON (t.trial_id) t.trial_id, r.run_id, r.model
          FROM jsonb_to_recordset(%(runs)s) AS r (study_id int, number int, run_id text, model text)
          JOIN trials t ON t.study_id = r.study_id AND t.number = r.number
          JOIN trial_user_attributes a ON a.trial_id = t.trial_id AND a.key = %(tracking)s
         WHERE t.state = 'COMPLETE' AND starts_with(a.value_json::jsonb #>> '{}', %(pending)s)
    ), noted AS (
        INSERT INTO trial_user_attributes (trial_id, key, value_json)
        SELECT trial_id, key, to_json(value)::text
          FROM arrived, LATERAL (VALUES (%(run_id)s, run_id), (%(model)s, model)) AS v (key, value)
         WHERE value IS NOT NULL
        ON CONFLICT (trial_id, key) DO UPDATE SET value_json = excluded.value_json
    )
    DELETE FROM trial_user_attributes a USING arrived WHERE a.trial_id = arrived.trial_id AND a.key = %(tracking)s
"""


def reconcile(studies: Any, mlflow: Any) -> None:
    """Bring the two databases in line: MLflow's was read a moment after that of the studies.

    Runs of trials that began in between are marked as deleted, for the trials of these numbers are still to come. What
    MLflow got whole in between is noted so: its checkpoint may be gone, and nobody will send it again.

    Args:
        studies: a cursor on the database of the studies.
        mlflow: one on MLflow's.
    """
    studies.execute(
        """
        SELECT r.value_json::jsonb #>> '{}', s.study_name, s.study_id,
               (SELECT count(*) FROM trials t WHERE t.study_id = s.study_id)
          FROM studies s JOIN study_user_attributes r ON r.study_id = s.study_id AND r.key = %s
        """,
        (RUN_ID,),
    )
    # By name too: the trials of finalists have the parent run of their search.
    known = {(parent, name): (study_id, trials) for parent, name, study_id, trials in studies}
    mlflow.execute(
        """
        SELECT r.run_uuid, r.status, parent.value, study.value, trial.value, model.value
          FROM runs r
          JOIN tags study ON study.run_uuid = r.run_uuid AND study.key = %s
          JOIN tags parent ON parent.run_uuid = r.run_uuid AND parent.key = 'mlflow.parentRunId'
          JOIN tags trial ON trial.run_uuid = r.run_uuid AND trial.key = %s
          LEFT JOIN tags model ON model.run_uuid = r.run_uuid AND model.key = %s
         WHERE r.lifecycle_stage = 'active' AND trial.value ~ '^[0-9]{1,9}$'
        """,
        (tag_names.STUDY, tag_names.TRIAL, tag_names.MODEL_ID),
    )
    later, finished = [], []
    for run_id, status, parent, name, trial, model in mlflow:
        if (parent, name) not in known:
            continue
        study_id, trials = known[parent, name]
        if int(trial) >= trials:
            later.append(run_id)
        elif status == "FINISHED":
            finished.append({"study_id": study_id, "number": int(trial), "run_id": run_id, "model": model})
    mlflow.execute(
        """
        UPDATE runs
           SET lifecycle_stage = 'deleted', deleted_time = (extract(epoch FROM clock_timestamp()) * 1000)::bigint
         WHERE run_uuid = ANY(%s) AND NOT EXISTS (SELECT FROM model_versions v WHERE v.run_id = run_uuid)
        """,
        (later,),
    )
    keys = {"tracking": TRACKING, "pending": PENDING, "run_id": RUN_ID, "model": MODEL}
    studies.execute(_NOTE_ARRIVED, {"runs": json.dumps(finished), **keys})


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
    columns = [
        (studies, "study_user_attributes", "value_json", "text"),
        (studies, "trial_user_attributes", "value_json", "text"),
        (studies, "study_system_attributes", "value_json", "text"),
        (studies, "hpsearch_promotions", "evidence", "jsonb"),
    ]
    if mlflow is not None:  # the pages of promoted versions; the cast cuts them at MLflow's limit
        columns.append((mlflow, "model_versions", "description", "varchar(5000)"))
    for (base,) in studies.fetchall():
        old = f"{base}{_RUN_PAGE}"
        if not base or old == new:
            continue
        for cursor, table, column, kind in columns:
            cursor.execute(
                f"UPDATE {table} SET {column} = replace({column}::text, %s, %s)::{kind} "  # noqa: S608 names of ours
                f"WHERE strpos({column}::text, %s) > 0",
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
