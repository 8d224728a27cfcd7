"""Write a backup of studies, MLflow and checkpoints to one file."""

from __future__ import annotations

import glob
import os
import shutil
import stat
import tarfile
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NamedTuple

from hpsearch.storage.backup import archive
from hpsearch.storage.backup.dumps import count_rows, open_snapshot
from hpsearch.storage.checkpoints.store import CheckpointStore, is_checkpoint_path
from hpsearch.storage.database.connect import read_revision
from hpsearch.storage.database.schema import ALEMBIC_TABLE, VERSION_TABLE
from hpsearch.storage.embedded import stack
from hpsearch.storage.errors import StorageError, format_os_error, suggest_disk_remedy
from hpsearch.storage.files import compute_sha256, fsync_folder, link_or_copy
from hpsearch.storage.home import HOME_VARIABLE, STATE_FILE, prepare_home
from hpsearch.storage.replacement import create_file, open_parent, remove_file, stat_file
from hpsearch.storage.urls import normalise_url

OWNER_URL = "HPSEARCH_OWNER_URL"
MLFLOW_URL = "MLFLOW_BACKEND_STORE_URI"
_WORKERS_URL = "HPSEARCH_STORAGE_URL"


class DatabaseLocation(NamedTuple):
    """URL of a database, and the name of the setting that contains the URL, for messages."""

    url: str
    setting: str


@dataclass(frozen=True)
class Locations:
    """Locations of the data of a backup.

    Attributes:
        home: home folder; it contains the checkpoints of all studies that have no other checkpoint URL.
        is_embedded: whether the services belong to the embedded stack of the home folder.
        studies: database of the studies, with the owner's URL.
        mlflow: MLflow's database; None if it is not included.
        artifacts: folder or URL of MLflow's artifacts; None if they are not included.
    """

    home: Path
    is_embedded: bool
    studies: DatabaseLocation
    mlflow: DatabaseLocation | None
    artifacts: str | None

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.home / "checkpoints"

    @property
    def artifacts_folder(self) -> Path | None:
        """Folder of MLflow's artifacts; None if the artifacts are not included, or not in a local folder."""
        path = (self.artifacts or "://").removeprefix("file://")
        return None if "://" in path else Path(path)


def find_own_locations(home: Path, owner_url: str, *, artifacts: str | None, studies_only: bool) -> Locations:
    """Return the locations of the data of external services.

    Raises:
        StorageError: MLflow is included, and the URL of its database is not set.
    """
    studies = DatabaseLocation(normalise_url(owner_url, setting=OWNER_URL), OWNER_URL)
    if studies_only:
        return Locations(home, False, studies, None, None)
    if not (given := os.environ.get(MLFLOW_URL)):
        raise StorageError(f"{MLFLOW_URL} is not set; set it to the URL of MLflow's database, or give --studies-only")
    mlflow = DatabaseLocation(normalise_url(given, setting=MLFLOW_URL), MLFLOW_URL)
    return Locations(home, False, studies, mlflow, artifacts)


def find_embedded_locations(home: Path, *, studies_only: bool) -> Locations:
    """Return the locations of the data of an existing embedded stack."""
    databases, setting = stack.read_urls(home), "the embedded Postgres"
    studies = DatabaseLocation(databases.owner_url, setting)
    if studies_only:
        return Locations(home, True, studies, None, None)
    return Locations(home, True, studies, DatabaseLocation(databases.mlflow_url, setting), str(home / "artifacts"))


def has_stack(home: Path) -> bool:
    """Return whether the folder has an embedded stack."""
    return (home / STATE_FILE).exists()


def check_service_options(owner_url: str | None, artifacts: str | None) -> None:
    """Check that settings of external services are complete.

    Without the owner's URL, the embedded services are used. Another setting of external services is then a mistake.

    Raises:
        StorageError: the owner's URL is missing, and another setting of external services is present.
    """
    if owner_url is not None:
        return
    if os.environ.get(_WORKERS_URL):
        raise StorageError(f"{_WORKERS_URL} is set, but {OWNER_URL} is not; set {OWNER_URL} and {MLFLOW_URL} too")
    if artifacts is not None:
        raise StorageError(
            f"--artifacts {artifacts!r} needs external services; set {OWNER_URL}, or remove --artifacts "
            "to use the artifact folder of the embedded services"
        )


_ABANDONED_SECONDS = 24 * 3600.0  # age of a folder whose process is certainly gone


OnProgress = Callable[[str], None]

_FILES_PER_PROGRESS_LINE = 500


@dataclass(frozen=True)
class BackupResult:
    """Result of a backup: file, manifest, and size in bytes."""

    path: Path
    manifest: archive.Manifest
    size: int


