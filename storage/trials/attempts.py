"""The attempts at a trial, for a person to read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from storage.database.statements import Database


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt at a trial: who made it, when, and how it ended; both are None while it is live.

    `device` is what its worker trained on, such as "2 x cuda"; None where the register does not know the worker.
    """

    number: int
    worker: str
    started_at: datetime
    ended_at: datetime | None
    outcome: str | None
    device: str | None = None


_ATTEMPTS = sa.text("""
    SELECT attempt AS number, worker, started_at, ended_at, outcome,
           (SELECT w.device FROM hpsearch_workers w WHERE w.name = a.worker ORDER BY w.seen_at DESC LIMIT 1) AS device
      FROM hpsearch_attempts a WHERE trial_id = :trial ORDER BY attempt
""")


_LAST = sa.text("""
    SELECT DISTINCT ON (trial_id) trial_id, attempt AS number, worker, started_at, ended_at, outcome
      FROM hpsearch_attempts WHERE trial_id = ANY(:trials) ORDER BY trial_id, attempt DESC
""")


_SECONDS = sa.text("""
    SELECT trial_id, extract(epoch FROM sum(ended_at - started_at))::float AS seconds FROM hpsearch_attempts
     WHERE trial_id = ANY(:trials) GROUP BY trial_id
""")


def seconds_of_attempts(engine: sa.Engine, trial_ids: list[int]) -> dict[int, float]:
    """Return for how many seconds each of these trials was run, by trial id: without the time that it waited."""
    return {row.trial_id: row.seconds or 0.0 for row in Database(engine).rows(_SECONDS, {"trials": trial_ids})}


def last_attempts(engine: sa.Engine, trial_ids: list[int]) -> dict[int, AttemptRecord]:
    """Return the last attempt at each of these trials that was ever attempted: trial id to attempt."""
    rows = [dict(row._mapping) for row in Database(engine).rows(_LAST, {"trials": trial_ids})]
    return {row.pop("trial_id"): AttemptRecord(**row) for row in rows}


def read_attempts(engine: sa.Engine, trial_id: int) -> list[AttemptRecord]:
    """Return the attempts at a trial, the first one first."""
    return [AttemptRecord(**row._mapping) for row in Database(engine).rows(_ATTEMPTS, {"trial": trial_id})]
