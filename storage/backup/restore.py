"""Restore of a backup into empty services."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpsearch.redaction import redact
from hpsearch.storage.attributes import (
    CHECKPOINT_URL,
    MODEL,
    PENDING,
    RESTORED,
    RUN_ID,
    RUN_URL,
    SPEC,
    TRACKING,
    TRACKING_URI,
)
from hpsearch.storage.backup import archive, backup
from hpsearch.storage.backup.archive import ArchiveReader, Manifest, UnpackedArchive
from hpsearch.storage.backup.dumps import count_rows, find_programs, open_session
from hpsearch.storage.backup.rows import restore_rows
from hpsearch.storage.checkpoints.store import is_checkpoint_path
from hpsearch.storage.database.connect import make_engine
from hpsearch.storage.database.migrate import MIGRATIONS, create_tables, list_revisions, migrate
from hpsearch.storage.database.schema import OPTUNA_REVISION, PARTIAL_RESTORE_QUERY, RESTORE_SCHEMA
from hpsearch.storage.embedded import stack
from hpsearch.storage.embedded.postgres_binaries import Binaries
from hpsearch.storage.embedded.services import EmbeddedStack
from hpsearch.storage.errors import StorageError, format_error
from hpsearch.storage.files import compute_sha256
from hpsearch.storage.home import prepare_home
from hpsearch.storage.mlflow import tag_names

if TYPE_CHECKING:
    import sqlalchemy


def check_schema_revisions(manifest: Manifest) -> None:
    """Check that the installed packages can create tables of the revisions of the backup.

    Raises:
        StorageError: a revision is newer than the installed package, or Optuna's revision is older.
    """
    import mlflow
    import optuna

    # The installed packages have their migrations in these folders.
    packages = (
        ("hpsearch", manifest.schema, MIGRATIONS),
        ("Optuna", manifest.optuna_schema, Path(optuna.__file__).parent / "storages" / "_rdb" / "alembic"),
        ("MLflow", manifest.mlflow_schema, Path(mlflow.__file__).parent / "store" / "db_migrations"),
    )
    remedy = "install the versions of hpsearch, Optuna and MLflow that wrote it"
    for name, found, scripts in packages:
        if found is not None and found not in list_revisions(scripts):
            raise StorageError(
                f"the backup is from a newer {name} (schema {found}; written by hpsearch {manifest.hpsearch_version}); "
                f"{remedy}"
            )
    if manifest.optuna_schema != OPTUNA_REVISION:  # Optuna creates tables of its latest revision only
        raise StorageError(f"the backup is from an older Optuna (schema {manifest.optuna_schema}); {remedy}")


def create_mlflow_tables(url: str, revision: str) -> None:
    """Create MLflow's tables of a revision in a database without tables.

    Raises:
        StorageError: the database rejects a statement.
    """
    from mlflow.store.tracking.dbmodels.initial_models import Base

    with _open_mlflow_engine(url) as engine:
        Base.metadata.create_all(engine)
        _upgrade_mlflow(engine, revision)


def upgrade_mlflow(url: str) -> None:
    """Upgrade MLflow's tables in this process; ``mlflow db upgrade`` would show the password in its command line.

    Raises:
        StorageError: the database rejects a statement.
    """
    with _open_mlflow_engine(url) as engine:
        _upgrade_mlflow(engine, "heads")


@contextmanager
def _open_mlflow_engine(url: str) -> Iterator[sqlalchemy.Engine]:
    from sqlalchemy.exc import DBAPIError

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    engine = make_engine(url, application_name="hpsearch-restore")
    try:
        yield engine
    except DBAPIError as error:
        raise StorageError(f"MLflow's tables cannot be created or upgraded ({format_error(error)})") from None
    finally:
        engine.dispose()


def _upgrade_mlflow(engine: sqlalchemy.Engine, revision: str) -> None:
    from alembic import command
    from mlflow.store.db.utils import _get_alembic_config

    config = _get_alembic_config(str(engine.url))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


OnProgress = Callable[[str], None]

_STUDY_TABLES = ("studies",)
_MLFLOW_TABLES = ("runs", "registered_models")


@dataclass(frozen=True)
class RestoreResult:
    """Result of a restore.

    Attributes:
        manifest: manifest of the backup.
        tracking_uri: address of the MLflow server that has the restored runs; None if unknown.
        external_checkpoints: (name, checkpoint URL) of each study whose checkpoints are outside of the home folder, and
            therefore not in the backup.
        missing_files: number of artifact files whose content is not in the backup, only their index entries.
        unsent_studies: names of the studies with COMPLETE trials whose records had not reached MLflow; `sync STUDY`
            rebuilds the records.
    """

    manifest: Manifest
    tracking_uri: str | None
    external_checkpoints: Sequence[tuple[str, str]]
    missing_files: int
    unsent_studies: Sequence[str]


def restore(  # noqa: PLR0913 a keyword for each flag
    file: Path,
    *,
    owner_url: str | None = None,
    artifacts: str | None = None,
    tracking_uri: str | None = None,
    ui_url: str | None = None,
    home: str | None = None,
    dashboard: Sequence[str],
    progress: OnProgress = lambda _: None,
) -> RestoreResult:
    """Restore a backup into services that contain no studies, runs or registered models.

    Args:
        file: backup file.
        owner_url: owner's URL of the study database of external services, whose MLflow database has the URL in
            MLFLOW_BACKEND_STORE_URI; None to restore into the embedded stack, which is started.
        artifacts: folder of MLflow's artifacts, for external services.
        tracking_uri: address of the external MLflow server; None to keep the stored address.
        ui_url: address of the MLflow server for browsers; None if browsers use the same address.
        home: home folder, with the embedded stack and the checkpoints; None for the default home folder.
        dashboard: command line of the dashboard of the embedded stack.
        progress: callback for progress lines.

    Raises:
        StorageError: the file is damaged or not supported, or the services are not empty (nothing was changed in these
            cases); or a service failed during the restore.
    """
    file = file.expanduser().absolute()
    with ArchiveReader.open(file) as reader:
        manifest = reader.manifest
        check_schema_revisions(manifest)
        programs = find_programs(_parse_major_version(manifest.pg_dump_version), why="the backup")
        folder = prepare_home(home).resolve()
        backup.check_service_options(owner_url, artifacts)
        services = partial(_open_empty_services, folder, owner_url, artifacts, manifest, progress)
        if owner_url is not None or backup.has_stack(folder):
            with services():
                pass  # report a mistake before the file is read
        try:
            with backup.temporary_folder(folder, "restore") as temporary:
                progress(f"reading {file.name}")
                unpacked = reader.unpack(temporary, progress=progress)
                with services() as (locations, held):
                    if held is not None:
                        held.stop_services()
                    external_checkpoints, unsent = _restore_all(unpacked, locations, programs, progress)
        except OSError as error:
            raise StorageError(f"{str(folder)!r} cannot be written ({error}); the restore is incomplete") from None
    if owner_url is None:
        tracking_uri = stack.up(folder, dashboard=dashboard, progress=progress).tracking_uri
        locations = backup.find_embedded_locations(folder, studies_only=not manifest.has_mlflow)
    if tracking_uri is not None:
        with _open_cursors(locations) as (studies, mlflow):
            rewrite_mlflow_urls(studies, mlflow, tracking_uri=tracking_uri, ui_url=ui_url or tracking_uri)
    left_out = sum(not entry.held for entry in unpacked.index)
    return RestoreResult(manifest, tracking_uri, external_checkpoints, left_out, unsent)


def _parse_major_version(version: str) -> int:
    return int(version.split(".", maxsplit=1)[0])


@contextmanager
def _open_empty_services(
    folder: Path, owner_url: str | None, artifacts: str | None, manifest: Manifest, progress: OnProgress
) -> Iterator[tuple[backup.Locations, EmbeddedStack | None]]:
    """Yield the data locations of empty services, and the locked embedded stack (None for external services).

    Raises:
        StorageError: a database is not empty, a server is older than the server of the backup, or the artifact files
            have no local folder.
    """
    studies_only = not manifest.has_mlflow
    with nullcontext() if owner_url is not None else stack.lock(folder, progress=progress) as held:
        if owner_url is None:
            locations = backup.find_embedded_locations(folder, studies_only=studies_only)
        else:
            locations = backup.find_own_locations(folder, owner_url, artifacts=artifacts, studies_only=studies_only)
        if manifest.files and locations.artifacts is None:
            raise StorageError("--artifacts is missing, but the backup has artifacts; give MLflow's artifact folder")
        if manifest.files and locations.artifacts_folder is None:
            raise StorageError(f"--artifacts {artifacts!r} is not a local folder; give a local artifact folder")
        _check_empty(locations, manifest)
        yield locations, held


def _check_empty(locations: backup.Locations, manifest: Manifest) -> None:
    """Check that the databases are empty or contain an interrupted restore, and that their servers are new enough.

    Raises:
        StorageError: a database has rows, or its server is older than the server of the backup.
    """
    found: list[str] = []
    is_partial = False
    for database, tables in ((locations.studies, _STUDY_TABLES), (locations.mlflow, _MLFLOW_TABLES)):
        if database is None:
            continue
        with open_session(*database) as cursor:
            server_version = cursor.connection.server_version // 10_000
            if server_version < _parse_major_version(manifest.postgres_version):
                raise StorageError(
                    f"the backup is from Postgres {manifest.postgres_version}, but the server is "
                    f"Postgres {server_version}; use a server of the same or a newer version"
                )
            is_partial = is_partial or _is_partial_restore(cursor)
            numbers = {table: count_rows(cursor, table) for table in tables}
        found += [f"{table.replace('_', ' ')}: {number}" for table, number in numbers.items() if number]
    if found and not is_partial:
        place = f"--home {str(locations.home)!r}" if locations.is_embedded else redact(locations.studies.url)
        fix = "set --home to another folder" if locations.is_embedded else "give the URLs of empty databases"
        raise StorageError(f"{place} is not empty ({', '.join(found)}), and restore overwrites nothing; {fix}")


def _is_partial_restore(cursor: Any) -> bool:
    """Return whether an earlier restore into this database was interrupted, so that the content may be replaced."""
    cursor.execute(PARTIAL_RESTORE_QUERY)
    return bool(cursor.fetchone()[0])


# MLflow stores each artifact in the folder of a run, model or trace: 7/0123456789abcdef0123456789abcdef/artifacts/x.
_ARTIFACT_PATH = re.compile(r"(^|/)(m-|tr-)?[0-9a-f]{32}/artifacts/.")


def _restore_all(
    unpacked: UnpackedArchive, locations: backup.Locations, programs: Binaries, progress: OnProgress
) -> tuple[Sequence[tuple[str, str]], Sequence[str]]:
    """Restore files, then databases; return `external_checkpoints` and `unsent_studies` of the `RestoreResult`."""
    with open_session(*locations.studies) as cursor:
        again = _is_partial_restore(cursor)
        cursor.execute(f"CREATE SCHEMA IF NOT EXISTS {RESTORE_SCHEMA}")
    files = list(unpacked.iterate_files(archive.CHECKPOINTS))
    moves = [(source, locations.checkpoints / path) for path, source in files if is_checkpoint_path(str(path))]
    if len(moves) < len(files):
        progress(f"skipping {len(files) - len(moves)} files that do not have names of checkpoints")
    if (artifacts := locations.artifacts_folder) is not None:
        files = list(unpacked.iterate_files(archive.ARTIFACTS))
        expected = [(source, artifacts / path) for path, source in files if _ARTIFACT_PATH.search(str(path))]
        if len(expected) < len(files):
            progress(f"skipping {len(files) - len(expected)} files that are not artifacts of a run, model or trace")
        moves += expected
    if not again:
        _check_targets(moves)
    progress(f"restoring {len(moves)} files")
    for source, target in moves:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(source, target)
    _restore_databases(unpacked, locations, programs, progress, again=again)
    with _open_cursors(locations) as (studies, mlflow):
        release_trials(studies)
        mark_restored(studies)
        record_study_ids(studies)
        if mlflow is not None:
            reconcile_databases(studies, mlflow)
        unsent = find_studies_with_unsent_trials(studies) if mlflow is not None else []
        external_checkpoints = remove_home_checkpoint_urls(studies, unpacked.manifest.home)
        studies.execute(f"DROP SCHEMA {RESTORE_SCHEMA}")
    return external_checkpoints, unsent


def _restore_databases(
    unpacked: UnpackedArchive, locations: backup.Locations, programs: Binaries, progress: OnProgress, *, again: bool
) -> None:
    """Restore the rows of both databases, and upgrade the tables; `again` permits to replace rows."""
    manifest = unpacked.manifest
    left_out: list[str] = []
    if locations.mlflow is not None:
        progress("restoring MLflow's database")
        url = locations.mlflow.url
        left_out += restore_rows(
            unpacked.folder / archive.MLFLOW_DUMP,
            locations.mlflow,
            create_tables=partial(create_mlflow_tables, url, str(manifest.mlflow_schema)),
            must_be_empty=() if again else _MLFLOW_TABLES,
            programs=programs,
        )
        upgrade_mlflow(url)
    progress("restoring the studies")
    url, setting = locations.studies
    left_out += restore_rows(
        unpacked.folder / archive.STUDIES_DUMP,
        locations.studies,
        create_tables=partial(create_tables, url, manifest.schema, setting=setting),
        must_be_empty=() if again else _STUDY_TABLES,
        programs=programs,
    )
    migrate(url, setting=setting)
    for table in left_out:
        progress(f"skipping the table {table!r}, which is not a table of hpsearch, Optuna or MLflow")
    with open_session(*locations.studies) as cursor:
        for table, expected in (("studies", manifest.studies), ("trials", manifest.trials)):
            if (found := count_rows(cursor, table)) != expected:
                fault = f"its dump has {found} {table}, its manifest {expected}"
                raise StorageError(f"the backup is damaged ({fault}); give another backup")


def _check_targets(moves: Sequence[tuple[Path, Path]]) -> None:
    """Check that each target does not exist or equals its source; raises StorageError otherwise."""
    for source, target in moves:
        if os.path.lexists(target) and not (target.is_file() and compute_sha256(target) == compute_sha256(source)):
            raise StorageError(f"{str(target)!r} already exists with other content; move this file away")


@contextmanager
def _open_cursors(locations: backup.Locations) -> Iterator[tuple[Any, Any]]:
    """Yield a cursor on the study database and one on MLflow's (None if not included), committed at the end."""
    mlflow_session = open_session(*locations.mlflow) if locations.mlflow else nullcontext()
    with open_session(*locations.studies) as studies, mlflow_session as mlflow:
        yield studies, mlflow


