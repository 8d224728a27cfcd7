"""Restore of a backup into empty services."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpsearch.redaction import redact
from hpsearch.storage.backup import archive, backup
from hpsearch.storage.backup.adapt import (
    delete_acting_rows,
    find_studies_with_unsent_trials,
    list_study_folders,
    mark_restored,
    reconcile_databases,
    record_study_ids,
    release_trials,
    remove_home_checkpoint_urls,
    repair_attributes,
    replace_artifact_locations,
    rewrite_mlflow_urls,
)
from hpsearch.storage.backup.archive import ArchiveReader, Manifest, UnpackedArchive
from hpsearch.storage.backup.dumps import count_rows, find_programs, open_session
from hpsearch.storage.backup.mlflow_tables import create_mlflow_tables, list_mlflow_tables, upgrade_mlflow
from hpsearch.storage.backup.rows import find_other_relations, restore_rows
from hpsearch.storage.checkpoints.store import is_checkpoint_path
from hpsearch.storage.database.migrate import (
    MIGRATIONS,
    check_foreign_code,
    create_tables,
    list_revisions,
    migrate,
    protect_schema,
)
from hpsearch.storage.database.schema import (
    ALEMBIC_TABLE,
    OPTUNA_REVISION,
    OPTUNA_TABLES,
    OWN_TABLES,
    PARTIAL_RESTORE_QUERY,
    RESTORE_SCHEMA,
    REVISION_TABLES,
    STUDY_IDS_TABLE,
)
from hpsearch.storage.embedded import stack
from hpsearch.storage.embedded.postgres_binaries import Binaries
from hpsearch.storage.embedded.services import EmbeddedStack
from hpsearch.storage.errors import StorageError, suggest_disk_remedy
from hpsearch.storage.files import compute_sha256, normalize_case
from hpsearch.storage.home import STUDY_FOLDERS, prepare_home
from hpsearch.storage.mlflow.locations import ARTIFACT_PATH


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


OnProgress = Callable[[str], None]

_STUDY_TABLES: tuple[str, ...] = ("studies",)
_MLFLOW_TABLES = ("runs", "registered_models")
# Condition for the rows that MLflow does not create by itself, per table.
_INITIAL_ROWS = {ALEMBIC_TABLE: "false", "experiments": "experiment_id <> 0", "workspaces": "name <> 'default'"}


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
            remedy = suggest_disk_remedy(error, "set another home folder")
            fault = f"{str(folder)!r} cannot be written ({error}); the restore is incomplete"
            raise StorageError(f"{fault}; {remedy}, and repeat the command") from None
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
        for database in filter(None, (locations.studies, locations.mlflow)):
            check_foreign_code(*database)
        _check_empty(locations, manifest)
        yield locations, held


def _check_empty(locations: backup.Locations, manifest: Manifest) -> None:
    """Check that the databases are empty or contain an interrupted restore, and that their servers are new enough.

    Raises:
        StorageError: a database has rows or tables of another program, or its server is older than the server of the
            backup.
    """
    found: list[str] = []
    is_partial = True  # MLflow's database only if the database of the studies is; MLFLOW_BACKEND_STORE_URI may be wrong
    own = {*OPTUNA_TABLES, *OWN_TABLES, *REVISION_TABLES, STUDY_IDS_TABLE}
    databases = [(locations.studies, _STUDY_TABLES, own)]
    if locations.mlflow is not None:
        known = list_mlflow_tables()
        databases.append((locations.mlflow, (*_MLFLOW_TABLES, *sorted(known)), known))
    for database, tables, known in databases:
        with open_session(*database) as cursor:
            server_version = cursor.connection.server_version // 10_000
            if server_version < _parse_major_version(manifest.postgres_version):
                raise StorageError(
                    f"the backup is from Postgres {manifest.postgres_version}, but the server is "
                    f"Postgres {server_version}; use a server of the same or a newer version"
                )
            is_partial = is_partial and _is_partial_restore(cursor)
            if is_partial:
                continue
            numbers = {table: count_rows(cursor, table, _INITIAL_ROWS.get(table, "true")) for table in tables}
            found += [f"{table.replace('_', ' ')}: {number}" for table, number in numbers.items() if number][:2]
            found += [f"table of another program: {table}" for table in find_other_relations(cursor, known)[:1]]
    if found:
        place = f"--home {str(locations.home)!r}" if locations.is_embedded else redact(locations.studies.url)
        fix = "set --home to another folder" if locations.is_embedded else "give the URLs of empty databases"
        raise StorageError(f"{place} is not empty ({', '.join(found)}), and restore overwrites nothing; {fix}")


def _is_partial_restore(cursor: Any) -> bool:
    """Return whether an earlier restore into this database was interrupted, so that the content may be replaced."""
    cursor.execute(PARTIAL_RESTORE_QUERY)
    return bool(cursor.fetchone()[0])


def _restore_all(
    unpacked: UnpackedArchive, locations: backup.Locations, programs: Binaries, progress: OnProgress
) -> tuple[Sequence[tuple[str, str]], Sequence[str]]:
    """Restore files, then databases; return `external_checkpoints` and `unsent_studies` of the `RestoreResult`."""
    for database in filter(None, (locations.studies, locations.mlflow)):
        for warning in protect_schema(*database):
            progress(f"warning: {warning}")
    with _open_cursors(locations) as cursors:
        marks = [cursor is None or _is_partial_restore(cursor) for cursor in cursors]
        for cursor in filter(None, cursors):
            cursor.execute(f"CREATE SCHEMA IF NOT EXISTS {RESTORE_SCHEMA}")
        used = _list_used_folders(cursors[0], locations, is_partial=marks[0])
    files = list(unpacked.iterate_files(archive.CHECKPOINTS))
    moves = [(source, locations.checkpoints / path) for path, source in files if is_checkpoint_path(str(path))]
    folders = {path.parts[0] for path, _ in files}
    if len(moves) < len(files):
        progress(f"skipping {len(files) - len(moves)} files that do not have names of checkpoints")
    if (artifacts := locations.artifacts_folder) is not None:
        files = list(unpacked.iterate_files(archive.ARTIFACTS))
        expected = [(source, artifacts / path) for path, source in files if ARTIFACT_PATH.search(str(path))]
        if len(expected) < len(files):
            progress(f"skipping {len(files) - len(expected)} files that are not artifacts of a run, model or trace")
        moves += expected
    if not all(marks):
        _check_targets(moves)
    _check_unused_folders(folders, used)
    progress(f"restoring {len(moves)} files")
    for source, target in moves:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(source, target)
    flags = {"replace_studies": marks[0], "replace_mlflow": all(marks)}
    _restore_databases(unpacked, locations, programs, progress, used=used, **flags)
    with _open_cursors(locations) as (studies, mlflow):
        repair_attributes(studies)
        release_trials(studies)
        mark_restored(studies)
        record_study_ids(studies)
        if mlflow is not None:
            reconcile_databases(studies, mlflow)
        unsent = find_studies_with_unsent_trials(studies) if mlflow is not None else []
        external_checkpoints = remove_home_checkpoint_urls(studies, unpacked.manifest.home)
    # Without the mark of the studies, the restore is complete, and the mark of MLflow's database has no effect.
    for database in filter(None, (locations.studies, locations.mlflow)):
        with open_session(*database) as cursor:
            cursor.execute(f"DROP SCHEMA {RESTORE_SCHEMA}")
    return external_checkpoints, unsent


def _restore_databases(
    unpacked: UnpackedArchive,
    locations: backup.Locations,
    programs: Binaries,
    progress: OnProgress,
    *,
    used: Sequence[Path],
    replace_studies: bool,
    replace_mlflow: bool,
) -> None:
    """Restore the rows of both databases, and upgrade the tables; the flags permit to replace rows.

    `used` are the folders of studies in the home before the restore.
    """
    manifest = unpacked.manifest
    left_out: list[str] = []
    if locations.mlflow is not None:
        progress("restoring MLflow's database")
        url = locations.mlflow.url

        def adapt(cursor: Any) -> None:
            delete_acting_rows(cursor)
            if replaced := replace_artifact_locations(cursor):
                progress(f"replaced {replaced} artifact locations by the artifact proxy of the MLflow server")

        left_out += restore_rows(
            unpacked.folder / archive.MLFLOW_DUMP,
            locations.mlflow,
            create_tables=partial(create_mlflow_tables, url, str(manifest.mlflow_schema)),
            must_be_empty=() if replace_mlflow else _MLFLOW_TABLES,
            programs=programs,
            adapt=adapt,
        )
        upgrade_mlflow(url)
        with open_session(*locations.mlflow) as cursor:
            adapt(cursor)  # the upgrade may have created columns with locations
    progress("restoring the studies")
    url, setting = locations.studies
    left_out += restore_rows(
        unpacked.folder / archive.STUDIES_DUMP,
        locations.studies,
        create_tables=partial(create_tables, url, manifest.schema, setting=setting),
        must_be_empty=() if replace_studies else _STUDY_TABLES,
        programs=programs,
        adapt=lambda cursor: _check_unused_folders(list_study_folders(cursor), used),
    )
    for warning in migrate(url, setting=setting):
        progress(f"warning: {warning}")
    for table in left_out:
        progress(f"skipping the table {table!r}, which is not a table of hpsearch, Optuna or MLflow")
    with open_session(*locations.studies) as cursor:
        for table, expected in (("studies", manifest.studies), ("trials", manifest.trials)):
            if (found := count_rows(cursor, table)) != expected:
                fault = f"its dump has {found} {table}, its manifest {expected}"
                raise StorageError(f"the backup is damaged ({fault}); give another backup")


def _list_used_folders(studies: Any, locations: backup.Locations, *, is_partial: bool) -> list[Path]:
    """Return the folders of studies that the home had before the restore.

    After an interrupted restore, the names of the folders that existed before it are read from the comment on its
    schema.
    """
    names = {path.name for path in locations.checkpoints.glob("*")}
    if is_partial:
        studies.execute(f"SELECT obj_description('{RESTORE_SCHEMA}'::regnamespace)")
        (comment,) = studies.fetchone()
        names &= set(json.loads(comment or "[]"))
    else:
        studies.execute(f"COMMENT ON SCHEMA {RESTORE_SCHEMA} IS %s", (json.dumps(sorted(names)),))
    used = [locations.checkpoints / name for name in names]
    return used + [path for kind in STUDY_FOLDERS for path in (locations.home / kind).glob("*")]


def _check_unused_folders(names: Iterable[str], used: Sequence[Path]) -> None:
    """Check that no folder in the home has the name of a folder of a restored study; raises StorageError otherwise.

    It belongs to the original, which may still exist in another database: `delete` of the restored study would remove
    its files.
    """
    restored = set(map(normalize_case, names))
    for folder in sorted(used):
        if normalize_case(folder.name) in restored:
            raise StorageError(
                f"{str(folder)!r} has files of a study with the same folder, perhaps in another database; "
                "set --home to another folder, or move the files away if that database no longer exists"
            )


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
