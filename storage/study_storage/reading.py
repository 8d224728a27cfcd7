# ruff: noqa: S608  the parts of the statements are the constants of this file
"""Reading trials: which rows, how much of them, and what they become."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from optuna.trial import FrozenTrial

from storage.study_storage.codec import STATES, distribution, restore, to_local
from storage.study_storage.database import Database, Rows

# What belongs to a trial `t`, one row per trial. A trial with t.changes gets what was written since :horizon alone:
# the oldest transaction that was open when the reader looked last (`xmin` is the transaction that wrote a row). Unlike
# ids and times this misses nothing, in whatever order transactions end. age() compares as transaction ids must be.
_SINCE = "(NOT t.changes OR age({row}.xmin) <= age(CAST(:horizon AS xid)))"
_DETAILS = f"""
    LEFT JOIN LATERAL (
        SELECT array_agg(p.param_name ORDER BY p.param_id) AS param_names,
               array_agg(p.param_value ORDER BY p.param_id) AS param_values,
               array_agg(p.distribution_json ORDER BY p.param_id) AS distributions
          FROM trial_params p WHERE p.trial_id = t.trial_id AND {_SINCE.format(row="p")}) p ON t.wanted
    LEFT JOIN LATERAL (
        SELECT array_agg(v.step ORDER BY v.trial_intermediate_value_id) AS steps,
               array_agg(v.intermediate_value ORDER BY v.trial_intermediate_value_id) AS step_values,
               array_agg(CAST(v.intermediate_value_type AS text) ORDER BY v.trial_intermediate_value_id) AS step_kinds
          FROM trial_intermediate_values v WHERE v.trial_id = t.trial_id AND {_SINCE.format(row="v")}) i ON t.wanted
    LEFT JOIN LATERAL (
        SELECT array_agg(v.value ORDER BY v.objective) AS results,
               array_agg(CAST(v.value_type AS text) ORDER BY v.objective) AS result_kinds
          FROM trial_values v WHERE v.trial_id = t.trial_id) v ON t.wanted
    LEFT JOIN LATERAL (
        SELECT array_agg(a.key ORDER BY a.trial_user_attribute_id) AS user_keys,
               array_agg(a.value_json ORDER BY a.trial_user_attribute_id) AS user_values
          FROM trial_user_attributes a WHERE a.trial_id = t.trial_id AND {_SINCE.format(row="a")}) u ON t.wanted
    LEFT JOIN LATERAL (
        SELECT array_agg(a.key ORDER BY a.trial_system_attribute_id) AS system_keys,
               array_agg(a.value_json ORDER BY a.trial_system_attribute_id) AS system_values
          FROM trial_system_attributes a WHERE a.trial_id = t.trial_id AND {_SINCE.format(row="a")}) y ON t.wanted
"""

_ROW = "trial_id, study_id, number, state, datetime_start, datetime_complete"
_WHOLE = f"SELECT {_ROW}, true AS wanted, false AS changes FROM trials"
_BY_ID = f"SELECT * FROM ({_WHOLE} WHERE trial_id = :trial_id) t {_DETAILS}"
_BY_STATE = f"""
    SELECT s.study_id AS study, t.*, p.*, i.*, v.*, u.*, y.* FROM studies s
      LEFT JOIN LATERAL ({_WHOLE} WHERE study_id = s.study_id
                            AND state = ANY (CAST(CAST(:states AS text[]) AS trialstate[]))) t ON true
    {_DETAILS}
     WHERE s.study_id = :study_id ORDER BY t.trial_id
"""

# `study_id + 0` keeps the planner to the primary key, of which a handful of rows is read: without statistics it may
# take the index on study_id, and read the whole study.
_FINISHED = "('COMPLETE', 'PRUNED', 'FAIL')"
_NEW = f"""
    SELECT {_ROW}, :unfinished_too OR state IN {_FINISHED} AS wanted, false AS changes
      FROM trials WHERE trial_id > :seen AND study_id + 0 = :study_id
"""
_JUST_FINISHED = f"""
    {_WHOLE} WHERE trial_id = ANY (CAST(:unfinished AS int[])) AND state IN {_FINISHED}
"""
_UNFINISHED = f"""
    SELECT {_ROW}, true AS wanted, trial_id = ANY (CAST(:loaded AS int[])) AS changes
      FROM trials WHERE study_id = :study_id AND state IN ('RUNNING', 'WAITING') AND trial_id <= :seen
