"""Base class of the consumers of journals: MLflow, TensorBoard, Weights & Biases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from hpsearch.storage.attributes import INFEASIBLE, REASON
from hpsearch.storage.database.statements import Database
from hpsearch.storage.errors import ServiceUnavailableError, StorageError, format_error
from hpsearch.storage.journals.journal import Cursor, Journal, JournalEntry
from hpsearch.storage.journals.journal_records import End
from hpsearch.storage.trials.finishing import Outcome, TrialEnd


class RunRejectedError(StorageError):
    """A tracker that rejects a run permanently, for example because a user deleted it."""


class OutcomePendingError(Exception):
    """A journal whose trial is running in a later attempt: whether it must be sent is known when the trial ends."""


@dataclass(frozen=True)
class Failure:
    """The meaning of an error that a consumer raised.

    Attributes:
        text: the error as one line.
        is_transient: whether a retry may succeed; otherwise a user must act.
        is_service_down: whether the other journals would fail too, so that sending stops until the next round.
        is_expected: whether the kind of error is known, so that the log needs no traceback.
    """

    text: str
    is_transient: bool
    is_service_down: bool = False
    is_expected: bool = True


_DATABASE_TIMEOUT_SECONDS = 10.0


class TrialOutcomes:
    """The outcomes of trials, and which attempt owns a trial, as stored in the study's database."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._database = Database(engine, _DATABASE_TIMEOUT_SECONDS)

    def is_superseded(self, trial_id: int, attempt: int) -> bool:
        """Return whether a later attempt owns the trial, and with it the state of its run."""
        return bool(self._database.fetch_rows(_HAS_LATER_ATTEMPT, {"trial": trial_id, "attempt": attempt})[0].later)

    def is_superseded_and_finished(self, journal: Journal) -> bool:
        """Return whether a later attempt has finished the trial and reported all of it, so that this one is obsolete.

        Raises:
            OutcomePendingError: a later attempt runs the trial, and may die before it has reported all of it.
        """
        if not self.is_superseded(journal.header.trial, journal.header.attempt):
            return False
        ended = self.read_outcome(journal.header.trial)
        if ended is None:
            raise OutcomePendingError
        return ended.outcome is not Outcome.FAILED

    def read_outcome(self, trial_id: int) -> TrialEnd | None:
        """Return the outcome of a trial; None if it is running or waiting, or was deleted."""
        arguments = {"trial": trial_id, "infeasible": INFEASIBLE, "reason": REASON}
        for row in self._database.fetch_rows(_READ_OUTCOME, arguments):
            return TrialEnd(Outcome.from_trial_state(row.state, infeasible=bool(row.infeasible)), row.reason or "")
        return None


_HAS_LATER_ATTEMPT = sa.text("""
    SELECT EXISTS (SELECT FROM hpsearch_attempts WHERE trial_id = :trial AND attempt > :attempt) AS later
""")
_READ_OUTCOME = sa.text("""
    SELECT t.state, reason.value_json::jsonb #>> '{}' AS reason, infeasible.value_json = 'true' AS infeasible
      FROM trials t
      LEFT JOIN trial_user_attributes reason ON reason.trial_id = t.trial_id AND reason.key = :reason
      LEFT JOIN trial_user_attributes infeasible
             ON infeasible.trial_id = t.trial_id AND infeasible.key = :infeasible
     WHERE t.trial_id = :trial AND t.state NOT IN ('RUNNING', 'WAITING')
""")


class Consumer(ABC):
    """Base class of the consumers of journals. One thread calls all methods except `close`.

    Args:
        outcomes: the outcomes of trials in the study's database.

    Attributes:
        name: the name in thread names and position files.
        title: the name to display.
    """

    name: str
    title: str

    def __init__(self, outcomes: TrialOutcomes) -> None:
        self._outcomes = outcomes

    def consume(self, cursor: Cursor) -> bool:
        """Send the pending records of a journal; return whether the consumer now has all of it. Safe to repeat.

        Raises:
            OutcomePendingError: a later attempt may report all of the trial; try again later.
            LockHeldError: another process sends the same trial.
            Exception: see `classify_error`.
        """
        journal = cursor.journal
        entries = cursor.read_pending()
        try:
            if not journal.is_live and self._outcomes.is_superseded_and_finished(journal):
                self.release(cursor)
                return True
            is_complete = self.write_records(cursor, entries)
        finally:
            cursor.release_buffered_lines()
        if not journal.is_live and (not is_complete or self.is_superseded(cursor)):
            # The writer died before it recorded the outcome.
            if (ended := self._outcomes.read_outcome(journal.header.trial)) is not None:
                at = int(journal.path.stat().st_mtime * 1000)
                # The checkpoints of a failed trial stay: it may be retried.
                self.write_outcome(
                    cursor, End(ended.outcome, ended.reason, at, kept=ended.outcome is not Outcome.FAILED)
                )
            is_complete = True
        if is_complete:
            self.release(cursor)
        return is_complete

    def is_superseded(self, cursor: Cursor) -> bool:
        """Return whether a later attempt owns the trial, and with it the state of its run."""
        return self._outcomes.is_superseded(cursor.journal.header.trial, cursor.journal.header.attempt)

    @abstractmethod
    def write_records(self, cursor: Cursor, entries: Sequence[JournalEntry]) -> bool:
        """Send records and commit the cursor once they are stored; return whether the last of them ends the journal."""

    @abstractmethod
    def write_outcome(self, cursor: Cursor, end: End) -> None:
        """Send the outcome of a trial whose journal does not contain it."""

    @abstractmethod
    def release(self, cursor: Cursor) -> None:
        """Release the resources held for a journal, of which this process sends nothing more."""

    def classify_error(self, error: Exception) -> Failure:
        """Return the meaning of an error raised by `consume`: transient, unless it is a rejection or a bug."""
        is_known = isinstance(error, OSError | StorageError)
        can_pass = is_known and not isinstance(error, RunRejectedError)
        is_unavailable = isinstance(error, OSError | ServiceUnavailableError)
        return Failure(format_error(error), is_transient=can_pass, is_service_down=is_unavailable, is_expected=is_known)

    def on_rejected(self, cursor: Cursor) -> None:  # noqa: B027 optional
        """Record a permanent rejection, whose reason is in the cursor's position; by default do nothing."""

    def close(self) -> None:  # noqa: B027 optional
        """Release all resources and interrupt a `consume` in another thread; by default do nothing."""
