"""The thread that keeps a worker's lease, and puts back what dead workers left, while the worker trains."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from sqlalchemy.exc import SQLAlchemyError

from storage.claims import Claim, Claims

log = logging.getLogger(__name__)

_BEATS = 4  # renewals in the time of one lease: three may fail in a row


class LeaseKeeper:
    """Renews the lease of the trial that is held; a database that is away only delays it."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._held: Claim | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(timeout=self._claims.lease)

    @contextmanager
    def hold(self, claim: Claim) -> Iterator[None]:
        """Renew this claim's lease inside."""
        self._held = claim
        try:
            yield
        finally:
            self._held = None

    def _run(self) -> None:
        beats, away = 0, False
        while not self._end.wait(self._claims.lease / _BEATS):
            beats += 1
            try:
                self._beat(sweep=beats % _BEATS == 0)
            except SQLAlchemyError as error:
                if not away:
                    log.warning("the lease could not be renewed, trying on: %s", " ".join(str(error).split())[:200])
                away = True
            else:
                away = False

    def _beat(self, *, sweep: bool) -> None:
        if (held := self._held) is not None and not self._claims.renew(held) and self._held is held:
            log.warning("trial %d: the lease is gone; its next report will end it here", held.number)
        if sweep:
            self._claims.sweep()
