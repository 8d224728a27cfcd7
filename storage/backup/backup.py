"""Write a backup of studies, MLflow and checkpoints to one file."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from hpsearch.storage.backup import archive
from hpsearch.storage.backup.dumps import count, snapshot
from hpsearch.storage.checkpoints.store import Checkpoints
from hpsearch.storage.database.connect import read_revision
from hpsearch.storage.database.schema import ALEMBIC_TABLE, VERSION_TABLE
from hpsearch.storage.embedded import stack
from hpsearch.storage.embedded.state import FILE
from hpsearch.storage.errors import StorageError
from hpsearch.storage.files import link_or_copy, sha256, sync_folder
from hpsearch.storage.home import VARIABLE, home_dir
from hpsearch.storage.urls import normalise

OWNER_URL = "HPSEARCH_OWNER_URL"
MLFLOW_URL = "MLFLOW_BACKEND_STORE_URI"
_WORKERS_URL = "HPSEARCH_STORAGE_URL"


class Database(NamedTuple):
    """The URL of a database, and where the user gave it, for messages."""

    url: str
    setting: str


@dataclass(frozen=True)
class Places:
    """Where things are kept.

    Attributes:
        home: the home folder, with the checkpoints of studies that name no other place.
        embedded: whether the services are those of the home folder.
        studies: the database of the studies, as its owner.
        mlflow: MLflow's database; None where it is left out.
        artifacts: the folder or URL of MLflow's artifacts; None where it is left out.
    """

    home: Path
    embedded: bool
    studies: Database
    mlflow: Database | None
    artifacts: str | None

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.home / "checkpoints"

    @property
    def artifacts_folder(self) -> Path | None:
        """The folder of MLflow's artifacts; None where they are left out, or in a store that is no folder."""
        path = (self.artifacts or "://").removeprefix("file://")
        return None if "://" in path else Path(path)


def own_places(home: Path, owner_url: str, *, artifacts: str | None, studies_only: bool) -> Places:
    """Return the places of one's own services.

    Raises:
        StorageError: MLflow's database is not named, though it is wanted.
    """
    studies = Database(normalise(owner_url, setting=OWNER_URL), OWNER_URL)
    if studies_only:
        return Places(home, False, studies, None, None)
    if not (given := os.environ.get(MLFLOW_URL)):
        raise StorageError(
            f"{MLFLOW_URL} is not set: it names MLflow's database, as 'serve mlflow' has it; or leave that out with "
            "--studies-only"
        )
    return Places(home, False, studies, Database(normalise(given, setting=MLFLOW_URL), MLFLOW_URL), artifacts)


def embedded_places(home: Path, *, studies_only: bool) -> Places:
    """Return the places of the embedded stack of a home folder, which was started."""
    databases, setting = stack.databases(home), "the embedded Postgres"
    studies = Database(databases.owner_url, setting)
    if studies_only:
        return Places(home, True, studies, None, None)
    return Places(home, True, studies, Database(databases.mlflow_url, setting), str(home / "artifacts"))


def has_stack(home: Path) -> bool:
    """Whether a stack was ever started there."""
    return (home / FILE).exists()


def check_choice(owner_url: str | None, artifacts: str | None) -> None:
    """Reject a choice of the embedded services that the user cannot have meant.

    Raises:
        StorageError: the user names services of their own, but not the owner of their database.
    """
    if owner_url is not None:
        return
    if os.environ.get(_WORKERS_URL):
        raise StorageError(
            f"{_WORKERS_URL} is set and {OWNER_URL} is not: set it to the same database, as its owner, and {MLFLOW_URL}"
        )
    if artifacts is not None:
        raise StorageError(
            f"--artifacts {artifacts!r} is for services of your own, and {OWNER_URL} is not set: "
            "the embedded ones have their own folder"
        )


_ABANDONED = 24 * 3600.0  # seconds: of one that runs the folder is younger


Progress = Callable[[str], None]

_EVERY = 500  # files between two words of progress