def backup(  # noqa: PLR0913 a keyword for each flag
    file: Path,
    *,
    owner_url: str | None = None,
    artifacts: str | None = None,
    files: bool = True,
    studies_only: bool = False,
    force: bool = False,
    home: str | None = None,
    dashboard: Sequence[str],
    progress: OnProgress = lambda _: None,
) -> BackupResult:
    """Back up studies, MLflow and checkpoints to one file; searches may run meanwhile.

    Args:
        file: file to write, with mode 0600; it appears only when it is complete.
        owner_url: owner's URL of the study database of external services, whose MLflow database has the URL in
            MLFLOW_BACKEND_STORE_URI; None to back up the embedded stack.
        artifacts: folder or URL of MLflow's artifacts, for external services.
        files: whether to include the artifact files; otherwise the backup contains only their index entries.
        studies_only: whether to exclude the data of MLflow.
        force: whether to replace an existing file.
        home: home folder, with the embedded stack and the checkpoints; None for the default home folder.
        dashboard: command line of the dashboard of the embedded stack.
        progress: callback for progress lines.

    Raises:
        StorageError: the file cannot be written, or the data of a service cannot be read.
    """
    file = file.expanduser().absolute()
    with ExitStack() as opened:
        with _explain_target_errors(file):
            parent, name = opened.enter_context(open_parent(file))
            _check_target(file, parent, name, force=force)
        folder = prepare_home(home).resolve()
        check_service_options(owner_url, artifacts)
        if owner_url is None:
            if not has_stack(folder):
                fault = f"{HOME_VARIABLE} {str(folder)!r} contains no embedded services"
                raise StorageError(f"{fault}; give another --home")
            stack.up(folder, dashboard=dashboard, progress=progress)
            locations = find_embedded_locations(folder, studies_only=studies_only)
        else:
            locations = find_own_locations(folder, owner_url, artifacts=artifacts, studies_only=studies_only)
        if locations.mlflow is not None and files:
            _check_artifacts(locations)  # report a mistake before the backup starts
        with _explain_target_errors(file):
            temporary_name = _make_temporary_name(name, parent)
            opened.callback(remove_file, temporary_name, parent)
            with create_file(temporary_name, parent) as temporary:
                manifest = _write_archive(temporary, parent, temporary_name, locations, files=files, progress=progress)
                size = os.fstat(temporary.fileno()).st_size
            _check_target(file, parent, name, force=force)
            os.replace(temporary_name, name, src_dir_fd=parent, dst_dir_fd=parent)
            fsync_folder(file.parent)
    return BackupResult(file, manifest, size)


@contextmanager
def _explain_target_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) and not file.parent.is_dir():
            fault = f"{str(file)!r} is in a folder that does not exist"
            raise StorageError(f"{fault}; give the path of a new file, such as backup.tar") from None
        remedy = suggest_disk_remedy(error, "give another path")
        why = format_os_error(error)
        raise StorageError(f"{str(file)!r} cannot be written ({why}); no backup was made; {remedy}") from None


def _check_target(file: Path, folder: int, name: str, *, force: bool) -> None:
    if (status := stat_file(name, folder)) is None:
        return
    if not stat.S_ISREG(status.st_mode):
        fault = "is a folder" if stat.S_ISDIR(status.st_mode) else "is not a regular file"
        raise StorageError(f"{str(file)!r} {fault}; give the path of a new file, such as backup.tar")
    if not force:
        raise StorageError(f"{str(file)!r} already exists; give another path, or --force to replace the file")
    with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder), "rb") as existing:
        if not tarfile.is_tarfile(existing):
            raise StorageError(f"{str(file)!r} is not a backup, so --force does not replace it; give another path")


@contextmanager
def temporary_folder(home: Path, name: str) -> Iterator[Path]:
    """Yield a new private folder in the home, and delete it at the end; first delete those that dead processes left."""
    prefix = f".{name}-hpsearch-"
    for folder in home.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=home, ignore_cleanup_errors=True) as folder_name:
        yield Path(folder_name)


def _make_temporary_name(name: str, folder: int) -> str:
    """Return a name for a temporary file in an open folder, and remove such files that dead processes left there."""
    prefix = f".{name}-hpsearch-"
    with suppress(OSError):  # a folder whose entries this user may not list
        listed = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
        try:
            found = [entry for entry in os.listdir(listed) if entry.startswith(prefix)]  # noqa: PTH208 a descriptor
        finally:
            os.close(listed)
        for entry in found:
            status = stat_file(entry, folder)
            if status is not None and time.time() - status.st_mtime > _ABANDONED_SECONDS:
                with suppress(OSError):  # a folder, or a file of another user
                    remove_file(entry, folder)
    return f"{prefix}{uuid.uuid4().hex[:8]}"


