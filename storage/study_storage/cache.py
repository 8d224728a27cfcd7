"""Cache of a study's trials: a finished trial is read once unless it is reopened, an unfinished trial on each call."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import sqlalchemy as sa
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from hpsearch.storage.database.statements import Database
from hpsearch.storage.study_storage.reading import (
    FINISHED_STATES,
    STATE_BY_NAME,
    ReadCursor,
    make_bare_trial,
    merge_row,
    read_newly_finished,
    read_study,
    read_trial,
    read_updates,
    utc_to_local,
)


class StudyCache:
    """Cached trials of one study. Cached trial objects are never modified: an update replaces them with new objects."""

    def __init__(self, study_id: int) -> None:
        self.study_id = study_id
        self.lock = threading.RLock()
        self.distributions: dict[str, BaseDistribution] = {}  # per parameter: the first distribution in the study
        self._known = ReadCursor()
        self._trials: list[FrozenTrial] = []  # in the order of ids, which is also the order of numbers
        self._index_of: dict[int, int] = {}  # trial id: index in `_trials`
        self._read_at = -math.inf  # time of the last query for finished trials
        self._finished: dict[frozenset[TrialState], list[FrozenTrial]] = {}

    @property
    def last_trial_id(self) -> int:
        """Highest cached trial id; new trials of the study have higher ids. -1 if no trial is cached."""
        return self._known.last_trial_id

    def get_complete(self, trial_id: int) -> FrozenTrial | None:
        """Return a trial from the cache if it is COMPLETE, because such trials are never reopened; None otherwise."""
        with self.lock:
            place = self._index_of.get(trial_id)
            trial = None if place is None else self._trials[place]
            return trial if trial is not None and trial.state == TrialState.COMPLETE else None

    def get_trial_id(self, number: int) -> int | None:
        """Return the id of the trial with this number; None if the trial is not cached."""
        with self.lock:
            trial = self._trials[number] if 0 <= number < len(self._trials) else None
            return trial._trial_id if trial is not None and trial.number == number else None

    def select(self, database: Database, states: frozenset[TrialState], *, max_age: float = 0.0) -> list[FrozenTrial]:
        """Read the changes since the last call, and return the trials in these states, by number.

        If `states` contains only final states, unfinished trials are read only if they were reopened, and the database
        is queried only if the last query is at least `max_age` seconds old.

        Raises:
            KeyError: the study does not exist.
        """
        with self.lock:
            now, only_finished = time.monotonic(), states <= FINISHED_STATES
            if not only_finished or now - self._read_at >= max_age:
                self._read(database, only_finished=only_finished)
                self._read_at = now
            if not only_finished:
                return self._trials.copy() if len(states) == len(TrialState) else self._select(states)
            if states not in self._finished:
                self._finished[states] = self._select(states)
            return self._finished[states].copy()

    def _read(self, database: Database, *, only_finished: bool) -> None:
        is_cold = self._known.last_trial_id < 0
        if is_cold:
            trials, mark = read_study(database, self.study_id)
            for trial in trials:
                self._put(trial)
            self._known.mark = mark
        if self._known.last_trial_id < 0:
            return  # there are no trials
        if not only_finished:
            self._read_all(database)
        elif not is_cold:
            self._read_finished(database)

    def refresh(self, database: Database, trial_id: int) -> None:
        """Read a finished trial of the cache again; a trial that was reopened is left to the next `select`."""
        with self.lock:
            found = read_trial(database, trial_id)
            if found is not None and trial_id in self._index_of and found[0].state in FINISHED_STATES:
                self._put(found[0])

    def invalidate(self) -> None:
        """Make the next `select` query the database, regardless of its `max_age`."""
        self._read_at = -math.inf

    def _select(self, states: frozenset[TrialState]) -> list[FrozenTrial]:
        return [trial for trial in self._trials if trial.state in states]

    def _read_finished(self, database: Database) -> None:
        complete_rows, others, mark = read_newly_finished(database, self.study_id, self._known)
        arrived = {row.trial_id: make_bare_trial(row) for row in others}
        arrived |= {row.trial_id: merge_row(row) for row in complete_rows}  # newer than the rows in `others`
        for trial_id in sorted(arrived):
            self._put(arrived[trial_id])
        self._known.mark = mark  # set last, so that the next read repeats an interrupted one

    def _read_all(self, database: Database) -> None:
        rows, mark = read_updates(database, self.study_id, self._known)
        for row in rows:
            self._take(row)
        self._known.mark, self._known.details_horizon = mark, mark.horizon

    def _take(self, row: sa.Row[Any]) -> None:
        known = self._trials[self._index_of[row.trial_id]] if row.changes else None
        if known is None or not _is_unchanged(row, known):
            self._put(merge_row(row, known))
        if STATE_BY_NAME[row.state] not in FINISHED_STATES:
            self._known.loaded_ids.add(row.trial_id)

    def _put(self, trial: FrozenTrial) -> None:
        """Add a trial to the cache, or replace its cached version."""
        trial_id, known = trial._trial_id, self._known
        if (place := self._index_of.get(trial_id)) is None:
            self._index_of[trial_id] = len(self._trials)
            self._trials.append(trial)
            known.last_trial_id = trial_id
        else:
            self._trials[place] = trial
        for name, distribution in trial.distributions.items():
            self.distributions.setdefault(name, distribution)
        if trial.state in FINISHED_STATES:
            known.unfinished_ids.discard(trial_id)
            known.loaded_ids.discard(trial_id)
            self._finished.clear()
        else:
            if place is not None and trial_id not in known.unfinished_ids:
                self._finished.clear()  # a finished trial was reopened
            known.unfinished_ids.add(trial_id)


def _is_unchanged(row: sa.Row[Any], known: FrozenTrial) -> bool:
    """Return whether nothing was written to an unfinished trial since its last read."""
    return (
        not (row.param_names or row.steps or row.user_keys or row.system_keys or row.results)
        and STATE_BY_NAME[row.state] == known.state
        and utc_to_local(row.datetime_start) == known.datetime_start
    )