@dataclass(frozen=True)
class Made:
    """A backup that was made: where, of what, and its bytes."""

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
    progress: Progress = lambda _: None,
) -> Made:
    """Write all that a search needs to go on elsewhere to one file; searches may run meanwhile.

    Args:
        file: to write, for this user alone; it is there whole, or not at all.
        owner_url: Postgres of the studies, as its owner; MLflow's database is then that of MLFLOW_BACKEND_STORE_URI.
            Without it the embedded stack is backed up.
        artifacts: folder or URL of MLflow's artifacts, for services of one's own.
        files: whether the artifacts' files are to be in it; else their index is.
        studies_only: whether to leave out what MLflow has.
        force: whether a file that is there is replaced.
        home: folder of the embedded stack and of checkpoints; by default the user's.
        dashboard: command of the embedded stack's dashboard.
        progress: is told what is being done, a line at a time.

    Raises:
        StorageError: the file cannot be written, or a service cannot be read.
    """
    file = file.expanduser().absolute()
    _check_target(file, force=force)
    folder = home_dir(home).resolve()
    check_choice(owner_url, artifacts)
    if owner_url is None:
        if not has_stack(folder):
            raise StorageError(
                f"{VARIABLE} {str(folder)!r} holds no services, and so nothing to back up: set it, or give --home"
            )
        stack.up(folder, dashboard=dashboard, progress=progress)
        where = embedded_places(folder, studies_only=studies_only)
    else:
        where = own_places(folder, owner_url, artifacts=artifacts, studies_only=studies_only)
    if where.mlflow is not None and files:
        _check_artifacts(where)  # a mistake is told before anything is read
    try:
        with temporary_folder(file.parent, file.name) as workshop:
            manifest = _write(workshop, where, files=files, progress=progress)
            whole = workshop / "archive"
            size = whole.stat().st_size
            _check_target(file, force=force)
            whole.replace(file)
            sync_folder(file.parent)
    except OSError as error:
        raise StorageError(f"{str(file)!r} cannot be written ({error}): nothing is kept of it") from None
    return Made(file, manifest, size)


def _check_target(file: Path, *, force: bool) -> None:
    try:
        is_there, is_file = os.path.lexists(file), file.is_file()
        in_folder = file.parent.is_dir()
    except OSError as error:  # such as a name that is too long
        raise StorageError(f"{str(file)!r} cannot be written ({error.strerror}): give another file") from None
    if not in_folder or (is_there and not is_file):
        what = "is in a folder that does not exist"
        if in_folder:
            what = "is a folder" if file.is_dir() else "is no regular file"
        raise StorageError(f"{str(file)!r} {what}: give the file to write, such as backup.tar")
    if is_there and not force:
        raise StorageError(f"{str(file)!r} exists: give another file, or --force to replace it")


