"""Checkpoints of a study, which are stored in one folder. They are removed after trials end, or with the study."""

from __future__ import annotations

import logging
import re
import shlex
import shutil
from collections.abc import Collection
from pathlib import Path, PurePosixPath

import sqlalchemy as sa

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.custom_loop.loop_objective import LoopObjective
from hpsearch.objectives.references import BUILTIN
from hpsearch.redaction import redact
from hpsearch.search.console import format_command
from hpsearch.search.errors import SearchError
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import CHECKPOINT_URL, RESTORED_CHECKPOINTS
from hpsearch.storage.checkpoints.pointers import drop_pointers, find_referenced_paths, read_ended_trials, read_pointers
from hpsearch.storage.checkpoints.store import (
    CheckpointStore,
    StoredFile,
    get_checkpoint_path,
    is_below,
    is_checkpoint_path,
    is_removable_path,
)
from hpsearch.storage.database.retry import retrying
from hpsearch.storage.errors import CheckpointStoreError, StorageError
from hpsearch.storage.files import compute_folder_bytes

log = logging.getLogger(__name__)

# Files of a run directory that only a resumed trial needs, and temporary files of interrupted writes.
_RESUME_FILES = ("last.pt", "previous.pt", "shards", ".*.pt.*.tmp", ".config.yaml.tmp", ".changes.diff.tmp")


def open_checkpoints(study: StoredStudy, home: Path, url: str | None) -> StudyCheckpoints:
    """Return a study's checkpoints, which are at `url`, or else at the study's stored URL, or else in the home folder.

    Raises:
        SearchError: the stored URL is invalid.
        StorageError: the URL cannot be used.
    """
    stored, confirmation = read_checkpoint_url(study), None
    if study.attrs.get(RESTORED_CHECKPOINTS):
        confirmation = f"confirm the restored study with: {format_command('trust', study.spec.name)}"
    elif url is None and stored is not None and not _is_in_home(stored, home):
        confirmation = f"add --checkpoint-url {shlex.quote(stored)}"
    return StudyCheckpoints(
        CheckpointStore(url or stored or str(home / "checkpoints")),
        study.engine,
        study.study_id,
        folder=study.folder,
        are_shared=study.spec.pruner.shares_checkpoints,
        confirmation=confirmation,
    )


def _is_in_home(stored: str, home: Path) -> bool:
    return is_below(stored, str(home / "checkpoints"))


def check_checkpoint_url(study: StoredStudy, objective: BaseObjective, home: Path, url: str | None) -> None:
    """Check that a custom training loop may load checkpoints from the stored URL of its study.

    A custom training loop may load its checkpoints with a library that unpickles them, such as DeepSpeed. Every
    worker's database role can write the stored URL, also by deleting the study and creating it again. So for a custom
    loop of the user, the stored URL must be that of the command, or below the home folder's checkpoints.

    Args:
        study: the study.
        objective: objective of the study.
        home: home folder.
        url: checkpoint URL of the command; None if the command was not given one.

    Raises:
        SearchError: the stored URL is elsewhere, or invalid.
    """
    stored = read_checkpoint_url(study)
    may_unpickle = isinstance(objective, LoopObjective) and study.spec.objective not in BUILTIN
    if may_unpickle and url is None and stored is not None and not _is_in_home(stored, home):
        raise SearchError(
            f"the checkpoints of study {study.spec.name!r} are at {stored!r}, an address that only the database names, "
            "and the training loop of its objective may run code in them; if you trust this address, add "
            f"--checkpoint-url {shlex.quote(stored)}"
        )


def read_checkpoint_url(study: StoredStudy) -> str | None:
    """Return the study's stored checkpoint URL; None if there is none.

    Raises:
        SearchError: the stored URL is not one that hpsearch writes, such as ``~/FOLDER`` or a chain of URLs.
    """
    if (stored := study.attrs.get(CHECKPOINT_URL)) is None:
        return None
    path = str(stored).removeprefix("file://")
    if "::" in path or not ("://" in path or path.startswith("/")):
        raise SearchError(
            f"study {study.spec.name!r} has the checkpoint URL {str(stored)!r}, which is neither an absolute path nor "
            "a URL; give --checkpoint-url"
        )
    return str(stored)


def find_checkpoint_warning(study: StoredStudy, url: str | None) -> str | None:
    """Return a warning if a worker's checkpoint URL is not that of the other workers; None if it may be."""
    stored = study.attrs.get(CHECKPOINT_URL)
    if url is None or redact(url) != url or _normalize(url) == stored:  # a URL with a password is not stored
        return None
    place = "in the home folder" if stored is None else f"at {redact(str(stored))}"
    return (
        f"--checkpoint-url {url}: the checkpoints of study {study.spec.name!r} are {place}; remove the option if these "
        "are two places, between which workers cannot resume trials"
    )


def _normalize(url: str) -> str:
    return url if "://" in url else str(Path(url).expanduser().absolute())


def open_removable_checkpoints(study: StoredStudy, home: Path, url: str | None) -> StudyCheckpoints:
    """Return a study's checkpoints for a command that removes them.

    Every worker's database role can write the stored URL. So it must be below `url`, or below the home folder's
    checkpoints.

    Args:
        study: the study.
        home: home folder.
        url: checkpoint URL of the command; None if the command was not given one.

    Raises:
        SearchError: the stored URL is elsewhere.
        StorageError: the URL cannot be used.
    """
    default, stored = str(home / "checkpoints"), read_checkpoint_url(study)
    if stored is not None and not any(is_below(stored, root) for root in (url, default) if root):
        raise SearchError(
            f"the checkpoints of study {study.spec.name!r} are at {stored!r}, an address that only the database "
            f"names; to remove them, add --checkpoint-url {shlex.quote(stored)}"
        )
    return open_checkpoints(study, home, stored or url or default)  # the stored URL may have changed since the check


