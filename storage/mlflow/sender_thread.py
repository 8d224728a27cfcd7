"""Shipping journals in the background while a worker trains, or at its end for whoever waits."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from storage.database.locks import LockHeldError
from storage.errors import StorageError
from storage.mlflow.client import RunDeletedError
from storage.mlflow.health import is_away, one_line, unreachable
from storage.mlflow.outbox import Journal, Outbox
from storage.mlflow.shipper import NotYetError, Shipper

log = logging.getLogger(__name__)

_INTERVAL = 1.0  # seconds in which epochs gather before they are sent together
_LEFT_EVERY = 30.0  # seconds between two looks for journals whose writers died
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 5.0  # seconds between two tries while something is away
_ENOUGH = 3  # failures in a row after which nobody waits for what is away
_LONGEST_REQUEST = 35.0  # seconds; see MLFLOW_HTTP_REQUEST_TIMEOUT


class Sender:
    """Ships the journals of this process, and those that dead ones left, in a thread of its own.

    Args:
        outbox: the study's outbox on this machine.
        shipper: ships a journal.
        refused: whether to try again what MLflow refused before.
    """

    def __init__(self, outbox: Outbox, shipper: Shipper, *, refused: bool = False) -> None:
        self._outbox = outbox
        self._shipper = shipper
        self._retry_refused = refused
        self._journals: list[Journal] = []
        self._refused: list[Journal] = []  # of trials that run on
        self._changed = threading.Condition()
        self._due = time.monotonic()  # of the next round
        self._left_due = time.monotonic()
        self._closing = False
        self._failures = 0  # in a row
        self._locked = 0  # rounds in a row in which somebody else had the run of a journal's trial
        self._rounds = 0
        self._thread = threading.Thread(target=self._work, name="mlflow-sender", daemon=True)
        self.away: str | None = None  # why nothing is shipped now
        self.sent = 0  # journals that arrived whole

    def start(self) -> None:
        """Begin to ship."""
        self._thread.start()

    def add(self, journal: Journal) -> None:
        """Ship a journal that this process writes, from now on."""
        with self._changed:
            self._journals.append(journal)
        self.wake(at_once=True)

    def wake(self, *, at_once: bool = False) -> None:
        """Say that something was written; it goes out `at_once`, or within a second together with what follows."""
        with self._changed:
            due = time.monotonic() + (0.0 if at_once else _INTERVAL)
            if due < self._due and not self._failures:
                self._due = due
                self._changed.notify_all()

    def flush(
        self,
        patience: float,
        tell: Callable[[int, int], None] = lambda _sent, _left: None,
        *,
        starting: float = 0.0,
    ) -> int:
        """Wait until everything has arrived, or for `patience` seconds; return how many journals are left.

        A server that stays away is not waited for: the next worker on this machine, or `hpsearch sync`, sends the rest.

        Args:
            patience: seconds.
            tell: is called with how many journals have arrived by now, and how many are left.
            starting: seconds to wait for a server that does not answer, for it may be on its way.
        """
        began = time.monotonic()
        deadline = began + patience
        with self._changed:
            before, seen = self.sent, self._rounds
            self._due = self._left_due = time.monotonic()
            self._changed.notify_all()
            while self._thread.is_alive() and time.monotonic() < deadline:
                in_vain = max(self._failures, self._locked) >= _ENOUGH and time.monotonic() > began + starting
                if self._rounds > seen and (in_vain or not self._journals):
                    break
                self._changed.wait(min(deadline - time.monotonic(), 1.0))
                tell(self.sent - before, len(self._journals))
            return len(self._journals)

    def close(self) -> None:
        """Stop after the request that is on its way; what is left is for others to ship."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout=_LONGEST_REQUEST)
        if not self._thread.is_alive():
            for journal in [*self._journals, *self._refused]:
                journal.close()
            self._outbox.tidy()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closing and (wait := self._due - time.monotonic()) > 0:
                    self._changed.wait(wait)
                if self._closing:
                    return
                self._due = time.monotonic() + _LEFT_EVERY
            if time.monotonic() >= self._left_due:
                self._left_due = time.monotonic() + _LEFT_EVERY
                self._adopt()
            away = self._round()
            with self._changed:
                self._rounds += 1
                self._pace(away)
                self._changed.notify_all()

    def _adopt(self) -> None:
        for journal in self._outbox.left():
            if journal.position.refused and not self._retry_refused:
                journal.close()
                continue
            journal.position.refused = None
            with self._changed:
                self._journals.append(journal)

    def _round(self) -> Exception | None:
        """Ship every journal once; return what is away, if anything is."""
        away: Exception | None = None
        locked = False
        for journal in list(self._journals):
            if journal.live:
                journal.sync()
        for journal in list(self._journals):
            if self._closing:
                break
            try:
                if self._shipper.ship(journal):
                    journal.remove()
                    self._over(journal)
            except NotYetError:
                journal.close()
                self._drop(journal)
            except LockHeldError:
                locked = True
            except Exception as error:  # a journal that cannot be shipped must not end the shipping
                if not _passes(error):
                    self._refuse(journal, error)
                    continue
                away = away or error
                if isinstance(error, SQLAlchemyError) or unreachable(error):
                    break  # the others would only wait for it as well
        self._locked = self._locked + 1 if locked else 0
        return away

    def _over(self, journal: Journal) -> None:
        self.sent += not journal.position.refused
        self._drop(journal)

    def _drop(self, journal: Journal) -> None:
        with self._changed:
            self._journals.remove(journal)
            self._changed.notify_all()

    def _refuse(self, journal: Journal, error: Exception) -> None:
        """Put a journal aside that MLflow will not have: it stays on disk until a person asks for another try."""
        expected = isinstance(error, StorageError | OSError) or type(error).__module__.startswith("mlflow")
        log.warning(
            "trial %s is not told to MLflow any more: %s; try again with: hpsearch sync %s",
            *(journal.head.number, one_line(error), journal.head.study),
            exc_info=None if expected else error,
        )
        journal.position.refused = one_line(error)
        journal.moved([])
        with contextlib.suppress(SQLAlchemyError):
            self._shipper.refused(journal)
        self._over(journal)
        if journal.live:
            self._refused.append(journal)
        else:
            journal.close()

    def _pace(self, away: Exception | None) -> None:
        self.away = None if away is None else one_line(away)
        if away is not None:
            if not self._failures:
                log.warning("MLflow is told later (%s); until then it waits in %s", self.away, self._outbox.folder)
            wait = min(_FIRST_WAIT * 2**self._failures, _LONGEST_WAIT)
            self._failures += 1
            self._due = time.monotonic() + wait * random.uniform(0.5, 1.0)  # noqa: S311 not for secrets
        elif self._failures:
            log.warning("MLflow is told again")
            self._failures = 0
        if self._locked:
            self._due = min(self._due, time.monotonic() + _LONGEST_WAIT)


def _passes(error: Exception) -> bool:
    """Whether what failed may work later, as it is."""
    if isinstance(error, RunDeletedError):
        return False
    return is_away(error) or isinstance(error, SQLAlchemyError | StorageError)
