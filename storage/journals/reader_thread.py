"""The thread that brings journals to one reader, at that reader's pace."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from hpsearch.storage.database.locks import LockHeldError
from hpsearch.storage.journals.journal import Journal, Place
from hpsearch.storage.journals.reader import Failure, NotYetError, Reader

log = logging.getLogger(__name__)

INTERVAL = 1.0  # seconds in which epochs gather before they are brought on together
LEFT_EVERY = 30.0  # seconds between two looks for journals whose writers died
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 5.0  # seconds between two tries while something is away
_ENOUGH = 3  # failures in a row after which nobody waits for what is away


class ReaderThread(threading.Thread):
    """Sends the journals that it is given to a reader, again and again.

    Its attributes are used with `changed`, which is notified after a change.

    Attributes:
        places: of the journals that are sent.
        due: the time of the next round, of `time.monotonic`.
        closing: whether to stop after the request that is on its way.
        away: why nothing is sent now.
        rounds: the number of rounds that are done.

    Args:
        reader: receives the journals.
        changed: notified when a round is done; held for a moment only.
        folder: where what is not told yet waits, for messages.
        begin: called before each round; it may add journals.
        left: called, with `changed`, with a journal that this thread is done with, for now or for good; returns what is
            to be done after that.
    """

    def __init__(
        self,
        reader: Reader,
        changed: threading.Condition,
        folder: object,
        *,
        begin: Callable[[], None],
        left: Callable[[Journal], Callable[[], None]],
    ) -> None:
        super().__init__(name=f"{reader.name}-sender", daemon=True)
        self.reader = reader
        self.places: list[Place] = []
        self.due = time.monotonic()
        self.closing = False
        self.away: str | None = None
        self.rounds = 0
        self._changed, self._folder, self._begin, self._left = changed, folder, begin, left
        self._failures = 0  # in a row
        self._locked = 0  # rounds in a row in which somebody else was at the trial of a journal

    def wake(self, *, at_once: bool) -> bool:
        """Say that something was written; return whether `changed`, which the caller has, is to be notified."""
        due = time.monotonic() + (0.0 if at_once else INTERVAL)
        if due >= self.due or self._failures:
            return False
        self.due = due
        return True

    def idle(self, since: int, *, in_vain: bool) -> bool:
        """Whether nothing is to be waited for after the round `since`; with `changed`.

        Args:
            since: a number of rounds.
            in_vain: whether what has been away for some tries is waited for no longer.
        """
        away = in_vain and max(self._failures, self._locked) >= _ENOUGH
        return not self.is_alive() or (self.rounds > since and (away or not self.places))

    def run(self) -> None:
        """Work until `closing`."""
        while True:
            with self._changed:
                while not self.closing and (wait := self.due - time.monotonic()) > 0:
                    self._changed.wait(wait)
                if self.closing:
                    return
                self.due = time.monotonic() + LEFT_EVERY
            self._begin()
            away = self._round()
            with self._changed:
                self.rounds += 1
                self._pace(away)
                self._changed.notify_all()

    def _round(self) -> Failure | None:
        """Bring on every journal once; return what is away, if anything is."""
        away: Failure | None = None
        locked = False
        with self._changed:
            places = list(self.places)
        for place in places:
            if place.journal.live:
                place.journal.sync()
        for place in places:
            if self.closing:
                break
            try:
                if self.reader.ship(place):
                    self._over(place)
            except NotYetError:
                self._drop(place)
            except LockHeldError:
                locked = True
            except Exception as error:  # a journal that cannot be told must not end the telling
                failure = self.reader.failure(error)
                if isinstance(error, SQLAlchemyError):  # the study's own database, whoever the reader is
                    failure = Failure(failure.text, passes=True, everything=True)
                if not failure.passes:
                    self._refuse(place, failure, error)
                    continue
                away = away or failure
                if failure.everything:
                    break  # the others would only wait for it as well
        self._locked = self._locked + 1 if locked else 0
        return away

    def _over(self, place: Place) -> None:
        place.position.over = True
        if len(place.journal.places) > 1:  # else the journal goes at once
            place.save()
        self._drop(place)

    def _drop(self, place: Place) -> None:
        with self._changed:
            self.places.remove(place)
            after = self._left(place.journal)
        after()

    def _refuse(self, place: Place, failure: Failure, error: Exception) -> None:
        """Put a journal aside that the reader will not have: it stays on disk until a person asks for another try."""
        head = place.journal.head
        log.warning(
            "trial %s is not told to %s any more: %s; try again with: hpsearch sync %s",
            *(head.number, self.reader.title, failure.text, head.study),
            exc_info=None if failure.expected else error,
        )
        place.position.refused = failure.text
        place.save()
        with contextlib.suppress(SQLAlchemyError):
            self.reader.refused(place)
        self._drop(place)

    def _pace(self, away: Failure | None) -> None:
        title = self.reader.title
        self.away = None if away is None else away.text
        if away is not None:
            if not self._failures:
                log.warning("%s is told later (%s); until then it waits in %s", title, self.away, self._folder)
            wait = min(_FIRST_WAIT * 2**self._failures, _LONGEST_WAIT)
            self._failures += 1
            self.due = time.monotonic() + wait * random.uniform(0.5, 1.0)  # noqa: S311 not for secrets
        elif self._failures:
            log.warning("%s is told again", title)
            self._failures = 0
        if self._locked:
            self.due = min(self.due, time.monotonic() + _LONGEST_WAIT)
