"""The end of an attempt at a trial: one statement for the attempt, the trial's state, its value and its attributes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import sqlalchemy as sa

Outcome = Literal[
    "complete",
    "pruned",
    "infeasible",
    "failed",
    "released",  # given back by a worker that was told to stop
    "lost",  # its worker died, or froze
    "cancelled",  # the trial was ended from outside
]


def settle(
    connection: sa.Connection,
    trial_id: int,
    attempt: int,
    state: str,
    outcome: Outcome,
    *,
    value: float | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> bool:
    """End a live attempt and set its trial's state; return whether that attempt was live and its trial RUNNING.

    Args:
        connection: in a transaction.
        trial_id: the trial.
        attempt: the attempt; when it is not live nothing is written.
        state: ``WAITING`` leaves the trial to the next claim; any other ends it.
        outcome: of the attempt.
        value: the trial's value; infinities are stored as Optuna does.
        attrs: user attributes of the trial to set.
    """
    attrs = attrs or {}
    return bool(
        connection.execute(
            _SETTLE,
            {
                "trial": trial_id,
                "attempt": attempt,
                "state": state,
                "outcome": outcome,
                "finite": value if value is not None and math.isfinite(value) else None,
                "type": None if value is None or math.isnan(value) else value_type(value),  # no NaN as a trial's value
                "keys": list(attrs),
                "values": [json.dumps(attr) for attr in attrs.values()],
            },
        ).scalar()
    )


def value_type(value: float) -> str:
    """Return the name Optuna's tables have for the kind of a value; infinities are no numbers in them."""
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INF_POS" if value > 0 else "INF_NEG"
    return "FINITE"


def end_attempt(connection: sa.Connection, trial_id: int, attempt: int, outcome: Outcome) -> None:
    """End an attempt, if it is live, and leave its trial as it is."""
    connection.execute(_END, {"trial": trial_id, "attempt": attempt, "outcome": outcome})


def outcome_of(connection: sa.Connection, trial_id: int, attempt: int) -> str | None:
    """Return how the attempt ended; None while it is live, or if there is none."""
    outcome = connection.execute(_OUTCOME, {"trial": trial_id, "attempt": attempt}).scalar()
    return None if outcome is None else str(outcome)


def why_lost(connection: sa.Connection, trial_id: int, attempt: int) -> str:
    """Say why an attempt may write nothing: ``was taken over by ...``."""
    row = connection.execute(_WHY, {"trial": trial_id, "attempt": attempt}).one_or_none()
    if row is None:
        return "was deleted"
    if row.attempt > attempt:
        return f"was taken over by {row.worker} (attempt {row.attempt})"
    if row.ended_at is not None:
        return "was taken from this worker, which seemed dead"
    return f"was set to {row.state} from outside"


_SETTLE = sa.text("""
    WITH mine AS (
        UPDATE hpsearch_attempts a SET ended_at = clock_timestamp(), outcome = :outcome
          FROM trials t
         WHERE a.trial_id = :trial AND a.attempt = :attempt AND a.ended_at IS NULL
           AND t.trial_id = a.trial_id AND t.state = 'RUNNING'
        RETURNING a.trial_id
    ), ended AS (
        UPDATE trials SET state = CAST(:state AS trialstate),
               datetime_complete = CASE WHEN :state = 'WAITING' THEN NULL ELSE timezone('utc', clock_timestamp()) END
         WHERE trial_id IN (SELECT trial_id FROM mine)
    ), valued AS (
        INSERT INTO trial_values (trial_id, objective, value, value_type)
        SELECT trial_id, 0, CAST(:finite AS double precision), CAST(:type AS trialvaluetype) FROM mine
         WHERE CAST(:type AS text) IS NOT NULL
        ON CONFLICT (trial_id, objective) DO UPDATE SET value = excluded.value, value_type = excluded.value_type
    ), noted AS (
        INSERT INTO trial_user_attributes (trial_id, key, value_json)
        SELECT trial_id, key, value_json FROM mine,
               unnest(CAST(:keys AS text[]), CAST(:values AS text[])) AS attr (key, value_json)
        ON CONFLICT (trial_id, key) DO UPDATE SET value_json = excluded.value_json
    )
    SELECT count(*) FROM mine
""")

_END = sa.text("""
    UPDATE hpsearch_attempts SET ended_at = clock_timestamp(), outcome = :outcome
     WHERE trial_id = :trial AND attempt = :attempt AND ended_at IS NULL
""")

_OUTCOME = sa.text("SELECT outcome FROM hpsearch_attempts WHERE trial_id = :trial AND attempt = :attempt")

_WHY = sa.text("""
    SELECT t.state, a.attempt, a.worker, a.ended_at FROM trials t
      JOIN hpsearch_attempts a USING (trial_id)
     WHERE t.trial_id = :trial AND a.attempt >= :attempt
     ORDER BY a.attempt DESC LIMIT 1
""")