@contextmanager
def temporary_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yield a new folder for this user alone and delete it at the end; abandoned ones of this name are deleted too."""
    prefix = f".{name}-"
    for folder in parent.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _ABANDONED:
                shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as made:
        yield Path(made)


def _write(workshop: Path, where: Places, *, files: bool, progress: Progress) -> archive.Manifest:
    """Write `workshop/archive`."""
    mlflow, mlflow_schema, runs, models = None, None, 0, 0
    with ExitStack() as opened:
        studies = opened.enter_context(snapshot(*where.studies))
        made_at = datetime.now(UTC).isoformat(timespec="seconds")
        if (schema := read_revision(studies.cursor, VERSION_TABLE)) is None:
            raise StorageError(
                f"{where.studies.setting}: there are no tables of hpsearch: give the database of the studies"
            )
        kept = opened.enter_context(_checkpoints(studies.cursor, where))
        dumps = {archive.STUDIES_DUMP: studies}
        if where.mlflow is not None:
            mlflow = dumps[archive.MLFLOW_DUMP] = opened.enter_context(snapshot(*where.mlflow))
            if (mlflow_schema := read_revision(mlflow.cursor, ALEMBIC_TABLE)) is None:
                raise StorageError(
                    f"{where.mlflow.setting}: there are no tables of MLflow: give the database of its server"
                )
            runs = count(mlflow.cursor, "runs", "lifecycle_stage = 'active'")
            models = count(mlflow.cursor, "registered_models")
        dumped_by = []
        for name, each in dumps.items():
            progress("dumping the studies" if each is studies else "dumping MLflow's database")
            dumped_by.append(each.dump(workshop / name).version)
        manifest = archive.Manifest(
            made_at=made_at,
            hpsearch=version("hpsearch"),
            postgres=_newest([each.postgres for each in dumps.values()]),
            dumped_by=_newest(dumped_by),
            schema=schema,
            optuna_schema=read_revision(studies.cursor, ALEMBIC_TABLE),
            mlflow_schema=mlflow_schema,
            home=str(where.home),
            studies=count(studies.cursor, "studies"),
            trials=count(studies.cursor, "trials"),
            runs=runs,
            models=models,
            files=files and mlflow is not None,
        )
        with archive.writing(workshop / "archive") as writer:
            writer.manifest(manifest)
            for name in dumps:
                writer.file(name, workshop / name)
            for name, path in kept:
                writer.file(archive.CHECKPOINTS + name, path)
            if mlflow is not None:
                _add_artifacts(writer, where, files=files, progress=progress)
            writer.index()
    return manifest


def _newest(versions: list[str]) -> str:
    return max(versions, key=lambda each: [int(part) for part in each.split(".") if part.isdecimal()])


@contextmanager
def _checkpoints(studies: Any, where: Places) -> Iterator[list[tuple[str, Path]]]:
    """Yield the checkpoints that the studies refer to and that lie in the home: path and file.

    They are links, made at once: a trial that goes on meanwhile removes its older checkpoints. One that was faster goes
    on from an earlier one after the restore, or from its beginning. A checkpoint in parts is taken with them.
    """
    studies.execute("SELECT path FROM hpsearch_checkpoints ORDER BY path")
    with temporary_folder(where.home, "backup") as folder:
        found: list[tuple[str, Path]] = []
        for (name,) in studies:
            if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
                continue
            path = where.checkpoints / name
            for each in (path, *path.parent.glob(f"{glob.escape(path.name)}.*")):
                link = folder / str(len(found))
                try:
                    link_or_copy(each, link)
                except FileNotFoundError:
                    continue  # removed since, or in a place of the study's own
                found.append((each.relative_to(where.checkpoints).as_posix(), link))
        yield found


def _check_artifacts(where: Places) -> None:
    """Refuse artifacts whose files are not at hand.

    Raises:
        StorageError: there is no folder of them here.
    """
    if where.artifacts is None:
        raise StorageError(
            "--artifacts is missing: give the folder of MLflow's artifacts, as 'serve mlflow' has it, or --no-artifacts"
        )
    if where.artifacts_folder is None or not (where.artifacts_folder.is_dir() or where.embedded):
        raise StorageError(
            f"--artifacts {where.artifacts!r} is no folder here: give --no-artifacts too, which keeps their index alone"
        )


def _add_artifacts(writer: archive.Writer, where: Places, *, files: bool, progress: Progress) -> None:
    if where.artifacts is None:
        return
    if (folder := where.artifacts_folder) is None:
        for name, size in sorted(Checkpoints(where.artifacts, setting="--artifacts").sizes().items()):
            writer.note(archive.ARTIFACTS + name, size, None)
        return
    doing = f"{'adding' if files else 'listing'} the artifacts"
    progress(doing)
    for number, path in enumerate(_walk(folder), start=1):
        if number % _EVERY == 0:
            progress(f"{doing}: {number} files")
        name = archive.ARTIFACTS + path.relative_to(folder).as_posix()
        if files:
            writer.file(name, path)
            continue
        try:
            writer.note(name, path.stat().st_size, sha256(path))
        except FileNotFoundError:  # somebody removed it
            continue


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the regular files in a folder and below."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink():
                yield path
