"""A study's checkpoints: one folder of its own, tidied up when its trials have ended, removed with the study."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import sqlalchemy as sa

from storage.checkpoint_pointers import drop_pointers, ended
from storage.checkpoints import Checkpoints
from storage.errors import CheckpointStoreError

log = logging.getLogger(__name__)

T = TypeVar("T")


def at_once(call: Callable[[], T]) -> T:
    """Call, and let an error pass."""
    return call()


class StudyCheckpoints:
    """The checkpoints of one study.

    Args:
        checkpoints: where they are kept.
        engine: of the study's database.
        study_id: the study.
        folder: of the study's files there; no other study's, whichever database that is in.
        retrying: calls what reads and writes the database, again when its connection breaks.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        engine: sa.Engine,
        study_id: int,
        *,
        folder: str,
        retrying: Callable[[Callable[[], Any]], Any] = at_once,
    ) -> None:
        self.files = checkpoints
        self.engine = engine
        self.study_id = study_id
        self.folder = folder
        self.retrying = retrying

    def tidy(self, runs: Path) -> None:
        """Remove what trials that have ended left, such as when their worker died just then.

        Args:
            runs: folder of the study's run directories on this machine.
        """
        try:
            found = self.files.find(self.folder)  # before the database is asked: a trial may be tried again
            local = [path for name in ("last.pt", "previous.pt") for path in runs.glob(f"*/{name}")]
            over = self._ended({number for number in map(_number, [*found, *map(str, local)]) if number is not None})
            self.files.remove([path for path in found if path not in over.get(_number(path), {path})])
            for path in local:
                if _number(str(path)) in over:
                    path.unlink(missing_ok=True)
            self.retrying(lambda: drop_pointers(self.engine, self.study_id))
        except (CheckpointStoreError, OSError) as error:
            log.warning("checkpoints of trials that have ended stay for now: %s", error)

    def _ended(self, numbers: set[int]) -> dict[int | None, set[str]]:
        found: dict[int | None, set[str]] = self.retrying(lambda: ended(self.engine, self.study_id, numbers))
        return found

    def forget(self) -> None:
        """Remove all files of the study, which is being deleted.

        Raises:
            CheckpointStoreError: the store does not answer.
        """
        self.files.remove_folder(self.folder)


def _number(path: str) -> int | None:
    """The trial's number in ``STUDY/0007/0004-1.pt``; None for a file of another kind."""
    folder = PurePosixPath(path).parent.name
    return int(folder) if folder.isdecimal() else None
