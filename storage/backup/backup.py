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

from hpsearch.storage.backup import archive
from hpsearch.storage.backup.dumps import Snapshot, snapshot
from hpsearch.storage.database.schema import VERSION_TABLE
from hpsearch.storage.embedded import stack
from hpsearch.storage.embedded.state import FILE
from hpsearch.storage.errors import StorageError
from hpsearch.storage.files import link_or_copy, sha256, sync_folder
from hpsearch.storage.home import VARIABLE, home_dir
from hpsearch.storage.urls import normalise

OWNER_URL = "HPSEARCH_OWNER_URL"
MLFLOW_URL = "MLFLOW_BACKEND_STORE_URI"
_WORKERS_URL = "HPSEARCH_STORAGE_URL"


@dataclass(frozen=True)
class Places:
    """Where things are kept.

    Attributes:
        home: the home folder, with the checkpoints of studies that name no other place.
        embedded: whether the services are those of the home folder.
        studies_url: the database of the studies, as its owner.
        mlflow_url: MLflow's database; None where it is left out.
        artifacts: the folder or URL of MLflow's artifacts; None where it is left out.
    """

    home: Path
    embedded: bool
    studies_url: str
    mlflow_url: str | None
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

    @property
    def studies_setting(self) -> str:
        """What says where the studies are, for messages."""
        return "the embedded Postgres" if self.embedded else OWNER_URL

    @property
    def mlflow_setting(self) -> str:
        """What says where MLflow's database is, for messages."""
        return "the embedded Postgres" if self.embedded else MLFLOW_URL


def own_places(home: Path, owner_url: str, *, artifacts: str | None, studies_only: bool) -> Places:
    """Return the places of one's own services.

    Raises:
        StorageError: MLflow's database is not named, though it is wanted.
    """
    studies = normalise(owner_url, setting=OWNER_URL)
    if studies_only:
        return Places(home, False, studies, None, None)
    if not (given := os.environ.get(MLFLOW_URL)):
        raise StorageError(
            f"{MLFLOW_URL} is not set: it names MLflow's database, as 'serve mlflow' has it; or leave that out with "
            "--studies-only"
        )
    return Places(home, False, studies, normalise(given, setting=MLFLOW_URL), artifacts)


def embedded_places(home: Path, *, studies_only: bool) -> Places:
    """Return the places of the embedded stack of a home folder, which was started."""
    databases = stack.databases(home)
    mlflow = None if studies_only else databases.mlflow_url
    return Places(home, True, databases.owner_url, mlflow, None if studies_only else str(home / "artifacts"))


def chosen_home(home: str | None) -> Path:
    """Return the home folder, created where it is missing."""
    return home_dir(home).resolve()


def has_stack(home: Path) -> bool:
    """Whether a stack was ever started there."""
    return (home / FILE).exists()


