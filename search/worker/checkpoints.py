"""A trial's checkpoints: stored for all machines, restored by the next attempt, removed at the end of the trial."""

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
from hpsearch.search.study.checkpoints import StudyCheckpoints
from hpsearch.storage.checkpoints.pointers import read_pointers
from hpsearch.storage.checkpoints.store import StoredFile, get_checkpoint_path, get_part_path, is_identical
from hpsearch.storage.database.retry import retrying
from hpsearch.storage.errors import CheckpointStoreError, StoredCheckpointError
from hpsearch.storage.trials.claims import Claim

log = logging.getLogger(__name__)

# A store that is away for a moment is waited for before a trial is given back.
_waiting = tenacity.Retrying(
    retry=tenacity.retry_if_exception_type(CheckpointStoreError),
    stop=tenacity.stop_after_delay(60.0),
    wait=tenacity.wait_random_exponential(multiplier=0.5, max=5.0),
    reraise=True,
)


class TrialCheckpoints:
    """The checkpoints of one attempt at a trial.

    A state is saved to the run directory and under the study's URL. It counts once the statement that reports its
    epoch has written its pointer. A store that is full or away costs checkpoints, not the trial.

    Attributes:
        pending: the stored state whose pointer is to be written; None if the last one was not stored, or counts.
    """

    def __init__(self, study: StudyCheckpoints, files: RunFiles, claim: Claim) -> None:
        self._study = study
        self._files = files
        self._claim = claim
        self._folder = f"{study.folder}/{claim.number:04d}"
        self._known: dict[int, StoredFile] = {}  # by epoch: those in the database, as far as this attempt knows
        self._parts: dict[str, list[str]] = {}  # of a checkpoint, both by their paths in the store
        self._failing = False
        self.pending: StoredFile | None = None

    def save(self, state: dict[str, Any], *, best: bool) -> None:
        """Save the state after an epoch and put it into the store.

        A full disk is logged and costs only the checkpoint.
        """
        epoch = len(state["history"]) - 1
        with self._failure_costs_the_checkpoint(epoch):
            try:
                self._files.save(state, best=best)
            except OSError:
                if best:
                    self._files.best_path.unlink(missing_ok=True)  # it is no longer the best
                raise
            if not self._files.best_path.exists():
                self._files.write_best(state)
            self._put_last(f"{epoch:04d}", state)

    def save_mid_epoch(self, state: dict[str, Any]) -> None:
        """Save a mid-epoch state and put it into the store, in place of the state after the epoch before."""
        epoch = len(state["history"]) - 1
        with self._failure_costs_the_checkpoint(epoch):
            self._files.save_last(state)
            self._put_last(f"{epoch + 1:04d}.{state['within']['sums']['steps']}", state)

    @contextlib.contextmanager
    def _failure_costs_the_checkpoint(self, epoch: int) -> Iterator[None]:
        self.pending = None
        try:
            yield
        except (OSError, CheckpointStoreError) as error:
            self._warn(epoch, error)
        else:
            self._failing = False

    def _put_last(self, name: str, state: dict[str, Any]) -> None:
        path = f"{self._folder}/{name}-{self._claim.attempt}.pt"
        parts = _parts(path, state)
        try:
            for local, part in parts.items():  # before the file that names them, which alone makes them count
                self._study.files.put(self._files.shards / local, name=part.path, sha256=part.sha256)
            pending = self._study.files.put(self._files.last_path, name=path)
        except (OSError, CheckpointStoreError):
            self._remove([part.path for part in parts.values()])
            raise
        self._parts[path] = [part.path for part in parts.values()]
        self.pending = pending

    def _warn(self, epoch: int, error: Exception) -> None:
        if self._failing:
            return
        self._failing = True
        known = max(self._known, default=-1)
        where = "from its beginning" if known < 0 else f"after epoch {known + 1}"
        log.warning(
            "trial %d: no checkpoint of epoch %d: %s; the trial goes on, and would be resumed %s",
            *(self._claim.number, epoch + 1, error, where),
        )

    @kill_point("remove superseded checkpoints")
    def committed(self, epoch: int) -> None:
        """Record that the pending state of `epoch` is in the database, and remove the files that it supersedes."""
        if self.pending is None:
            return
        # As the database does it: the one before stays, for two survive a torn file.
        before = max((e for e in self._known if e < epoch), default=epoch)
        gone = [self._known.pop(e).path for e in list(self._known) if e < before or e == epoch]
        self._known[epoch], self.pending = self.pending, None
        self._remove([path for of in gone for path in (of, *self._parts.pop(of, ()))])

    @kill_point("restore checkpoint")
    def restore(self) -> dict[str, Any] | None:
        """Return the newest state that the database knows of and that can be trusted, or None to start anew.

        Local files that no pointer names are not looked at: their epochs were never reported.

        Raises:
            CheckpointStoreError: the store does not answer for a minute. What is in it is too precious to start anew.
        """
        self._files.remove_leftovers()
        if self._claim.attempt > 1:
            self._known = retrying()(read_pointers, self._study.engine, self._claim.trial_id)
            self._sweep()
        for epoch, stored in self._known.items():
            try:
                self._bring(stored)
                state = self._files.read(self._files.last_path)
                self._bring_parts(stored, state)
            except (StoredCheckpointError, CheckpointError) as error:
                log.warning("trial %d: epoch %d cannot be resumed: %s", self._claim.number, epoch + 1, error)
                continue
            self._begin_from(state)
            return state
        if self._known:
            log.warning("trial %d: no checkpoint is usable; starting from the first epoch", self._claim.number)
        self._files.remove(self._files.last_path, self._files.previous_path, self._files.best_path)
        return None

    def _begin_from(self, state: dict[str, Any]) -> None:
        """Leave only `last.pt` and the best of its state in the directory; the run reports its metrics again."""
        files = self._files
        files.remove(files.previous_path, files.run_dir / "metrics.jsonl", files.best_path)
        if not state["best"]:  # before the end of the first epoch
            return
        try:
            files.write_best(state)
        except OSError as error:
            self._warn(len(state["history"]) - 1, error)

    @kill_point("fetch checkpoint")
    def _bring(self, stored: StoredFile) -> None:
        for path in (self._files.last_path, self._files.previous_path):
            if is_identical(path, stored):
                path.replace(self._files.last_path)
                return
        _waiting(self._study.files.get, stored, self._files.last_path)

    def _bring_parts(self, stored: StoredFile, state: dict[str, Any]) -> None:
        for local, part in _parts(stored.path, state).items():
            if not is_identical(path := self._files.shards / local, part):
                _waiting(self._study.files.get, part, path)

    def _sweep(self) -> None:
        """Remove files of this attempt or earlier ones that no pointer names; a later attempt's are its own."""
        try:
            found = self._study.files.find(self._folder)
            known = {stored.path for stored in self._known.values()}
            self._parts = {of: [p for p in found if p != of and get_checkpoint_path(p) == of] for of in known}
            left = [p for p in found if get_checkpoint_path(p) not in known and _attempt(p) <= self._claim.attempt]
            self._study.files.remove(left)
        except CheckpointStoreError as error:
            log.warning("trial %d: leftovers of an earlier attempt stay for now: %s", self._claim.number, error)

    def abandon(self) -> None:
        """Remove what this attempt put and never committed, and its directory: the trial is somebody else's by now."""
        self.pending = None
        shutil.rmtree(self._files.run_dir, ignore_errors=True)
        self._known = retrying()(read_pointers, self._study.engine, self._claim.trial_id)
        self._sweep()

    @kill_point("remove checkpoints")
    def delete(self, *, but_last: bool = False) -> None:
        """Remove all of it but the local `best.pt`: the trial is COMPLETE or PRUNED, and its best is published.

        Args:
            but_last: leave what is in the store until the trial's model has arrived in MLflow.
        """
        self._files.remove(self._files.last_path, self._files.previous_path)
        if not but_last:
            self._study.delete_trial(self._claim.number)

    def _remove(self, paths: list[str]) -> None:
        try:
            self._study.files.remove(paths)
        except CheckpointStoreError as error:
            log.warning("trial %d: an old checkpoint stays for now: %s", self._claim.number, error)


def _parts(path: str, state: dict[str, Any]) -> dict[str, StoredFile]:
    """What of a state is not in the file at `path`: where it is below the folder of parts, and in the store."""
    manifest = state.get("shards", {"folder": "", "files": {}})
    folder = PurePosixPath(manifest["folder"]).name
    return {f"{folder}/{name}": StoredFile(get_part_path(path, name), **of) for name, of in manifest["files"].items()}


def _attempt(path: str) -> int:
    """The attempt's number in ``STUDY/0007/0004-1.pt``, in ``0004.120-1.pt``, or in a copy that was never finished."""
    match = re.match(r"[\d.]+-(\d+)\.pt", PurePosixPath(path).name)
    return int(match[1]) if match else sys.maxsize
