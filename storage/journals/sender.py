"""Send journals to all consumers of a study, in the background or while a caller waits.

Each consumer has its own thread, so an unavailable service does not delay the other services.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from hpsearch.storage.journals.consumer import Consumer
from hpsearch.storage.journals.consumer_thread import ORPHAN_SCAN_SECONDS, ConsumerThread
from hpsearch.storage.journals.journal import Journal
from hpsearch.storage.journals.outbox import Outbox

_REQUEST_TIMEOUT_SECONDS = 35.0  # slightly more than MLFLOW_HTTP_REQUEST_TIMEOUT


class Sender:
    """Sends the journals of this process, and orphaned journals of dead processes, to all consumers of a study.

    Args:
        outbox: the study's outbox on this machine.
        consumers: the consumers of the study.
        should_retry_rejected: whether to retry journals that a consumer rejected earlier.
    """

    def __init__(self, outbox: Outbox, consumers: Sequence[Consumer], *, should_retry_rejected: bool = False) -> None:
        self._outbox = outbox
        self._should_retry_rejected = should_retry_rejected
        self._changed = threading.Condition()
        self._locked_journals: list[Journal] = []  # journals whose locks this process holds
        self._adoption_lock = threading.Lock()
        self._next_scan = time.monotonic()
        self._threads = [
            ConsumerThread(
                consumer, self._changed, outbox.folder, before_round=self._adopt_orphans, on_finished=self._finish
            )
            for consumer in consumers
        ]
        self._retried: set[tuple[str, str]] = set()  # orphaned journals that were assigned to a consumer, by names
        self._removing = 0  # fully consumed journals whose removal is in progress
        self.sent_trial_numbers: set[str] = set()  # trials with fully consumed and removed journals

    @property
    def unavailable_reason(self) -> str | None:
        """The reason why a service is unavailable, as text for users; None if all services are available."""
        reasons = [(each.consumer, each.unavailable_reason) for each in self._threads if each.unavailable_reason]
        if len(self._threads) == 1:
            return next((reason for _, reason in reasons), None)
        return "; ".join(f"{consumer.title}: {reason}" for consumer, reason in reasons) or None

    @property
    def lagging_consumers(self) -> str:
        """The titles of the consumers that lack records, as text for users, e.g. ``MLflow and TensorBoard``."""
        with self._changed:
            titles = [thread.consumer.title for thread in self._threads if thread.cursors]
        return _join_words(titles or [self._threads[0].consumer.title])

    @property
    def consumer_titles(self) -> str:
        """The titles of all consumers, as text for users."""
        return _join_words([thread.consumer.title for thread in self._threads])

    def start(self) -> None:
        """Start sending."""
        for thread in self._threads:
            thread.start()

    def add(self, journal: Journal) -> None:
        """Start sending a journal that this process writes."""
        with self._changed:
            self._locked_journals.append(journal)
            for thread in self._threads:
                thread.cursors.append(journal.cursors[thread.consumer.name])
        self.wake(is_urgent=True)

    def wake(self, *, is_urgent: bool = False) -> None:
        """Schedule the sending of new records: immediately if `is_urgent`, else in a batch within a second."""
        with self._changed:
            # Threads that wake at every epoch without need would slow down the training thread.
            wakes = [thread.wake(is_urgent=is_urgent) for thread in self._threads]
            if any(wakes):
                self._changed.notify_all()

    def flush(
        self,
        timeout_seconds: float,
        on_progress: Callable[[int, int], None] = lambda _sent, _left: None,
        *,
        startup_seconds: float = 0.0,
    ) -> int:
        """Wait until every consumer has stored all journals, and return the number of trials whose journals are left.

        The method does not wait for a service that stays unavailable. The next worker on this machine, or
        `hpsearch sync`, then sends the remaining journals.

        Args:
            timeout_seconds: the longest time to wait.
            on_progress: a function that is called with the number of sent trials and the number of trials left.
            startup_seconds: the time to wait for a service that does not answer, because it may be starting.
        """
        began = time.monotonic()
        deadline = began + timeout_seconds
        with self._changed:
            rounds_before = [thread.round_count for thread in self._threads]
            self._next_scan = time.monotonic()
            for thread in self._threads:
                thread.next_round = time.monotonic()
            self._changed.notify_all()
            while time.monotonic() < deadline:
                should_give_up = time.monotonic() > began + startup_seconds
                are_drained = [
                    thread.is_drained(rounds, should_give_up=should_give_up)
                    for thread, rounds in zip(self._threads, rounds_before, strict=True)
                ]
                if all(are_drained) and not self._removing:
                    break
                self._changed.wait(min(deadline - time.monotonic(), 1.0))
                pending = self._find_pending_trials()
                on_progress(len(self.sent_trial_numbers - pending), len(pending))
            return len(self._find_pending_trials())

    def _find_pending_trials(self) -> set[str]:
        return {cursor.journal.trial_number for thread in self._threads for cursor in thread.cursors}

    def close(self) -> None:
        """Stop sending after the requests in flight; other processes send the remaining records."""
        with self._changed:
            for thread in self._threads:
                thread.is_closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.consumer.close()
        deadline = time.monotonic() + _REQUEST_TIMEOUT_SECONDS
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(deadline - time.monotonic(), 0.0))
        if not any(thread.is_alive() for thread in self._threads):
            for journal in self._locked_journals:
                journal.close()
            self._outbox.clean_up()

    def _adopt_orphans(self) -> None:
        """Take over orphaned journals, and assign journals with a pending outcome again; every thread calls this."""
        with self._adoption_lock:
            with self._changed:
                if time.monotonic() < self._next_scan:
                    return
                self._next_scan = time.monotonic() + ORPHAN_SCAN_SECONDS
                locked_journals = list(self._locked_journals)
            for journal in locked_journals:
                self._assign(journal)
            for journal in self._outbox.take_orphaned_journals():
                with self._changed:
                    self._locked_journals.append(journal)
                self._assign(journal, is_orphan=True)

    def _assign(self, journal: Journal, *, is_orphan: bool = False) -> None:
        """Add a journal to the threads of the consumers that lack records of it; release it if no consumer does."""
        with self._changed:
            for thread in self._threads:
                cursor = journal.cursors[thread.consumer.name]
                if cursor in thread.cursors or cursor.position.is_consumed:
                    continue
                attempt = (journal.name, thread.consumer.name)
                may_retry = is_orphan and self._should_retry_rejected and attempt not in self._retried
                if cursor.position.rejection and not may_retry:
                    continue
                if is_orphan:
                    self._retried.add(attempt)
                cursor.position.rejection = None
                thread.cursors.append(cursor)
                thread.wake(is_urgent=True)  # its next round may be half a minute away
            self._changed.notify_all()
            after_release = self._finish(journal)
        after_release()

    def _finish(self, journal: Journal) -> Callable[[], None]:
        """Return a function that removes or releases the journal if no thread needs it; the caller holds `changed`.

        A fully consumed journal is removed. An orphaned journal that cannot be sent now is released. For other
        journals, the function does nothing.
        """
        is_in_use = any(journal.cursors[thread.consumer.name] in thread.cursors for thread in self._threads)
        if journal not in self._locked_journals or is_in_use:
            return lambda: None
        if not journal.is_fully_consumed:
            if journal.is_live:
                return lambda: None
            self._locked_journals.remove(journal)
            return journal.close
        self._locked_journals.remove(journal)
        self._removing += 1
        return lambda: self._remove(journal)

    def _remove(self, journal: Journal) -> None:
        journal.remove()
        with self._changed:
            self._removing -= 1
            self.sent_trial_numbers.add(journal.trial_number)
            self._changed.notify_all()


def _join_words(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