def check_choice(owner_url: str | None, artifacts: str | None, *, home: Path, must_exist: bool) -> None:
    """Refuse what would take other services than the user means.

    Raises:
        StorageError: workers use services of one's own, whose owner is not named; or nothing was ever kept here.
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
    if must_exist and not has_stack(home):
        raise StorageError(
            f"{VARIABLE} {str(home)!r} holds no services, and so nothing to back up: set it, or give --home"
        )


_ABANDONED = 24 * 3600.0  # seconds: of one that runs the folder is younger


def sweep(parent: Path, prefix: str) -> None:
    """Remove the folders in `parent` whose names begin so and that nobody can be at any more."""
    for folder in parent.iterdir():
        with suppress(OSError):
            if not folder.name.startswith(prefix):
                continue
            if time.time() - folder.stat().st_mtime > _ABANDONED:
                shutil.rmtree(folder, ignore_errors=True)


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
    folder = chosen_home(home)
    check_choice(owner_url, artifacts, home=folder, must_exist=True)
    if owner_url is None:
        stack.up(folder, dashboard=dashboard, progress=progress)
        where = embedded_places(folder, studies_only=studies_only)
    else:
        where = own_places(folder, owner_url, artifacts=artifacts, studies_only=studies_only)
    if where.mlflow_url is not None and files:
        _check_artifacts(where)  # a mistake is told before anything is read
    try:
        with _workshop(file.parent, file.name) as workshop:
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
def _workshop(parent: Path, name: str) -> Iterator[Path]:
    """Yield a new folder for this user alone, which goes in the end with all that is in it."""
    sweep(parent, f".{name}-")
    folder = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(workshop: Path, where: Places, *, files: bool, progress: Progress) -> archive.Manifest:
    """Write `workshop/archive`."""
    with ExitStack() as stack_:
        studies = stack_.enter_context(snapshot(where.studies_url, setting=where.studies_setting))
        made_at = datetime.now(UTC).isoformat(timespec="seconds")
        _check_tables(studies, where)
        kept = stack_.enter_context(_checkpoints(studies, where))
        dumps = [(archive.STUDIES_DUMP, studies)]
        if where.mlflow_url is not None:
            mlflow = stack_.enter_context(snapshot(where.mlflow_url, setting=where.mlflow_setting))
            dumps.append((archive.MLFLOW_DUMP, mlflow))
            if mlflow.revision("alembic_version") is None:
                raise StorageError(
                    f"{where.mlflow_setting}: there are no tables of MLflow: give the database of its server"
                )
        dumped_by = []
        for name, each in dumps:
            progress("dumping the studies" if each is studies else "dumping MLflow's database")
            dumped_by.append(each.dump(workshop / name).version)
        tracked = dumps[-1][1] if where.mlflow_url is not None else None
        manifest = archive.Manifest(
            made_at=made_at,
            hpsearch=version("hpsearch"),
            postgres=_newest([each.postgres for _, each in dumps]),
            dumped_by=_newest(dumped_by),
            schema=studies.revision(VERSION_TABLE),
            optuna_schema=studies.revision("alembic_version"),
            mlflow_schema=None if tracked is None else tracked.revision("alembic_version"),
            home=str(where.home),
            studies=studies.count("studies"),
            trials=studies.count("trials"),
            runs=0 if tracked is None else tracked.count("runs", "lifecycle_stage = 'active'"),
            models=0 if tracked is None else tracked.count("registered_models"),
            files=files and tracked is not None,
        )
        with archive.writing(workshop / "archive") as writer:
            writer.manifest(manifest)
            for name, _ in dumps:
                writer.file(name, workshop / name)
            for name, path in kept:
                writer.file(archive.CHECKPOINTS + name, path)
            if tracked is not None:
                _add_artifacts(writer, where, files=files, progress=progress)
            writer.index()
    return manifest


def _check_tables(studies: Snapshot, where: Places) -> None:
    if studies.revision(VERSION_TABLE) is None:
        raise StorageError(
            f"{where.studies_setting}: there are no tables of hpsearch: give the database of the studies"
        )


def _newest(versions: list[str]) -> str:
    return max(versions, key=lambda each: [int(part) for part in each.split(".") if part.isdecimal()])


@contextmanager
def _checkpoints(studies: Snapshot, where: Places) -> Iterator[list[tuple[str, Path]]]:
    """Yield the checkpoints that the studies refer to and that lie in the home: path and file.

    They are links, made at once: a trial that goes on meanwhile removes its older checkpoints. One that was faster goes
    on from an earlier one after the restore, or from its beginning. A checkpoint in parts is taken with them.
    """
    names = studies.column("SELECT path FROM hpsearch_checkpoints ORDER BY path")
    with _workshop(where.home, "backup") as folder:
        found: list[tuple[str, Path]] = []
        for name in names:
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
        for name, size in _listed(where.artifacts):
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


def _listed(url: str) -> Iterator[tuple[str, int]]:
    """Yield the files under a URL of fsspec's: path and bytes."""
    from hpsearch.storage.checkpoints.store import Checkpoints

    found = Checkpoints(url, setting="--artifacts").sizes()
    yield from sorted(found.items())
