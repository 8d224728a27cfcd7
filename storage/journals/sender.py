"""Bringing journals to all readers of a study in the background while a worker trains, or at its end for whoever waits.

Each reader has a thread and a pace of its own, so that one that is away holds up no other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from hpsearch.storage.journals.journal import Journal
from hpsearch.storage.journals.outbox import Outbox
from hpsearch.storage.journals.reader import Reader
from hpsearch.storage.journals.reader_thread import LEFT_EVERY, ReaderThread

_LONGEST_REQUEST = 35.0  # seconds; see MLFLOW_HTTP_REQUEST_TIMEOUT


class Sender:
    """Brings the journals of this process, and those that dead ones left, to every reader of a study.

    Args:
        outbox: the study's outbox on this machine.
        readers: of the study.
        refused: whether to try again what a reader refused before.
    """

    def __init__(self, outbox: Outbox, readers: Sequence[Reader], *, refused: bool = False) -> None:
        self._outbox = outbox
        self._retry_refused = refused
        self._changed = threading.Condition()
        self._held: list[Journal] = []  # whose locks this process has
        self._adopting = threading.Lock()
        self._left_due = time.monotonic()
        self._threads = [
            ReaderThread(reader, self._changed, outbox.folder, begin=self._adopt, left=self._left) for reader in readers
        ]
        self._removing = 0  # journals that every reader has
        self.sent = 0  # those that are gone

    @property
    def away(self) -> str | None:
        """Why nothing is told now to some reader, for a person."""
        told = [(thread.reader, thread.away) for thread in self._threads if thread.away]
        if len(self._threads) == 1:
            return next((away for _, away in told), None)
        return "; ".join(f"{reader.title}: {away}" for reader, away in told) or None

    @property
    def behind(self) -> str:
        """The readers that have not been told all, for a person: ``MLflow has``, ``MLflow and TensorBoard have``."""
        with self._changed:
            titles = [thread.reader.title for thread in self._threads if thread.places]
        titles = titles or [thread.reader.title for thread in self._threads][:1]
        return f"{_joined(titles)} {'has' if len(titles) == 1 else 'have'}"

    @property
    def titles(self) -> str:
        """All readers, for a person."""
        return _joined([thread.reader.title for thread in self._threads])

    def start(self) -> None:
        """Begin to send."""
        for thread in self._threads:
            thread.start()

    def add(self, journal: Journal) -> None:
        """Send a journal that this process writes, from now on."""
        with self._changed:
            self._held.append(journal)
            for thread in self._threads:
                thread.places.append(journal.places[thread.reader.name])
        self.wake(at_once=True)

    def wake(self, *, at_once: bool = False) -> None:
        """Say that something was written; it goes out `at_once`, or within a second together with what follows."""
        with self._changed:
            # Woken for nothing, by every epoch, a thread would get in the way of the one that trains.
            woken = [thread.wake(at_once=at_once) for thread in self._threads]
            if any(woken):
                self._changed.notify_all()

    def flush(
        self,
        patience: float,
        tell: Callable[[int, int], None] = lambda _sent, _left: None,
        *,
        starting: float = 0.0,
    ) -> int:
        """Wait until everything has arrived, or for `patience` seconds; return how many journals are left.

        What stays away is not waited for: the next worker on this machine, or `hpsearch sync`, sends the rest.

        Args:
            patience: seconds.
            tell: is called with how many journals have arrived by now, and how many are left.
            starting: seconds to wait for a server that does not answer, for it may be on its way.
        """
        began = time.monotonic()
        deadline = began + patience
        with self._changed:
            before, seen = self.sent, [thread.rounds for thread in self._threads]
            self._left_due = time.monotonic()
            for thread in self._threads:
                thread.due = time.monotonic()
            self._changed.notify_all()
            while time.monotonic() < deadline:
                in_vain = time.monotonic() > began + starting
                idle = [t.idle(rounds, in_vain=in_vain) for t, rounds in zip(self._threads, seen, strict=True)]
                if all(idle) and not self._removing:
                    break
                self._changed.wait(min(deadline - time.monotonic(), 1.0))
                tell(self.sent - before, self._waiting())
            return self._waiting()

    def _waiting(self) -> int:
        return len({id(place.journal) for thread in self._threads for place in thread.places})

    def close(self) -> None:
        """Stop after the requests that are on their way; what is left is for others to send."""
        with self._changed:
            for thread in self._threads:
                thread.closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.reader.close()
        deadline = time.monotonic() + _LONGEST_REQUEST
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(deadline - time.monotonic(), 0.0))
        if not any(thread.is_alive() for thread in self._threads):
            for journal in self._held:
                journal.close()
            self._outbox.tidy()

    def _adopt(self) -> None:
        """Take over what dead processes left, and look again at what it was too early for; by any reader's thread."""
        with self._adopting:
            with self._changed:
                if time.monotonic() < self._left_due:
                    return
                self._left_due = time.monotonic() + LEFT_EVERY
                ours = list(self._held)
            for journal in ours:
                self._offer(journal)
            for journal in self._outbox.left():
                with self._changed:
                    self._held.append(journal)
                self._offer(journal, found=True)

    def _offer(self, journal: Journal, *, found: bool = False) -> None:
        """Give a journal to the readers that have not all of it; one that none will have is let go."""
        with self._changed:
            for thread in self._threads:
                place = journal.places[thread.reader.name]
                if place in thread.places or place.position.over:
                    continue
                if place.position.refused and not (found and self._retry_refused):
                    continue
                place.position.refused = None
                thread.places.append(place)
                thread.wake(at_once=True)  # it may be between two looks of its own
            self._changed.notify_all()
            after = self._left(journal)
        after()

    def _left(self, journal: Journal) -> Callable[[], None]:
        """Return how to remove a journal that every reader has, or to let a dead one go; with `changed`."""
        if journal not in self._held or any(journal.places[t.reader.name] in t.places for t in self._threads):
            return lambda: None
        if not journal.over:
            if journal.live:
                return lambda: None
            self._held.remove(journal)
            return journal.close
        self._held.remove(journal)
        self._removing += 1
        return lambda: self._remove(journal)

    def _remove(self, journal: Journal) -> None:
        journal.remove()
        with self._changed:
            self._removing -= 1
            self.sent += 1
            self._changed.notify_all()


def _joined(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