def store_checkpoint_url(study: StoredStudy, url: str) -> None:
    """Store the checkpoint URL in the study, so that workers need no option; do nothing if it contains a password.

    Raises:
        SearchError: the study has another URL.
    """
    if redact(url) != url:
        return
    url = _normalize(url)
    if (kept := study.attrs.get(CHECKPOINT_URL, url)) != url:
        raise SearchError(
            f"--checkpoint-url {url}: the checkpoints of study {study.spec.name!r} are in {kept}; "
            "remove --checkpoint-url to continue the study, or choose another --name"
        )
    study.set_attr(CHECKPOINT_URL, url)


class StudyCheckpoints:
    """The checkpoints of one study.

    Args:
        checkpoints: checkpoint store.
        engine: engine of the study's database.
        study_id: id of the study.
        folder: name of the study's folder in the store, which is unique across databases.
        are_shared: whether trials copy checkpoints of other trials, so that a file may belong to several trials.
        confirmation: the option or command that permits files with extra states, for the error message; None if these
            files are permitted.
    """

    def __init__(
        self,
        checkpoints: CheckpointStore,
        engine: sa.Engine,
        study_id: int,
        *,
        folder: str,
        are_shared: bool = False,
        confirmation: str | None = None,
    ) -> None:
        self.files = checkpoints
        self.engine = engine
        self.study_id = study_id
        self.folder = folder
        self.are_shared = are_shared
        self.confirmation = confirmation

    def remove(self, paths: Collection[str]) -> None:
        """Remove checkpoint files to which no pointer refers any more, except files that another trial has copied.

        Raises:
            CheckpointStoreError: the store is unavailable.
        """
        kept = self._find_shared() if paths else set()
        removable = filter(is_removable_path, paths)
        self.files.remove([path for path in removable if get_checkpoint_path(path) not in kept])

    def _find_shared(self) -> set[str]:
        return retrying()(find_referenced_paths, self.engine, self.study_id) if self.are_shared else set()

    def clean_up(self, runs: Path) -> None:
        """Remove leftover checkpoints of finished trials, for example after a crash at the end of a trial.

        Args:
            runs: folder of the study's run directories on this machine.
        """
        try:
            stored, local = self.find_leftovers(runs)
            self.files.remove(list(stored))
            for path in local:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            retrying()(drop_pointers, self.engine, self.study_id)
        except (CheckpointStoreError, OSError) as error:
            log.warning("checkpoints of finished trials not removed: %s", error)

    def find_leftovers(self, runs: Path) -> tuple[dict[str, int], dict[Path, int]]:
        """Return the sizes in bytes of finished trials' leftover files in the store, and in the run directories.

        Raises:
            CheckpointStoreError: the store is unavailable.
        """
        found = self.files.sizes(self.folder)  # listed before the query, because a trial may be retried in between
        local = [path for name in _RESUME_FILES for path in runs.glob(f"*/{name}")]
        numbers = {_parse_number(path) for path in [*found, *map(str, local)]}
        ended = retrying()(read_ended_trials, self.engine, self.study_id, numbers) if numbers else {}
        shared = self._find_shared()
        return (
            {
                path: size
                for path, size in found.items()
                if (number := _parse_number(path)) in ended
                and is_removable_path(path)
                and get_checkpoint_path(path) not in ended[number] | shared
            },
            {path: size for path in local if _parse_number(str(path)) in ended and (size := _size(path)) is not None},
        )

    def read_trial_files(self, trial_id: int, number: int) -> dict[int, StoredFile]:
        """Return the valid checkpoints of a trial as :func:`read_pointers` does.

        Every worker's database role can write pointers: those to files outside the trial's folder, or with shared
        checkpoints outside the study's folders of trials, are left out.
        """
        pointers = retrying()(read_pointers, self.engine, trial_id)
        pattern = rf"{re.escape(self.folder)}/{r'[0-9]{4,}' if self.are_shared else f'{number:04d}'}/[^/]+"
        return {e: f for e, f in pointers.items() if re.fullmatch(pattern, f.path) and is_checkpoint_path(f.path)}

    def delete_trial(self, number: int) -> None:
        """Delete the stored checkpoints of a COMPLETE or PRUNED trial whose data is completely in MLflow.

        The pointers to the files in the database are deleted last, so that a cleanup after a crash can still find the
        files.
        """
        folder = f"{self.folder}/{number:04d}"
        try:
            if self.are_shared:
                self.remove(self.files.find(folder))
            else:
                self.files.remove_folder(folder)
        except StorageError as error:  # also a link in the folder
            log.warning("trial %d: checkpoints not removed: %s", number, error)
            return
        retrying()(drop_pointers, self.engine, self.study_id, number=number)

    def delete(self) -> None:
        """Delete all checkpoint files of the study from the store, because the study is being deleted.

        Raises:
            CheckpointStoreError: the store is unavailable.
        """
        self.files.remove_folder(self.folder)


def _size(path: Path) -> int | None:
    """Return the size of a file or folder in bytes; None if another worker has removed it in the meantime."""
    try:
        return compute_folder_bytes(path) if path.is_dir() else path.stat().st_size
    except FileNotFoundError:
        return None


def _parse_number(path: str) -> int:
    """Return the trial number in ``STUDY/0007/0004-1.pt`` or ``STUDY/0007-2/last.pt``; -1 for other files."""
    number = PurePosixPath(path).parent.name.partition("-")[0]
    return int(number) if number.isdecimal() else -1