"""
_NEWS = """
    SELECT s.study_id AS study, CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS xid) AS text) AS horizon,
           t.*, p.*, i.*, v.*, u.*, y.*
      FROM studies s LEFT JOIN LATERAL ({parts}) t ON true {details}
     WHERE s.study_id = :study_id ORDER BY t.trial_id
"""
_NEWS_OF_FINISHED = _NEWS.format(parts=f"{_NEW} UNION ALL {_JUST_FINISHED}", details=_DETAILS)
_NEWS_OF_ALL = _NEWS.format(parts=f"{_NEW} UNION ALL {_JUST_FINISHED} UNION ALL {_UNFINISHED}", details=_DETAILS)

_ONLY_WHOLE = "0"  # a horizon for statements that ask for no changes


@dataclass(frozen=True)
class News:
    """What was written to a study's trials since a reader looked last.

    Attributes:
        rows: One per trial.
        horizon: Where the next reading starts.
    """

    rows: Rows
    horizon: str


def read_trial(database: Database, trial_id: int) -> tuple[FrozenTrial, int] | None:
    """Return a trial and the id of its study, or None if there is no such trial."""
    rows = database.rows(_BY_ID, {"trial_id": trial_id, "horizon": _ONLY_WHOLE})
    return (whole(rows[0]), rows[0].study_id) if rows else None


def read_in_states(database: Database, study_id: int, states: Sequence[str]) -> list[FrozenTrial]:
    """Return the study's trials in some states.

    Raises:
        KeyError: There is no such study.
    """
    rows = database.rows(_BY_STATE, {"study_id": study_id, "states": list(states), "horizon": _ONLY_WHOLE})
    return [whole(row) for row in _of_study(rows, study_id)]


def read_news(
    database: Database,
    study_id: int,
    *,
    seen: int,
    unfinished: set[int],
    loaded: set[int],
    horizon: str,
    everything: bool,
) -> News:
    """Read what is new in a study.

    Args:
        database: Where.
        study_id: The study.
        seen: The highest trial id read so far.
        unfinished: Ids up to that which were not finished then.
        loaded: Those of them that were read whole, up to `horizon`.
        horizon: Given by the last reading with `everything`.
        everything: Whether running and waiting trials are wanted too; otherwise rows of such trials that are new have
            no details.

    Raises:
        KeyError: There is no such study.
    """
    parameters = {
        "study_id": study_id,
        "seen": seen,
        "unfinished": list(unfinished),
        "loaded": list(loaded),
        "horizon": horizon,
        "unfinished_too": everything,
    }
    rows = database.rows(_NEWS_OF_ALL if everything else _NEWS_OF_FINISHED, parameters)
    return News(_of_study(rows, study_id), rows[0].horizon)


def _of_study(rows: Rows, study_id: int) -> Rows:
    if not rows:
        raise KeyError(f"there is no study with id {study_id}")
    return [row for row in rows if row.trial_id is not None]


def whole(row: sa.Row[Any]) -> FrozenTrial:
    """Return the trial of a row that has all of it."""
    return merged(row, None)


def merged(row: sa.Row[Any], known: FrozenTrial | None) -> FrozenTrial:
    """Return the trial of a row that has what changed since `known`, which is left as it is."""
    params = dict(known.params) if known else {}
    distributions = dict(known.distributions) if known else {}
    for name, value, text in zip(row.param_names or (), row.param_values or (), row.distributions or (), strict=True):
        distributions[name] = distribution(text)
        params[name] = distributions[name].to_external_repr(value)
    steps = dict(known.intermediate_values) if known else {}
    for step, value, kind in zip(row.steps or (), row.step_values or (), row.step_kinds or (), strict=True):
        steps[step] = restore(value, kind)
    return FrozenTrial(
        number=row.number,
        state=STATES[row.state],
        value=None,
        values=[restore(*pair) for pair in zip(row.results, row.result_kinds, strict=True)] if row.results else None,
        datetime_start=to_local(row.datetime_start),
        datetime_complete=to_local(row.datetime_complete),
        params=params,
        distributions=distributions,
        user_attrs=_attrs(known.user_attrs if known else {}, row.user_keys, row.user_values),
        system_attrs=_attrs(known.system_attrs if known else {}, row.system_keys, row.system_values),
        intermediate_values=steps,
        trial_id=row.trial_id,
    )


def _attrs(known: dict[str, Any], keys: Sequence[str] | None, texts: Sequence[str] | None) -> dict[str, Any]:
    return known | {key: json.loads(text) for key, text in zip(keys or (), texts or (), strict=True)}
