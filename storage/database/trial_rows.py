"""Shared SQL of statements on trials: numbering, encoding of values, and fencing of writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hpsearch.storage.database.statements import Database
from hpsearch.storage.errors import ClaimLostError

# Every program that creates trials, Optuna's RDBStorage included, locks the study's row while it numbers and inserts
# them. So ids and numbers of a study rise together, and the highest number + 1, which the index yields, equals the
# count that RDBStorage uses.
NEXT_NUMBER = "(SELECT coalesce(max(number) + 1, 0) FROM trials WHERE study_id = :study_id)"

# Fencing: only the live attempt `a` of a claimed trial `t` may write, and only while the trial is RUNNING.
FENCING = """
    t.trial_id = :trial_id AND a.trial_id = t.trial_id AND a.attempt = :attempt AND a.ended_at IS NULL
    AND t.state = 'RUNNING'
"""

# Parts of a statement in which `mine` is the trial to write. `make_attr_parameters` and `make_value_parameters` return
# their parameters.
SET_ATTRS = """
    {kind}_attrs AS (
        INSERT INTO trial_{kind}_attributes (trial_id, key, value_json)
        SELECT mine.trial_id, a.key, a.value
          FROM mine, unnest(CAST(:{kind}_keys AS text[]), CAST(:{kind}_values AS text[])) AS a (key, value)
        ON CONFLICT (trial_id, key) DO UPDATE SET value_json = excluded.value_json)
"""
SET_VALUES = """
    results AS (
        INSERT INTO trial_values (trial_id, objective, value, value_type)
        SELECT mine.trial_id, v.place - 1, v.value, CAST(v.kind AS trialvaluetype)
          FROM mine, unnest(CAST(:values AS float8[]), CAST(:kinds AS text[])) WITH ORDINALITY AS v (value, kind, place)
        ON CONFLICT (trial_id, objective) DO UPDATE SET value = excluded.value, value_type = excluded.value_type)
"""


def make_attr_parameters(kind: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of `SET_ATTRS`; `kind` is "user" or "system"."""
    return {f"{kind}_keys": list(attrs), f"{kind}_values": [json.dumps(value) for value in attrs.values()]}


def make_value_parameters(values: Sequence[float]) -> dict[str, Any]:
    """Return the parameters of `SET_VALUES` for the values of a trial; no value may be NaN."""
    stored = [encode_value(value) for value in values]
    return {"values": [value for value, _ in stored], "kinds": [kind for _, kind in stored]}


_CLAIM_STATE = """
    SELECT t.number, t.state, a.attempt, a.ended_at, last.attempt AS last, last.worker
      FROM trials t
      LEFT JOIN hpsearch_attempts a ON a.trial_id = t.trial_id AND a.attempt = :attempt
      LEFT JOIN LATERAL (SELECT attempt, worker FROM hpsearch_attempts o WHERE o.trial_id = t.trial_id
                          ORDER BY attempt DESC LIMIT 1) last ON true
     WHERE t.trial_id = :trial_id
"""


def make_claim_lost_error(database: Database, trial_id: int, attempt: int) -> ClaimLostError:
    """Return an error with the reason why an attempt may not write its trial: ``trial 7 was taken over by ...``."""
    rows = database.fetch_rows(_CLAIM_STATE, {"trial_id": trial_id, "attempt": attempt})
    if not rows:
        return ClaimLostError(f"the trial with id {trial_id} was deleted with its study")
    trial = rows[0]
    if trial.last is not None and trial.last > attempt:
        why = f"was taken over by {trial.worker} (attempt {trial.last})"
    elif trial.attempt is None:
        why = f"never had an attempt {attempt}"
    elif trial.ended_at is not None:
        why = "was taken from this worker, whose lease expired"
    else:
        why = f"was set to {trial.state} by another program"
    return ClaimLostError(f"trial {trial.number} {why}")


def encode_value(value: float, *, nan: bool = False) -> tuple[float | None, str]:
    """Return a value as (number, type) in Optuna's encoding.

    The number is None for infinities, and for NaN if `nan` is set.
    """
    if math.isinf(value):
        return None, "INF_POS" if value > 0 else "INF_NEG"
    if nan and math.isnan(value):
        return None, "NAN"
    return float(value), "FINITE"


_SPECIAL = {"INF_POS": math.inf, "INF_NEG": -math.inf, "NAN": math.nan}


def decode_value(value: float | None, kind: str) -> float:
    """Return the value that `encode_value` encoded."""
    return value if value is not None else _SPECIAL[kind]
