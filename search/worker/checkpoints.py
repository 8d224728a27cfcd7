"""Checkpoints of an attempt: save them to the store, restore them from the store, and delete superseded checkpoints."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import tenacity

from hpsearch.kill_points import kill_point
from hpsearch.objectives.training.reproducibility.checkpoint import CheckpointError, RunFiles
from hpsearch.search.study.checkpoint_origin import find_unsafe_part
from hpsearch.search.study.checkpoints import StudyCheckpoints
from hpsearch.storage.checkpoints.store import (
    StoredFile,
    get_checkpoint_path,
    get_part_path,
    is_checkpoint_path,
    is_identical,
)
from hpsearch.storage.errors import CheckpointStoreError, StoredCheckpointError, UnsafeCheckpointError
from hpsearch.storage.trials.claim_results import Claim

log = logging.getLogger(__name__)

# A short outage of the store must not release the trial.
_retry_download = tenacity.Retrying(
    retry=tenacity.retry_if_exception_type(CheckpointStoreError),
    stop=tenacity.stop_after_delay(60.0),
    wait=tenacity.wait_random_exponential(multiplier=0.5, max=5.0),
    reraise=True,
)


class TrialCheckpoints:
    """Checkpoints of one attempt at a trial.

    A state is saved to the run directory and to the store. It becomes valid when its pointer is written to the
    database; the SQL statement that reports the epoch also writes the pointer. If the store is full or unavailable, the
    trial continues without new checkpoints.

    Attributes:
        pending: stored state that has no pointer in the database yet; None if the last state was not stored, or has a
            pointer.
    """

    def __init__(self, study: StudyCheckpoints, files: RunFiles, claim: Claim) -> None:
        self._study = study
        self._files = files
        self._claim = claim
        self._folder = f"{study.folder}/{claim.number:04d}"
        self._known: dict[int, StoredFile] = {}  # files with a pointer in the database, by epoch
        self._parts: dict[str, list[str]] = {}  # paths of part files, by the path of their checkpoint in the store
        self._is_failing = False
        self.pending: StoredFile | None = None

    def save(self, state: dict[str, Any], *, best: bool) -> None:
        """Save the state after an epoch to the run directory and the store; log errors, and let the trial continue."""
        epoch = len(state["history"]) - 1
        with self._log_errors(epoch):
            try:
                self._files.save(state, best=best)
            except OSError:
                if best:
                    self._files.best_path.unlink(missing_ok=True)  # the file has an earlier epoch, not the best epoch
                raise
            if not self._files.best_path.exists():
                self._files.write_best(state)
            self._put_last(f"{epoch:04d}", state)

    def save_mid_epoch(self, state: dict[str, Any]) -> None:
        """Save a mid-epoch state to the run directory and the store, in place of the state after the previous epoch."""
        epoch = len(state["history"]) - 1
        with self._log_errors(epoch):
            self._files.save_last(state)
            self._put_last(f"{epoch + 1:04d}.{state['within']['sums']['steps']}", state)

    @contextlib.contextmanager
    def _log_errors(self, epoch: int) -> Iterator[None]:
        self.pending = None
        try:
            yield
        except (OSError, CheckpointStoreError) as error:
            self._warn(epoch, error)
        else:
            self._is_failing = False

    def _put_last(self, name: str, state: dict[str, Any]) -> None:
        path = f"{self._folder}/{name}-{self._claim.attempt}.pt"
        parts = _list_parts(path, state)
        try:
            for local, part in parts.items():  # before the checkpoint file, which refers to them
                self._study.files.put(self._files.shards / local, name=part.path, sha256=part.sha256)
            pending = self._study.files.put(self._files.last_path, name=path)
        except (OSError, CheckpointStoreError):
            self._remove([part.path for part in parts.values()])
            raise
        self._parts[path] = [part.path for part in parts.values()]
        self.pending = pending

    def _warn(self, epoch: int, error: Exception) -> None:
        if self._is_failing:
            return
        self._is_failing = True
        known = max(self._known, default=-1)
        place = "from the first epoch" if known < 0 else f"after epoch {known + 1}"
        text = "trial %d: checkpoint of epoch %d not saved: %s; the trial continues, and a resume would start %s"
        log.warning(text, self._claim.number, epoch + 1, error, place)

    @kill_point("remove superseded checkpoints")
    def mark_committed(self, epoch: int) -> None:
        """Record that the pending state of `epoch` has a pointer, and remove the files of superseded states."""
        if self.pending is None:
            return
        # The previous checkpoint is kept, as in the database, because the new file may be damaged.
        before = max((e for e in self._known if e < epoch), default=epoch)
        superseded = [self._known.pop(e).path for e in list(self._known) if e < before or e == epoch]
        self._known[epoch], self.pending = self.pending, None
        self._remove([path for old in superseded for path in (old, *self._parts.pop(old, ()))])

    @kill_point("restore checkpoint")
    def restore(self) -> dict[str, Any] | None:
        """Return the newest undamaged state with a pointer in the database; None to start from scratch.

        Local files without a pointer are ignored, because their epochs were never reported.

        Raises:
            CheckpointStoreError: the store was unavailable for a minute, or the state needs a confirmation. The attempt
                does not start from scratch, because that would discard the trained epochs.
        """
        self._files.remove_leftovers()
        if self._claim.attempt > 1:
            self._known = self._read_known()
            self._remove_unreferenced()
        for epoch, stored in self._known.items():
            try:
                self._fetch(stored)
                state = self._files.read(self._files.last_path)
                self._fetch_parts(stored, state)
            except (StoredCheckpointError, CheckpointError) as error:
                log.warning("trial %d: cannot resume after epoch %d: %s", self._claim.number, epoch + 1, error)
                continue
            if (needed := self._study.confirmation) and (unsafe := find_unsafe_part(state, needed)):
                raise UnsafeCheckpointError(f"the checkpoint after epoch {epoch + 1} was not loaded: {unsafe}")
            self._prepare_run_dir(state)
            return state
        if self._known:
            log.warning("trial %d: no checkpoint is usable; starting from the first epoch", self._claim.number)
        self._files.remove(self._files.last_path, self._files.previous_path, self._files.best_path)
        return None

    def _prepare_run_dir(self, state: dict[str, Any]) -> None:
        """Write `best.pt` from the restored state; remove old checkpoints and metrics, which the run rewrites."""
        files = self._files
        files.remove(files.previous_path, files.run_dir / "metrics.jsonl", files.best_path)
        if not state["best"]:  # a checkpoint within the first epoch
            return
        try:
            files.write_best(state)
        except OSError as error:
            self._warn(len(state["history"]) - 1, error)

    @kill_point("fetch checkpoint")
    def _fetch(self, stored: StoredFile) -> None:
        for path in (self._files.last_path, self._files.previous_path):
            if is_identical(path, stored):
                path.replace(self._files.last_path)
                return
        _retry_download(self._study.files.get, stored, self._files.last_path)

    def _fetch_parts(self, stored: StoredFile, state: dict[str, Any]) -> None:
        for local, part in _list_parts(stored.path, state).items():
            if not is_identical(path := self._files.shards / local, part):
                _retry_download(self._study.files.get, part, path)

    def _remove_unreferenced(self) -> None:
        """Remove stored files of the trial that have no pointer, except files of later attempts."""
        try:
            found = self._study.files.find(self._folder)
            known = {stored.path for stored in self._known.values()}
            self._parts = {file: [p for p in found if p != file and get_checkpoint_path(p) == file] for file in known}
            left = [p for p in found if get_checkpoint_path(p) not in known]
            self._study.remove([p for p in left if _parse_attempt(p) <= self._claim.attempt])
        except CheckpointStoreError as error:
            log.warning("trial %d: files of earlier attempts not removed: %s", self._claim.number, error)

    def abandon(self) -> None:
        """Remove the run directory, and stored files without a pointer, because another attempt owns the trial."""
        self.pending = None
        shutil.rmtree(self._files.run_dir, ignore_errors=True)
        self._known = self._read_known()
        self._remove_unreferenced()

    def _read_known(self) -> dict[int, StoredFile]:
        return self._study.read_trial_files(self._claim.trial_id, self._claim.number)

    @kill_point("remove checkpoints")
    def delete(self, *, keep_stored: bool = False) -> None:
        """Delete the checkpoints of a COMPLETE or PRUNED trial, except the local `best.pt`.

        Args:
            keep_stored: whether to keep the files in the store until the trial's model is in MLflow.
        """
        self._files.remove(self._files.last_path, self._files.previous_path)
        if not keep_stored:
            self._study.delete_trial(self._claim.number)

    def _remove(self, paths: list[str]) -> None:
        try:
            self._study.remove(paths)
        except CheckpointStoreError as error:
            log.warning("trial %d: superseded checkpoint not removed: %s", self._claim.number, error)


def _list_parts(path: str, state: dict[str, Any]) -> dict[str, StoredFile]:
    """Return the part files of the sharded checkpoint at `path`, by local path in the shards folder.

    Raises:
        StoredCheckpointError: the checkpoint names files with other names than those of shards.
    """
    if "shards" not in state:
        return {}
    manifest = state["shards"]
    folder = PurePosixPath(manifest["folder"]).name
    parts = {f"{folder}/{name}": StoredFile(get_part_path(path, name), **f) for name, f in manifest["files"].items()}
    if folder in ("", "..") or not all(is_checkpoint_path(part.path) for part in parts.values()):
        raise StoredCheckpointError(f"{path} names files that are not shards")
    return parts


def _parse_attempt(path: str) -> int:
    """Return the attempt number (here 1) in ``STUDY/0007/0004-1.pt`` or ``0004.120-1.pt``, also of a partial copy."""
    match = re.match(r"[\d.]+-(\d+)\.pt", PurePosixPath(path).name)
    return int(match[1]) if match else sys.maxsize
