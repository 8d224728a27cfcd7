"""The thread that keeps a worker's lease, and puts back what dead workers left, while the worker trains."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

from sqlalchemy.exc import SQLAlchemyError

from hpsearch.storage.errors import one_line
from hpsearch.storage.trials.claims import Claim, Claims

log = logging.getLogger(__name__)

_BEATS = 4  # renewals in the time of one lease: three may fail in a row


class LeaseKeeper:
    """Renews the lease of the trial that runs; a database that is away only delays it."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._claim: Claim | None = None
        self._gone: Claim | None = None  # whose loss was logged
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(timeout=self._claims.lease)

    @contextmanager
    def renewing(self, claim: Claim) -> Iterator[None]:
        """Renew this claim's lease inside."""
        self._claim = claim
        try:
            yield
        finally:
            self._claim = None

    def _run(self) -> None:
        beats, away = 0, False
        while not self._end.wait(self._claims.lease / _BEATS):
            beats += 1
            began = time.monotonic()
            try:
                self._renew()
            except SQLAlchemyError as error:
                if not away:
                    log.warning("the lease could not be renewed, trying on: %s", one_line(error, 200))
                away = True
                continue
            if away or time.monotonic() - began > self._claims.lease / 2:
                self._claims.note_outage()
            away = False
            if beats % _BEATS == 0:
                with suppress(SQLAlchemyError):  # the next beat tells
                    self._claims.sweep()

    def _renew(self) -> None:
        claim = self._claim
        if claim is None or claim == self._gone or self._claims.renew(claim) or self._claim is not claim:
            return
        self._gone = claim
        log.warning("trial %d: the lease is gone; this worker will let go of it", claim.number)