_RUN_PAGE = "/#/experiments/"  # path of a run's page

# Same effect as a worker that releases its trial: no retry is counted, and the next worker resumes the trial. The
# workers of the original database are marked as exited.
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
    """Release the trials that were running at the backup, because their workers do not use the restored database."""
    cursor.execute(_RELEASE)


def mark_restored(cursor: Any) -> None:
    """Mark all studies as restored, so that no command imports their objectives before the user confirms them."""
    cursor.execute(
        """
        INSERT INTO study_user_attributes (study_id, key, value_json)
        SELECT study_id, %s, 'true' FROM study_user_attributes WHERE key = %s
        ON CONFLICT (study_id, key) DO UPDATE SET value_json = excluded.value_json
        """,
        (RESTORED, SPEC),
    )


def record_study_ids(cursor: Any) -> None:
    """Record the ids of all studies, as a trigger does for new studies, because the dump may lack some of them."""
    cursor.execute("INSERT INTO hpsearch_study_ids SELECT study_id FROM studies ON CONFLICT DO NOTHING")


# For trials whose run was completely uploaded to MLflow after the snapshot of the studies.
_RECORD_UPLOADED = """
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


def reconcile_databases(studies: Any, mlflow: Any) -> None:
    """Reconcile the two databases, because the snapshot of MLflow is slightly newer than that of the studies.

    Runs of trials that started between the two snapshots are marked as deleted, because their trial numbers will be
    used again. Runs that ended between the two snapshots are recorded as uploaded, because no worker will send their
    records again.

    Args:
        studies: cursor on the study database.
        mlflow: cursor on MLflow's database.
    """
    studies.execute(
        """
        SELECT r.value_json::jsonb #>> '{}', s.study_name, s.study_id,
               (SELECT count(*) FROM trials t WHERE t.study_id = s.study_id)
          FROM studies s JOIN study_user_attributes r ON r.study_id = s.study_id AND r.key = %s
        """,
        (RUN_ID,),
    )
    # The key includes the study's name, because runs of finalists have the parent run of the search that they retrain.
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
    studies.execute(_RECORD_UPLOADED, {"runs": json.dumps(finished), **keys})


def find_studies_with_unsent_trials(studies: Any) -> list[str]:
    """Return the names of the studies with COMPLETE trials whose records were not in MLflow at the backup."""
    studies.execute(
        """
        SELECT DISTINCT s.study_name
          FROM trials t JOIN studies s USING (study_id) JOIN trial_user_attributes a USING (trial_id)
         WHERE t.state = 'COMPLETE' AND a.key = %s AND starts_with(a.value_json::jsonb #>> '{}', %s)
         ORDER BY s.study_name
        """,
        (TRACKING, PENDING),
    )
    return [str(name) for (name,) in studies.fetchall()]


def rewrite_mlflow_urls(studies: Any, mlflow: Any | None, *, tracking_uri: str, ui_url: str) -> None:
    """Rewrite the stored links to MLflow for the server that has the restored runs.

    Args:
        studies: cursor on the study database.
        mlflow: cursor on MLflow's database; None if it was not restored.
        tracking_uri: address of the MLflow server.
        ui_url: address of the MLflow server for browsers.
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
    if mlflow is not None:  # descriptions of promoted versions; the cast cuts them at MLflow's limit
        columns.append((mlflow, "model_versions", "description", "varchar(5000)"))
    for (base,) in studies.fetchall():
        old = f"{base}{_RUN_PAGE}"
        if not base or old == new:
            continue
        for cursor, table, column, kind in columns:
            cursor.execute(
                f"UPDATE {table} SET {column} = replace({column}::text, %s, %s)::{kind} "  # noqa: S608 constant names
                f"WHERE strpos({column}::text, %s) > 0",
                (old, new, old),
            )


def remove_home_checkpoint_urls(studies: Any, home: str) -> list[tuple[str, str]]:
    """Remove checkpoint URLs in the old home folder, so that their studies use the current home folder.

    Returns:
        (name, checkpoint URL) of each study whose checkpoints are elsewhere.
    """
    urls = [f"{scheme}{home}/checkpoints" for scheme in ("", "file://")]
    studies.execute(
        "DELETE FROM study_user_attributes WHERE key = %s AND rtrim(value_json::jsonb #>> '{}', '/') = ANY(%s)",
        (CHECKPOINT_URL, urls),
    )
    studies.execute(
        "SELECT s.study_name, a.value_json::jsonb #>> '{}' FROM studies s "
        "JOIN study_user_attributes a USING (study_id) WHERE a.key = %s ORDER BY s.study_name",
        (CHECKPOINT_URL,),
    )
    return [(str(name), str(url)) for name, url in studies.fetchall()]
