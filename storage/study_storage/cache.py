"""What a process knows of a study's trials: finished ones for good, the others until it looks again."""

from __future__ import annotations

import threading
from typing import Any

import sqlalchemy as sa
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from storage.study_storage.codec import FINISHED, STATES, to_local
from storage.study_storage.database import Database
from storage.study_storage.reading import News, merged, read_news, whole


class StudyCache:
    """The trials of one study. A trial that was handed out is never changed: a new object takes its place."""

    def __init__(self, study_id: int) -> None:
        self.study_id = study_id
        self.lock = threading.RLock()
        self.distributions: dict[str, BaseDistribution] = {}  # of each parameter's first appearance
        self._trials: list[FrozenTrial] = []  # by id, and so by number
        self._place: dict[int, int] = {}  # of an id in it
        self._unfinished: set[int] = set()
        self._loaded: set[int] = set()  # the unfinished ones whose details are known up to the horizon
        self._horizon = "0"
        self._finished: dict[frozenset[TrialState], list[FrozenTrial]] = {}

    @property
    def seen(self) -> int:
        """The highest trial id known, below which none of this study can appear any more; -1 if none is."""
        return self._trials[-1]._trial_id if self._trials else -1

    def finished(self, trial_id: int) -> FrozenTrial | None:
        """Return a trial if it is known to be finished."""
        place = self._place.get(trial_id)
        return None if place is None or trial_id in self._unfinished else self._trials[place]

    def id_of(self, number: int) -> int | None:
        """Return the id of the trial with a number, if it is known."""
        known = self._trials[number] if 0 <= number < len(self._trials) else None
        return known._trial_id if known is not None and known.number == number else None

    def select(self, database: Database, states: frozenset[TrialState]) -> list[FrozenTrial]:
        """Return the trials in some states, by number, after reading what is new.

        Where only finished ones are asked for, running ones are not read.

        Raises:
            KeyError: There is no such study.
        """
        with self.lock:
            everything = not states <= FINISHED
            self._apply(self._read(database, everything), everything)
            if everything:
                return [t for t in self._trials if t.state in states]
            if states not in self._finished:
                self._finished[states] = [t for t in self._trials if t.state in states]
            return self._finished[states].copy()

    def _read(self, database: Database, everything: bool) -> News:
        return read_news(
            database,
            self.study_id,
            seen=self.seen,
            unfinished=self._unfinished,
            loaded=self._loaded,
            horizon=self._horizon,
            everything=everything,
        )

    def _apply(self, news: News, everything: bool) -> None:
        for row in news.rows:
            self._take(row)
        if everything:
            self._horizon = news.horizon

    def _take(self, row: sa.Row[Any]) -> None:
        place = self._place.get(row.trial_id)
        known = None if place is None else self._trials[place]
        if row.changes and known is not None:
            if _is_unchanged(row, known):
                return
            trial = merged(row, known)
        else:
            trial = whole(row)
        if place is None:
            self._place[row.trial_id] = len(self._trials)
            self._trials.append(trial)
        else:
            self._trials[place] = trial
        for name, given in trial.distributions.items():
            self.distributions.setdefault(name, given)
        if STATES[row.state] in FINISHED:
            self._unfinished.discard(row.trial_id)
            self._loaded.discard(row.trial_id)
            self._finished.clear()
        else:
            if known is not None and row.trial_id not in self._unfinished:
                self._finished.clear()  # somebody reopened a finished trial
            self._unfinished.add(row.trial_id)
            if row.wanted:
                self._loaded.add(row.trial_id)


def _is_unchanged(row: sa.Row[Any], known: FrozenTrial) -> bool:
    """Whether nothing was written to a running trial since it was read last."""
    return (
        not (row.param_names or row.steps or row.user_keys or row.system_keys or row.results)
        and STATES[row.state] == known.state
        and to_local(row.datetime_start) == known.datetime_start
    )
