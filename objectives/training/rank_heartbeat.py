"""Heartbeats of ranks: each rank increments a counter in their store and detects a rank whose counter has stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from torch.distributed import distributed_c10d as c10d

log = logging.getLogger(__name__)

_BEATS = 8  # heartbeats per timeout
_MIN_TIMEOUT_SECONDS = 8.0  # a process may need seconds for a call that blocks Python's threads


class RankHeartbeat:
    """Thread that sends the heartbeats of this rank and checks those of the others.

    A collective without a short timeout, such as a wait for a checkpoint, does not detect a suspended process.

    Args:
        store: store of the ranks.
        rank: number of this rank.
        world_size: number of ranks.
        timeout: seconds without a heartbeat after which a rank is lost; at least 8 s are used.
        on_lost: function that gets the reason when a rank is lost; it must end this process.
    """

    def __init__(
        self, store: c10d.Store, rank: int, world_size: int, *, timeout: float, on_lost: Callable[[str], None]
    ) -> None:
        self._store = store.clone()  # type: ignore[attr-defined]  # torch declares no clone; another thread may wait with the other connection, and would block this thread
        self._rank, self._others = rank, [other for other in range(world_size) if other != rank]
        self._timeout, self._on_lost = max(timeout, _MIN_TIMEOUT_SECONDS), on_lost
        self._end = threading.Event()
        threading.Thread(target=self._run, name="rank heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Stop the thread."""
        self._end.set()

    def _run(self) -> None:
        # Missed heartbeats are counted instead of seconds, because this process may have been suspended too.
        count, seen, missed = 0, dict.fromkeys(self._others, b""), dict.fromkeys(self._others, 0)
        while not self._end.wait(self._timeout / _BEATS):
            count += 1
            try:
                self._store.set(_key(self._rank), str(count))
                beats = {other: self._read(other) for other in self._others}
            except RuntimeError as error:  # the process or machine of the store has ended
                log.debug("store of the ranks: %s", error)
                beats = seen
            for other, beat in beats.items():
                missed[other] = missed[other] + 1 if beat == seen[other] and count > 1 else 0
            seen = beats
            lost = [other for other in self._others if missed[other] >= _BEATS - 1]
            if lost and not self._end.is_set():
                self._on_lost(f"rank {lost[0]} has not responded for {self._timeout:g} s")
                return

    def _read(self, rank: int) -> bytes:
        key = _key(rank)
        return self._store.get(key) if self._store.check([key]) else b""


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"
