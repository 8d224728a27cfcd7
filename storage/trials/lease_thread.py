"""Background thread of a worker that renews the lease of the worker's trial, and releases trials of dead workers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

from sqlalchemy.exc import SQLAlchemyError

from hpsearch.storage.errors import format_error
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims

log = logging.getLogger(__name__)

_BEATS = 4  # renewals per lease period: three in a row may fail


class LeaseKeeper:
    """Background thread that renews the lease of the running trial, and retries while the database is unavailable."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._claim: Claim | None = None
        self._gone: Claim | None = None  # the claim whose loss was logged
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(timeout=self._claims.lease)

    @contextmanager
    def renew_periodically(self, claim: Claim) -> Iterator[None]:
        """Renew the lease of the claim within the context."""
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
                    log.warning("could not renew the lease, retrying: %s", format_error(error, 200))
                away = True
                continue
            if away or time.monotonic() - began > self._claims.lease / 2:
                self._claims.record_outage()
            away = False
            if beats % _BEATS == 0:
                with suppress(SQLAlchemyError):  # if the database is unavailable, the next renewal logs this
                    self._claims.reclaim_expired_leases()

    def _renew(self) -> None:
        claim = self._claim
        if claim is None or claim == self._gone or self._claims.renew(claim) or self._claim is not claim:
            return
        self._gone = claim
        log.warning("trial %d: lease lost; this worker stops working on it", claim.number)