def _write_archive(
    file: IO[bytes], folder: int, temporary_name: str, locations: Locations, *, files: bool, progress: OnProgress
) -> archive.Manifest:
    """Write the archive to an open file, and return its manifest.

    Args:
        file: file to write to.
        folder: open folder for temporary files.
        temporary_name: beginning of the names of temporary files.
        locations: locations of the data.
        files: whether to include the artifact files.
        progress: callback for progress lines.
    """
    mlflow, mlflow_schema, runs, models = None, None, 0, 0
    with ExitStack() as opened:
        studies = opened.enter_context(open_snapshot(*locations.studies))
        made_at = datetime.now(UTC).isoformat(timespec="seconds")
        if (schema := read_revision(studies.cursor, VERSION_TABLE)) is None:
            raise StorageError(f"{locations.studies.setting}: no hpsearch tables; give the URL of the studies")
        kept = opened.enter_context(_link_checkpoints(studies.cursor, locations))
        snapshots = {archive.STUDIES_DUMP: studies}
        if locations.mlflow is not None:
            mlflow = snapshots[archive.MLFLOW_DUMP] = opened.enter_context(open_snapshot(*locations.mlflow))
            if (mlflow_schema := read_revision(mlflow.cursor, ALEMBIC_TABLE)) is None:
                raise StorageError(
                    f"{locations.mlflow.setting}: the database has no MLflow tables; give the URL of MLflow's database"
                )
            runs = count_rows(mlflow.cursor, "runs", "lifecycle_stage = 'active'")
            models = count_rows(mlflow.cursor, "registered_models")
        dumped_by, dumps = [], {}
        for name, each in snapshots.items():
            progress("dumping the studies" if each is studies else "dumping MLflow's database")
            dumps[name] = opened.enter_context(create_file(f"{temporary_name}-{name}", folder))
            opened.callback(remove_file, f"{temporary_name}-{name}", folder)
            dumped_by.append(each.dump(dumps[name]).version)
        manifest = archive.Manifest(
            made_at=made_at,
            hpsearch_version=version("hpsearch"),
            postgres_version=_max_version([each.server_version for each in snapshots.values()]),
            pg_dump_version=_max_version(dumped_by),
            schema=schema,
            optuna_schema=read_revision(studies.cursor, ALEMBIC_TABLE),
            mlflow_schema=mlflow_schema,
            home=str(locations.home),
            studies=count_rows(studies.cursor, "studies"),
            trials=count_rows(studies.cursor, "trials"),
            runs=runs,
            models=models,
            files=files and mlflow is not None,
        )
        with archive.create_archive(file) as writer:
            writer.write_manifest(manifest)
            for name, dump in dumps.items():
                writer.add_open_file(name, dump)
            for name, path in kept:
                writer.add_file(archive.CHECKPOINTS + name, path)
            if mlflow is not None:
                _add_artifacts(writer, locations, files=files, progress=progress)
            writer.write_index()
    return manifest


def _max_version(versions: list[str]) -> str:
    return max(versions, key=lambda each: [int(part) for part in each.split(".") if part.isdecimal()])


@contextmanager
def _link_checkpoints(studies: Any, locations: Locations) -> Iterator[list[tuple[str, Path]]]:
    """Yield (relative path, hard link) for each valid checkpoint in the home folder, shards included.

    All links are created before the archive is written, because running trials delete their older checkpoints. If a
    checkpoint is deleted before its link is created, the trial resumes from an earlier checkpoint after the restore,
    or restarts.
    """
    studies.execute("SELECT DISTINCT path FROM hpsearch_checkpoints ORDER BY path")
    with temporary_folder(locations.home, "backup") as folder:
        found: list[tuple[str, Path]] = []
        for (name,) in studies:
            if not is_checkpoint_path(name):  # any worker can write paths
                continue
            path = locations.checkpoints / name
            for each in (path, *path.parent.glob(f"{glob.escape(path.name)}.*")):
                link = folder / str(len(found))
                try:
                    link_or_copy(each, link)
                except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                    continue  # deleted after the query, or stored at another checkpoint URL
                found.append((each.relative_to(locations.checkpoints).as_posix(), link))
        yield found


def _check_artifacts(locations: Locations) -> None:
    """Check that the artifacts are in a local folder.

    Raises:
        StorageError: the location of the artifacts is missing, or is not a local folder.
    """
    if locations.artifacts is None:
        raise StorageError("--artifacts is missing; give the folder of MLflow's artifacts, or --no-artifacts")
    if locations.artifacts_folder is None or not (locations.artifacts_folder.is_dir() or locations.is_embedded):
        raise StorageError(f"--artifacts {locations.artifacts!r} is not a local folder; give one, or --no-artifacts")


def _add_artifacts(writer: archive.ArchiveWriter, locations: Locations, *, files: bool, progress: OnProgress) -> None:
    if locations.artifacts is None:
        return
    if (folder := locations.artifacts_folder) is None:
        for name, size in sorted(CheckpointStore(locations.artifacts, setting="--artifacts").sizes().items()):
            writer.add_index_entry(archive.ARTIFACTS + name, size, None)
        return
    action = f"{'adding' if files else 'listing'} the artifacts"
    progress(action)
    for number, path in enumerate(_walk(folder), start=1):
        if number % _FILES_PER_PROGRESS_LINE == 0:
            progress(f"{action}: {number} files")
        name = archive.ARTIFACTS + path.relative_to(folder).as_posix()
        if files:
            writer.add_file(name, path)
            continue
        try:
            writer.add_index_entry(name, path.stat().st_size, compute_sha256(path))
        except FileNotFoundError:  # the file was deleted after it was listed
            continue


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the regular files below a folder."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink():
                yield path
