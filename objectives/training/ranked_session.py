"""Session of a trial that several ranks train together: all ranks continue, save or stop after the same step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from hpsearch.objectives.training.ranks import Ranks
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.session import MidEpochAction, Session, Verdict

_AGREEMENT_INTERVAL_SECONDS = 0.25  # time between two agreements of the ranks on an action


class RankedSession:
    """Session of a run on several ranks. Rank 0 uses the trial's session; all ranks get the results or errors.

    Args:
        session: session of the trial; None on all ranks except rank 0.
        ranks: ranks that train together.
    """

    def __init__(self, session: Session | None, ranks: Ranks) -> None:
        self._session, self._ranks = cast("Session", session), ranks  # only rank 0 uses it
        self.curve = None if session is None else session.curve
        folders = (None, None) if session is None else (session.run_dir, session.shards)
        self.run_dir, self.shards = ranks.broadcast_object(folders)
        self._steps_left = 0  # number of steps until the ranks agree again
        self._agreed_at = time.monotonic()
        self._interval_steps = 1  # steps between agreements

    def restore(self) -> dict[str, Any] | None:
        """Return the state that rank 0 reads. The other ranks get it without the weights and the optimizer's state.

        `Strategy.local_state_dict` sends these one tensor at a time.
        """
        read: list[dict[str, Any] | None] = []

        def read_state() -> dict[str, Any] | None:
            read.append(state := self._session.restore())
            return None if state is None else _omit_tensors(state)

        broadcast = self._ranks.run_on_rank_zero(read_state)
        return read[0] if self._ranks.is_rank_zero else broadcast

    def save(self, state: dict[str, Any], *, best: bool) -> None:
        """Save the state after an epoch on rank 0; all ranks wait until it is saved."""
        self._ranks.run_on_rank_zero(lambda: self._session.save(state, best=best))

    def mid_epoch_action(self, left: Callable[[], float]) -> MidEpochAction:
        """Return the same action on all ranks at the same step. The ranks agree every 0.25 s, not at every step."""
        self._steps_left -= 1
        if self._steps_left > 0:
            return MidEpochAction.NONE
        should_stop = any(self._ranks.all_gather_object(self._ranks.should_stop()))
        action, steps = self._ranks.run_on_rank_zero(lambda: self._choose_action(left, should_stop=should_stop))
        self._steps_left = self._interval_steps = steps
        return action

    def _choose_action(self, left: Callable[[], float], *, should_stop: bool) -> tuple[MidEpochAction, int]:
        """Return the action, and the number of steps until the ranks agree again."""
        if should_stop:
            self._ranks.on_stop_request()
        now = time.monotonic()
        step_seconds = max((now - self._agreed_at) / self._interval_steps, 1e-6)
        self._agreed_at, steps = now, int(_AGREEMENT_INTERVAL_SECONDS / step_seconds)
        return self._session.mid_epoch_action(left), max(1, min(steps, 2 * self._interval_steps))

    def save_mid_epoch(self, state: dict[str, Any]) -> None:
        """Save the state within an epoch on rank 0."""
        self._ranks.run_on_rank_zero(lambda: self._session.save_mid_epoch(state))

    def report(self, record: EpochRecord) -> Verdict:
        """Report on rank 0; all ranks get the verdict."""
        return self._ranks.run_on_rank_zero(lambda: self._session.report(record))

    def log(self, path: Path) -> None:
        """Log a file on rank 0; the other ranks write none."""
        if self._ranks.is_rank_zero:
            self._session.log(path)


def _omit_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a run without weights and optimizer state; a sharded state keeps its empty tensors."""
    parts = () if "shards" in state else ("model", "optimizer", "average")
    best = {**state["best"], "model": {}} if state["best"] else state["best"]
    return {**state, **dict.fromkeys(parts), "best": best}


def wrap_session(session: Session | None, ranks: Ranks) -> Session | None:
    """Return the session of a run on several ranks; None if rank 0 has no session."""
    return RankedSession(session, ranks) if ranks.broadcast_object(session is not None) else None
