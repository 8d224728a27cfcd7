"""Base class of the readers of journals: MLflow, TensorBoard, Weights & Biases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from hpsearch.storage.attributes import INFEASIBLE, REASON
from hpsearch.storage.database.statements import Database
from hpsearch.storage.errors import AwayError, StorageError, one_line
from hpsearch.storage.journals.journal import Entry, Journal, Place
from hpsearch.storage.journals.journal_records import End
from hpsearch.storage.trials.settle import Ended, Outcome


class RefusedError(StorageError):
    """A tracker that rejects a run permanently, for example because a person deleted it."""


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


_PATIENCE = 10.0  # seconds to wait for the database


class TrialEnds:
    """Who has the last word on a trial, and how it ended."""

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


class Reader(ABC):
    """Base class of what journals are sent to. One thread calls everything except `close`.

    Args:
        ends: the states of trials in the study's database.

    Attributes:
        name: of its thread and of its position files.
        title: the name to display.
    """

    name: str
    title: str

    def __init__(self, ends: TrialEnds) -> None:
        self._ends = ends

    def ship(self, place: Place) -> bool:
        """Send the unsent records of a journal; return whether this reader has all of it. Safe to repeat.

        Raises:
            NotYetError: a later attempt may report all of it again; try again later.
            LockHeldError: another process sends the same trial.
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
        if not journal.live and (not over or self.superseded(place)):
            # Its process died before it recorded how the trial ended.
            if (ended := self._ends.ended(journal.head.trial)) is not None:
                at = int(journal.path.stat().st_mtime * 1000)
                # The checkpoints of a failed trial stay: it may be retried.
                self.end(place, End(ended.outcome, ended.reason, at, kept=ended.outcome is not Outcome.FAILED))
            over = True
        if over:
            self.leave(place)
        return over

    def superseded(self, place: Place) -> bool:
        """Whether a later attempt owns the trial, and with it the state of its run."""
        return self._ends.superseded(place.journal.head.trial, place.journal.head.attempt)

    @abstractmethod
    def tell(self, place: Place, entries: Sequence[Entry]) -> bool:
        """Send records and move the place once they are stored; return whether the last of them ends the journal."""

    @abstractmethod
    def end(self, place: Place, end: End) -> None:
        """Send how a trial ended whose journal does not contain it."""

    @abstractmethod
    def leave(self, place: Place) -> None:
        """Release what is held for a journal; nothing more of it is sent from here."""

    def failure(self, error: Exception) -> Failure:
        """Return the meaning of an error raised by `ship`: unless it is a refusal or a bug, try again later."""
        is_known = isinstance(error, OSError | StorageError)
        can_pass = is_known and not isinstance(error, RefusedError)
        is_away = isinstance(error, OSError | AwayError)
        return Failure(one_line(error), passes=can_pass, everything=is_away, expected=is_known)

    def refused(self, place: Place) -> None:  # noqa: B027 optional
        """Record that a journal waits for a person, as its position says; by default nothing else records it."""

    def close(self) -> None:  # noqa: B027 optional
        """Release everything, also what `ship` waits for in another thread; by default there is nothing."""
