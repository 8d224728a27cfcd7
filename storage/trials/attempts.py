"""The attempts at a trial, for a person to read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from hpsearch.storage.database.statements import Database


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


TIMES = " x "  # in the device of a worker that trains each trial on several


_ATTEMPTS = sa.text("""
    SELECT attempt AS number, worker, started_at, ended_at, outcome,
           (SELECT w.device FROM hpsearch_workers w WHERE w.name = a.worker ORDER BY w.seen_at DESC LIMIT 1) AS device
      FROM hpsearch_attempts a WHERE trial_id = :trial ORDER BY attempt
""")


@dataclass(frozen=True)
class Stretch:
    """For how long a trial was run without a break: from its worker's claim to the last epoch that it reported.

    Attributes:
        number: of the trial.
        started_at, until: when; `until` of a live attempt that has reported nothing is now.
        rung: at which it was paused then; None where it was not.
    """

    number: int
    started_at: datetime
    until: datetime
    rung: int | None


# Who went on from a rung without a pause has reached a later one when its attempt ends.
_STRETCHES = sa.text("""
    SELECT t.number, a.started_at, coalesce(a.reported_at, a.ended_at, clock_timestamp()) AS until,
           CASE WHEN a.outcome = 'paused' THEN (SELECT max(r.rung) FROM hpsearch_rungs r
             WHERE r.trial_id = a.trial_id AND r.reached_at <= a.ended_at) END AS rung
      FROM trials t JOIN hpsearch_attempts a USING (trial_id)
     WHERE t.study_id = :study ORDER BY t.number, a.attempt
""")


_DEVICES = sa.text("""
    SELECT t.number, w.device
      FROM trials t JOIN hpsearch_attempts a USING (trial_id)
      JOIN LATERAL (SELECT device FROM hpsearch_workers w WHERE w.study_id = t.study_id AND w.name = a.worker
                     ORDER BY w.seen_at DESC LIMIT 1) w ON true
     WHERE t.study_id = :study
       AND EXISTS (SELECT FROM hpsearch_workers WHERE study_id = :study AND strpos(device, :times) > 0)
     ORDER BY t.number, a.attempt
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


def read_stretches(engine: sa.Engine, study_id: int) -> list[Stretch]:
    """Return when the trials of a study were run, by number and attempt."""
    return [Stretch(**row._mapping) for row in Database(engine).rows(_STRETCHES, {"study": study_id})]


def read_devices(engine: sa.Engine, study_id: int) -> dict[int, list[str]]:
    """Return the devices of the attempts at each trial of a study, the first attempt's first: trial number to devices.

    Nothing of a study whose workers have one device each, which costs one look at the register.
    """
    found: dict[int, list[str]] = {}
    for row in Database(engine).rows(_DEVICES, {"study": study_id, "times": TIMES}):
        found.setdefault(row.number, []).append(row.device)
    return found
