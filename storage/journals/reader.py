"""Readers of journals: the interface, and the base class that follows every journal of a host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import sqlalchemy as sa

from hpsearch.storage.attributes import INFEASIBLE, REASON
from hpsearch.storage.database.statements import Database
from hpsearch.storage.journals.journal import Entry, Journal, Place
from hpsearch.storage.journals.journal_records import End
from hpsearch.storage.trials.settle import Ended, Outcome


class NotYetError(Exception):
    """Whether anybody needs this journal is known when its trial has ended."""


@dataclass(frozen=True)
class Failure:
    """What an error of a reader means.

    Attributes:
        text: the error in a line.
        passes: whether what failed may work later, as it is; else a person has to see to it.
        everything: whether nothing else need be tried now.
        expected: whether it is of a known kind, so that nobody needs its traceback.
    """

    text: str
    passes: bool
    everything: bool = False
    expected: bool = True


class Reader(Protocol):
    """Something that is told what journals hold. All but `close` is called by one thread.

    Attributes:
        name: of its thread, and of its files beside a journal.
        title: its name for a person.
    """

    name: str
    title: str

    def ship(self, place: Place) -> bool:
        """Bring on what there is from a place in a journal on; return whether this reader has all of the journal.

        Safe to repeat, whatever the time before came to.

        Raises:
            NotYetError: it may never be needed; to be asked again later.
            LockHeldError: another process is at the trial.
            Exception: something else went wrong, see `failure`.
        """
        ...

    def refused(self, place: Place) -> None:
        """Take note that a journal waits for a person, as its position says."""
        ...

    def failure(self, error: Exception) -> Failure:
        """Return what an error means that `ship` raised."""
        ...

    def close(self) -> None:
        """Let go of everything, also of what `ship` waits for in another thread."""
        ...


_PATIENCE = 10.0  # seconds to wait for the database


class TrialEnds:
    """Who has the last word on a trial, and how it ended.

    Args:
        engine: the database of the study.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._database = Database(engine, _PATIENCE)

    def superseded(self, trial_id: int, attempt: int) -> bool:
        """Whether a later attempt has the trial, and with it the last word on its run."""
        return bool(self._database.rows(_LATER, {"trial": trial_id, "attempt": attempt})[0].later)

    def outlived(self, journal: Journal) -> bool:
        """Whether a later attempt has reported all of the trial again, so that this dead one has nothing to add.

        Raises:
            NotYetError: a later attempt is at it, and may yet die before it does.
        """
        if not self.superseded(journal.head.trial, journal.head.attempt):
            return False
        ended = self.ended(journal.head.trial)
        if ended is None:
            raise NotYetError
        return ended.outcome is not Outcome.FAILED

    def ended(self, trial_id: int) -> Ended | None:
        """Return how a trial ended; None while it runs or waits, or when it is gone."""
        arguments = {"trial": trial_id, "infeasible": INFEASIBLE, "reason": REASON}
        for row in self._database.rows(_ENDED, arguments):
            return Ended(Outcome.of_trial(row.state, infeasible=bool(row.infeasible)), row.reason or "")
        return None


_LATER = sa.text("""
    SELECT EXISTS (SELECT FROM hpsearch_attempts WHERE trial_id = :trial AND attempt > :attempt) AS later
""")
_ENDED = sa.text("""
    SELECT t.state, reason.value_json::jsonb #>> '{}' AS reason, infeasible.value_json = 'true' AS infeasible
      FROM trials t
      LEFT JOIN trial_user_attributes reason ON reason.trial_id = t.trial_id AND reason.key = :reason
      LEFT JOIN trial_user_attributes infeasible
             ON infeasible.trial_id = t.trial_id AND infeasible.key = :infeasible
     WHERE t.trial_id = :trial AND t.state NOT IN ('RUNNING', 'WAITING')
""")


class Follower(ABC):
    """A reader that keeps to the rules for journals whose process has died; what it tells is a subclass's.

    Args:
        ends: what the study's database says of trials.
    """

    name: str
    title: str

    def __init__(self, ends: TrialEnds) -> None:
        self._ends = ends

    def ship(self, place: Place) -> bool:
        """Tell what there is; return whether the journal is over.

        Raises:
            NotYetError: a later attempt may tell all of it.
            Exception: see `failure`.
        """
        journal = place.journal
        entries = place.unsent()
        try:
            if not journal.live and self._ends.outlived(journal):
                self.leave(place)
                return True
            over = self.tell(place, entries)
        finally:
            place.returned()
        if journal.live or (over and not self.superseded(place)):
            return over
        # Its process died before it could say how it ended, where its trial has.
        if (ended := self._ends.ended(journal.head.trial)) is not None:
            self.end(place, End(ended.outcome, ended.reason, int(journal.path.stat().st_mtime * 1000), kept=False))
        self.leave(place)
        return True

    def superseded(self, place: Place) -> bool:
        """Whether the trial was given to another attempt, which has the last word on it."""
        return self._ends.superseded(place.journal.head.trial, place.journal.head.attempt)

    @abstractmethod
    def tell(self, place: Place, entries: Sequence[Entry]) -> bool:
        """Tell of these, and move the place when that will last; return whether the last of them ends the journal."""

    @abstractmethod
    def end(self, place: Place, end: End) -> None:
        """Tell how a trial ended, of a journal that does not."""

    @abstractmethod
    def leave(self, place: Place) -> None:
        """Let go of a journal, of which nothing more is told here."""

    @abstractmethod
    def failure(self, error: Exception) -> Failure:
        """Return what an error means that came of telling."""

    @abstractmethod
    def refused(self, place: Place) -> None:
        """Take note that a journal waits for a person."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything, also of what `ship` waits for in another thread."""
