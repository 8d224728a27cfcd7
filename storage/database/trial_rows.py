"""Shared SQL of statements on trials: locking, numbering, and encoding of values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from optuna.distributions import BaseDistribution, json_to_distribution

from hpsearch.storage.database.locks import format_timeouts

# Every program that creates trials, Optuna's RDBStorage included, locks the study's row while it numbers and inserts
# them. So ids and numbers of a study rise together, and the highest number + 1, which the index yields, equals the
# count that RDBStorage uses.
NEXT_NUMBER = "(SELECT coalesce(max(number) + 1, 0) FROM trials WHERE study_id = :study_id)"

# A separate statement in the same round trip: the next statement sees the commit of the last lock holder, which a
# single statement would not.
LOCK_STUDY = "SELECT 1 FROM studies WHERE study_id = :study_id FOR UPDATE;"

# The start time of a trial `t`, which has none while it waits after a release: the start of its first attempt.
FIRST_START = """coalesce(t.datetime_start, timezone('utc',
                   (SELECT min(started_at) FROM hpsearch_attempts a WHERE a.trial_id = t.trial_id)))"""

CLIENT_TIMEOUT = format_timeouts(idle=30)  # a frozen client must not lock the study forever


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


@lru_cache(maxsize=4096)
def parse_distribution(text: str) -> BaseDistribution:
    """Return the distribution of a JSON text. Trials share the returned object, so callers must not modify it."""
    return json_to_distribution(text)


def decode_param(value: float, text: str) -> tuple[Any, BaseDistribution] | None:
    """Return the value and the distribution of a parameter; None if its row is damaged.

    Any worker can write such rows. The trial then lacks the parameter, and the study stays readable.
    """
    try:
        distribution = parse_distribution(text)
        return distribution.to_external_repr(value), distribution
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
