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
    """A run that a tracker rejects permanently, for example because a user deleted the run."""


class OutcomePendingError(Exception):
    """A journal of an earlier attempt of a running trial.

    Whether this journal must be sent depends on the outcome of the later attempt.
    """


@dataclass(frozen=True)
class Failure:
    """The classification of an error that a consumer raised.

    Attributes:
        text: the error as one line.
        is_transient: whether a retry may succeed; if not, a user must act.
        is_service_down: whether sending other journals would fail too; then sending stops until the next round.
        is_expected: whether this kind of error is expected, so that it is logged without a traceback.
    """

    text: str
    is_transient: bool
    is_service_down: bool = False
    is_expected: bool = True


_DATABASE_TIMEOUT_SECONDS = 10.0


class TrialOutcomes:
    """Queries on the study's database for the outcomes of trials, and for the attempts that own trials."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._database = Database(engine, _DATABASE_TIMEOUT_SECONDS)

    def is_superseded(self, trial_id: int, attempt: int) -> bool:
        """Return whether a later attempt owns the trial, so that this attempt must not change the state of the run."""
        return bool(self._database.fetch_rows(_HAS_LATER_ATTEMPT, {"trial": trial_id, "attempt": attempt})[0].later)

    def is_superseded_and_finished(self, journal: Journal) -> bool:
        """Return whether a later attempt has finished the trial without failure, so that the journal is obsolete.

        The journal of the later attempt then contains the whole trial.

        Raises:
            OutcomePendingError: a later attempt runs the trial, and may die before it has recorded the whole trial.
        """
        if not self.is_superseded(journal.header.trial, journal.header.attempt):
            return False
        if (ended := self.read_outcome(journal.header.trial)) is None:
            raise OutcomePendingError
        return ended.outcome is not Outcome.FAILED

    def read_outcome(self, trial_id: int) -> TrialEnd | None:
        """Return the outcome of a trial; None if the trial is running or waiting, or was deleted."""
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
        name: the consumer's name in the names of threads and position files.
        title: the consumer's name in messages for users.
    """

    name: str
    title: str

    def __init__(self, outcomes: TrialOutcomes) -> None:
        self._outcomes = outcomes

    def check_service(self) -> None:  # noqa: B027 optional
        """Check quickly that the service answers; called before the first records and after each failure.

        Raises:
            ServiceUnavailableError: the service does not answer.
        """

    def consume(self, cursor: Cursor) -> bool:
        """Send the pending records of a journal, and return whether the service now has the whole journal.

        Safe to repeat.

        Raises:
            OutcomePendingError: a later attempt of the trial is running; try again after it has ended.
            LockHeldError: another process sends records of the same trial.
            Exception: an error of the service, which `classify_error` classifies.
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
            # The process that wrote the journal died before it recorded the outcome.
            if (ended := self._outcomes.read_outcome(journal.header.trial)) is not None:
                at = int(journal.path.stat().st_mtime * 1000)
                # The checkpoints of a failed trial are kept, because a user may retry the trial.
                is_kept = ended.outcome is not Outcome.FAILED
                self.write_outcome(cursor, End(ended.outcome, ended.reason, at, is_kept))
            is_complete = True
        if is_complete:
            self.release(cursor)
        return is_complete

    def is_superseded(self, cursor: Cursor) -> bool:
        """Return whether a later attempt owns the trial, so that this journal must not change the state of the run."""
        return self._outcomes.is_superseded(cursor.journal.header.trial, cursor.journal.header.attempt)

    @abstractmethod
    def write_records(self, cursor: Cursor, entries: Sequence[JournalEntry]) -> bool:
        """Send records, and commit the cursor once the service has stored them.

        Returns:
            Whether the last record ends the journal.
        """

    @abstractmethod
    def write_outcome(self, cursor: Cursor, end: End) -> None:
        """Send the outcome of a trial whose journal does not contain the outcome."""

    @abstractmethod
    def release(self, cursor: Cursor) -> None:
        """Release the resources for a journal, after this process has sent its last record of the journal."""

    def classify_error(self, error: Exception) -> Failure:
        """Return the classification of an error that `consume` raised; rejections and bugs are permanent by default."""
        is_known = isinstance(error, OSError | StorageError)
        can_pass = is_known and not isinstance(error, RunRejectedError)
        is_unavailable = isinstance(error, OSError | ServiceUnavailableError)
        return Failure(format_error(error), is_transient=can_pass, is_service_down=is_unavailable, is_expected=is_known)

    def on_rejected(self, cursor: Cursor) -> None:  # noqa: B027 optional
        """Record a permanent rejection, whose reason is in `cursor.position`; by default do nothing."""

    def close(self) -> None:  # noqa: B027 optional
        """Release all resources and interrupt a `consume` in another thread; by default do nothing."""
