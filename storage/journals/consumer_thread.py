"""The thread that sends journals to one consumer, independently of the other consumers."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from hpsearch.storage.database.locks import LockHeldError
from hpsearch.storage.journals.consumer import Consumer, Failure, OutcomePendingError
from hpsearch.storage.journals.journal import Cursor, Journal

log = logging.getLogger(__name__)

BATCH_SECONDS = 1.0  # period for which epochs are collected, to be sent together
ORPHAN_SCAN_SECONDS = 30.0  # interval between two scans for journals whose writers died
_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 0.5, 5.0  # wait between two rounds while a service is unavailable
_MAX_FAILURES = 3  # number of consecutive failures after which `flush` no longer waits for a service


class ConsumerThread(threading.Thread):
    """A thread that sends journals to a consumer, in rounds.

    Readers and writers of the thread's attributes hold `changed`. Writers notify `changed` after a change.

    Attributes:
        cursors: the cursors of the journals to send.
        next_round: the time of the next round, by `time.monotonic`.
        is_closing: whether to stop after the request in flight.
        unavailable_reason: the error because of which the service is unavailable; None if it is available.
        round_count: the number of finished rounds.

    Args:
        consumer: the consumer that receives the journals.
        changed: the condition that guards the attributes; held for short times only.
        folder: the folder of the outbox, for messages.
        before_round: a function that is called before each round; it may add journals.
        on_finished: a function that is called with each journal that this thread has finished with, while `changed` is
            held. It returns a function, which is called after `changed` is released.
    """

    def __init__(
        self,
        consumer: Consumer,
        changed: threading.Condition,
        folder: object,
        *,
        before_round: Callable[[], None],
        on_finished: Callable[[Journal], Callable[[], None]],
    ) -> None:
        super().__init__(name=f"{consumer.name}-sender", daemon=True)
        self.consumer = consumer
        self.cursors: list[Cursor] = []
        self.next_round = time.monotonic()
        self.is_closing = False
        self.unavailable_reason: str | None = None
        self.round_count = 0
        self._changed, self._folder, self._before_round, self._on_finished = changed, folder, before_round, on_finished
        self._failures = 0  # number of consecutive failed rounds
        self._has_answered = False  # whether the service has answered
        self._locked_rounds = 0  # number of consecutive rounds in which another process held the lock of a trial

    def wake(self, *, is_urgent: bool) -> bool:
        """Schedule a round for new records; the caller must hold `changed`.

        Args:
            is_urgent: whether to send immediately; otherwise records are sent within `BATCH_SECONDS`.

        Returns:
            Whether the next round was moved forward, so that the caller must notify `changed`.
        """
        next_round = time.monotonic() + (0.0 if is_urgent else BATCH_SECONDS)
        if next_round >= self.next_round or self._failures:
            return False
        self.next_round = next_round
        return True

    def is_drained(self, since_round: int, *, should_give_up: bool) -> bool:
        """Return whether a caller that waits for this thread should stop waiting; the caller must hold `changed`.

        This is the case if a round after `since_round` has finished and all journals are sent, or if the thread ended.

        Args:
            since_round: the value of `round_count` at the start of the wait.
            should_give_up: whether to stop waiting for an unavailable service after three consecutive failures.
        """
        is_hopeless = should_give_up and max(self._failures, self._locked_rounds) >= _MAX_FAILURES
        return not self.is_alive() or (self.round_count > since_round and (is_hopeless or not self.cursors))

    def run(self) -> None:
        """Send records in rounds until `is_closing` is set."""
        while True:
            with self._changed:
                while not self.is_closing and (wait := self.next_round - time.monotonic()) > 0:
                    self._changed.wait(wait)
                if self.is_closing:
                    return
                self.next_round = time.monotonic() + ORPHAN_SCAN_SECONDS
            self._before_round()
            failure = self._send_round()
            with self._changed:
                self.round_count += 1
                self._schedule_after(failure)
                self._changed.notify_all()

    def _send_round(self) -> Failure | None:
        """Send the pending records of every journal once; return the first transient failure."""
        first_failure: Failure | None = None
        is_locked = False
        with self._changed:
            cursors = list(self.cursors)
        for cursor in cursors:
            if cursor.journal.is_live:
                cursor.journal.sync()
        if cursors and (outage := self._find_outage()) is not None:
            return outage
        for cursor in cursors:
            if self.is_closing:
                break
            try:
                if self.consumer.consume(cursor):
                    self._complete(cursor)
            except OutcomePendingError:
                self._drop(cursor)
            except LockHeldError:
                is_locked = True
            except Exception as error:  # a failure with one journal must not stop the other journals
                failure = self.consumer.classify_error(error)
                if isinstance(error, SQLAlchemyError):  # the study's database is unavailable, not the service
                    failure = Failure(failure.text, is_transient=True, is_service_down=True)
                if not failure.is_transient:
                    self._reject(cursor, failure, error)
                    continue
                first_failure = first_failure or failure
                if failure.is_service_down:
                    break
        self._locked_rounds = self._locked_rounds + 1 if is_locked else 0
        return first_failure

    def _find_outage(self) -> Failure | None:
        """Check the service before the first records and after a failed round; return the failure, or None."""
        if self._failures or not self._has_answered:
            try:
                self.consumer.check_service()
            except Exception as error:
                return self.consumer.classify_error(error)
            self._has_answered = True
        return None

    def _complete(self, cursor: Cursor) -> None:
        cursor.position.is_consumed = True
        if len(cursor.journal.cursors) > 1:  # otherwise the journal is removed immediately
            cursor.save()
        self._drop(cursor)

    def _drop(self, cursor: Cursor) -> None:
        with self._changed:
            self.cursors.remove(cursor)
            after_release = self._on_finished(cursor.journal)
        after_release()

    def _reject(self, cursor: Cursor, failure: Failure, error: Exception) -> None:
        """Set aside a journal that the service rejected: the journal stays on disk until a user starts a retry."""
        header = cursor.journal.header
        log.warning(
            "trial %s: upload to %s failed permanently (%s); retry with: hpsearch sync %s",
            *(header.number, self.consumer.title, failure.text, header.study),
            exc_info=None if failure.is_expected else error,
        )
        cursor.position.rejection = failure.text
        cursor.save()
        with contextlib.suppress(SQLAlchemyError):
            self.consumer.on_rejected(cursor)
        self._drop(cursor)

    def _schedule_after(self, failure: Failure | None) -> None:
        """Schedule the next round, with exponential backoff if the last round ended with a failure."""
        title = self.consumer.title
        self.unavailable_reason = None if failure is None else failure.text
        if failure is not None:
            if not self._failures:
                log.warning("%s unavailable (%s); unsent records are in %s", title, failure.text, self._folder)
            wait = min(_MIN_BACKOFF_SECONDS * 2**self._failures, _MAX_BACKOFF_SECONDS)
            self._failures += 1
            self.next_round = time.monotonic() + wait * random.uniform(0.5, 1.0)  # noqa: S311 not for secrets
        elif self._failures:
            log.warning("%s available again; sending resumes", title)
            self._failures = 0
        if self._locked_rounds:
            self.next_round = min(self.next_round, time.monotonic() + _MAX_BACKOFF_SECONDS)
