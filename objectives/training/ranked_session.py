"""The session of a run on several ranks: rank 0 alone speaks to the trial, the others do as it is answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpsearch.objectives.training.ranks import Ranks
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.session import Due, LocalSession, Session, Verdict

_ASKED = 0.25  # seconds between two steps at which the ranks agree on what is due


class RankedSession:
    """What a run on ranks asks of its trial: rank 0 asks, and its answers, or its errors, hold for all.

    Args:
        session: of the trial; None on ranks but the first, and where a run is kept nowhere.
        ranks: that train together.
    """

    def __init__(self, session: Session | None, ranks: Ranks) -> None:
        self._session, self._ranks = session, ranks
        # Where ranks may write their parts of a large state: a session that names a folder for them takes manifests.
        self.shards = ranks.told(session.shards if isinstance(session, LocalSession) else None)
        self._steps = 0  # until the ranks agree again
        self._asked = time.monotonic()
        self._apart = 1  # steps between the last two times

    def restore(self) -> dict[str, Any] | None:
        """The last checkpoint's state, which rank 0 reads; of one in parts, it alone keeps the best weights."""
        read: list[dict[str, Any] | None] = []

        def lean() -> dict[str, Any] | None:
            state = None if self._session is None else self._session.restore()
            read.append(state)
            if state is None or "shards" not in state or not state["best"]:
                return state
            return {**state, "best": {**state["best"], "model": {}}}

        told = self._ranks.led(lean)
        return read[0] if self._ranks.first else told

    def save(self, state: dict[str, Any], *, best: bool) -> None:
        """Rank 0 keeps the state after an epoch; nobody goes on before it is kept."""
        self._ranks.led(lambda: None if self._session is None else self._session.save(state, best=best))

    def due(self, left: Callable[[], float]) -> Due:
        """The same on all ranks, at the same step: asked at steps that are some time apart, not at each."""
        self._steps -= 1
        if self._steps > 0:
            return Due.NOTHING
        told = any(self._ranks.each(self._ranks.told_to_go()))
        due, self._apart = self._ranks.led(lambda: self._ask(left, told=told))
        self._steps = self._apart
        return due

    def _ask(self, left: Callable[[], float], *, told: bool) -> tuple[Due, int]:
        """What is due, and after how many steps the ranks agree again."""
        if told:
            self._ranks.on_told_to_go()
        now = time.monotonic()
        pace = max((now - self._asked) / self._apart, 1e-6)
        self._asked = now
        due = Due.NOTHING if self._session is None else self._session.due(left)
        return due, max(1, min(int(_ASKED / pace), 2 * self._apart))

    def save_within(self, state: dict[str, Any]) -> None:
        """Rank 0 keeps the state in the midst of an epoch."""
        self._ranks.led(lambda: None if self._session is None else self._session.save_within(state))

    def report(self, record: EpochRecord) -> Verdict:
        """Rank 0 reports; all ranks leave in the same epoch."""
        return self._ranks.led(lambda: Verdict.CONTINUE if self._session is None else self._session.report(record))

    def log(self, path: Path) -> None:
        """Rank 0 takes a file that the run made; the others make none."""
        if self._session is not None:
            self._session.log(path)


def on_ranks(session: Session | None, ranks: Ranks) -> Session | None:
    """The session of a run on ranks; None where rank 0 has none."""
    return RankedSession(session, ranks) if ranks.told(session is not None) else None
