"""A study's checkpoints: one folder of its own, tidied up when its trials have ended, removed with the study."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path, PurePosixPath

import sqlalchemy as sa

from hpsearch.search.errors import SearchError
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import CHECKPOINT_URL
from hpsearch.storage.checkpoints.pointers import drop_pointers, read_ended_trials
from hpsearch.storage.checkpoints.store import CheckpointStore, get_checkpoint_path
from hpsearch.storage.database.retry import retrying
from hpsearch.storage.errors import CheckpointStoreError
from hpsearch.storage.files import compute_folder_bytes
from hpsearch.storage.urls import redact

log = logging.getLogger(__name__)

# What only a resumed trial needs of a run directory, and what a death in the middle of writing left there.
_LOCAL = ("last.pt", "previous.pt", "shards", ".*.pt.*.tmp")


def open_checkpoints(study: StoredStudy, home: Path, url: str | None) -> StudyCheckpoints:
    """Return a study's checkpoints: under `url`, else where the study says, else in a folder of the home.

    Raises:
        StorageError: the URL cannot be used.
    """
    given = url or study.attrs.get(CHECKPOINT_URL) or str(home / "checkpoints")
    return StudyCheckpoints(CheckpointStore(given), study.engine, study.study_id, folder=study.folder)


def note_checkpoints(study: StoredStudy, url: str) -> None:
    """Note the URL in the study, so that workers need not be told; one with a password is not noted.

    Raises:
        SearchError: its checkpoints are somewhere else.
    """
    if redact(url) != url:
        return
    url = url if "://" in url else str(Path(url).expanduser().absolute())
    if (kept := study.attrs.get(CHECKPOINT_URL, url)) != url:
        raise SearchError(
            f"--checkpoint-url {url}: the checkpoints of study {study.spec.name!r} are in {kept}: "
            "leave it out to go on with it, or choose another --name"
        )
    study.set_attr(CHECKPOINT_URL, url)


class StudyCheckpoints:
    """The checkpoints of one study.

    Args:
        checkpoints: where they are kept.
        engine: of the study's database.
        study_id: the study.
        folder: of the study's files there; no other study's, whichever database that is in.
    """

    def __init__(self, checkpoints: CheckpointStore, engine: sa.Engine, study_id: int, *, folder: str) -> None:
        self.files = checkpoints
        self.engine = engine
        self.study_id = study_id
        self.folder = folder

    def tidy(self, runs: Path) -> None:
        """Remove what trials that have ended left, such as when their worker died just then.

        Args:
            runs: folder of the study's run directories on this machine.
        """
        try:
            kept, local = self.leftovers(runs)
            self.files.remove(list(kept))
            for path in local:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            retrying()(drop_pointers, self.engine, self.study_id)
        except (CheckpointStoreError, OSError) as error:
            log.warning("checkpoints of trials that have ended stay for now: %s", error)

    def leftovers(self, runs: Path) -> tuple[dict[str, int], dict[Path, int]]:
        """Return what trials that have ended left: files of the store, and of `runs` here, each with its bytes.

        Raises:
            CheckpointStoreError: the store does not answer.
        """
        found = self.files.sizes(self.folder)  # before the database is asked: a trial may be tried again
        local = [path for name in _LOCAL for path in runs.glob(f"*/{name}")]
        numbers = {_number(path) for path in [*found, *map(str, local)]}
        over = retrying()(read_ended_trials, self.engine, self.study_id, numbers) if numbers else {}
        return (
            {
                path: size
                for path, size in found.items()
                if (number := _number(path)) in over and get_checkpoint_path(path) not in over[number]
            },
            {path: size for path in local if _number(str(path)) in over and (size := _size(path)) is not None},
        )

    def forget_trial(self, number: int) -> None:
        """Remove the checkpoints of a COMPLETE or PRUNED trial that MLflow has all of.

        The pointers go last, so that whoever tidies up after a death in between knows of the files.
        """
        try:
            self.files.remove_folder(f"{self.folder}/{number:04d}")
        except CheckpointStoreError as error:
            log.warning("trial %d: its checkpoints stay for now: %s", number, error)
            return
        retrying()(drop_pointers, self.engine, self.study_id, number=number)

    def forget(self) -> None:
        """Remove all files of the study, which is being deleted.

        Raises:
            CheckpointStoreError: the store does not answer.
        """
        self.files.remove_folder(self.folder)


def _size(path: Path) -> int | None:
    """The bytes of a file, or of a folder's; None where another worker removed it meanwhile."""
    try:
        return compute_folder_bytes(path) if path.is_dir() else path.stat().st_size
    except FileNotFoundError:
        return None


def _number(path: str) -> int:
    """The trial's number in ``STUDY/0007/0004-1.pt`` or ``STUDY/0007-2/last.pt``; -1 for a file of another kind."""
    number = PurePosixPath(path).parent.name.partition("-")[0]
    return int(number) if number.isdecimal() else -1
