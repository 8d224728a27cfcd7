# ruff: noqa: S608  the parts of the statements are the constants of this file
"""Reading trials: which rows, how much of them, and what they become."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from optuna.trial import FrozenTrial

from hpsearch.storage.database.statements import Database, Rows
from hpsearch.storage.database.trial_rows import restore
from hpsearch.storage.study_storage.codec import FINISHED, STATES, distribution, to_local

# What belongs to a trial `t`, one row per trial. A trial with t.changes gets what was written since :horizon alone:
# the oldest transaction that was open when the reader looked last (`xmin` is the transaction that wrote a row). Unlike
# ids and times this misses nothing, in whatever order transactions end. age() compares as transaction ids must be.
_SINCE = "(NOT t.changes OR age({row}.xmin) <= age(CAST(:horizon AS xid)))"
_DETAILS = f"""
    LEFT JOIN LATERAL (
        SELECT array_agg(p.param_name ORDER BY p.param_id) AS param_names,
               array_agg(p.param_value ORDER BY p.param_id) AS param_values,
               array_agg(p.distribution_json ORDER BY p.param_id) AS distributions
          FROM trial_params p WHERE p.trial_id = t.trial_id AND {_SINCE.format(row="p")}) p ON true
    LEFT JOIN LATERAL (
        SELECT array_agg(v.step ORDER BY v.trial_intermediate_value_id) AS steps,
               array_agg(v.intermediate_value ORDER BY v.trial_intermediate_value_id) AS step_values,
               array_agg(CAST(v.intermediate_value_type AS text) ORDER BY v.trial_intermediate_value_id) AS step_kinds
          FROM trial_intermediate_values v WHERE v.trial_id = t.trial_id AND {_SINCE.format(row="v")}) i ON true
    LEFT JOIN LATERAL (
        SELECT array_agg(v.value ORDER BY v.objective) AS results,
               array_agg(CAST(v.value_type AS text) ORDER BY v.objective) AS result_kinds
          FROM trial_values v WHERE v.trial_id = t.trial_id) v ON true
    LEFT JOIN LATERAL (
        SELECT array_agg(a.key ORDER BY a.trial_user_attribute_id) AS user_keys,
               array_agg(a.value_json ORDER BY a.trial_user_attribute_id) AS user_values
          FROM trial_user_attributes a WHERE a.trial_id = t.trial_id AND {_SINCE.format(row="a")}) u ON true
    LEFT JOIN LATERAL (
        SELECT array_agg(a.key ORDER BY a.trial_system_attribute_id) AS system_keys,
               array_agg(a.value_json ORDER BY a.trial_system_attribute_id) AS system_values
          FROM trial_system_attributes a WHERE a.trial_id = t.trial_id AND {_SINCE.format(row="a")}) y ON true
"""

_ROW = "trial_id, study_id, number, state, datetime_start, datetime_complete"
_WHOLE = f"SELECT {_ROW}, false AS changes FROM trials"
_BY_IDS = f"SELECT * FROM ({_WHOLE} WHERE trial_id = ANY (CAST(:trial_ids AS int[]))) t {_DETAILS} ORDER BY t.trial_id"
_IDS_IN_STATES = """
    SELECT ARRAY(SELECT trial_id FROM trials
                  WHERE study_id = s.study_id AND state = ANY (CAST(CAST(:states AS text[]) AS trialstate[]))) AS found
      FROM studies s WHERE s.study_id = :study_id
"""

# `study_id + 0` keeps the planner to the primary key, of which a handful of rows is read: without statistics it may
# take the index on study_id, and read the whole study.
_FINISHED = "('COMPLETE', 'PRUNED', 'FAIL')"
_NEW = "FROM trials WHERE trial_id > :seen AND study_id + 0 = :study_id"
_JUST_FINISHED = f"FROM trials WHERE trial_id = ANY (CAST(:unfinished AS int[])) AND state IN {_FINISHED}"
_UNFINISHED = "FROM trials WHERE study_id = :study_id AND state IN ('RUNNING', 'WAITING') AND trial_id <= :seen"
_NEWS = f"""
    SELECT s.study_id AS study, CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS xid) AS text) AS horizon,
           t.*, p.*, i.*, v.*, u.*, y.*
      FROM studies s LEFT JOIN LATERAL (
            SELECT {_ROW}, false AS changes {_NEW}
            UNION ALL SELECT {_ROW}, false {_JUST_FINISHED}
            UNION ALL SELECT {_ROW}, trial_id = ANY (CAST(:loaded AS int[])) {_UNFINISHED}) t ON true
      {_DETAILS}
     WHERE s.study_id = :study_id ORDER BY t.trial_id
"""
_NEWLY_FINISHED = f"""
    SELECT s.study_id AS study, t.*
      FROM studies s LEFT JOIN LATERAL (
            SELECT trial_id, number, state {_NEW}
            UNION ALL SELECT trial_id, number, state {_JUST_FINISHED}) t ON true
     WHERE s.study_id = :study_id ORDER BY t.trial_id
"""

_ONLY_WHOLE = "0"  # a horizon for statements that ask for no changes


@dataclass
class Known:
    """What a reader knows of a study's trials.

    Attributes:
        seen: The highest trial id read so far.
        unfinished: Ids up to that which were not finished then.
        loaded: Those of them of which everything up to `horizon` is known.
        horizon: Where the next reading of running trials starts.
    """

    seen: int = -1
    unfinished: set[int] = field(default_factory=set)
    loaded: set[int] = field(default_factory=set)
    horizon: str = _ONLY_WHOLE

    def _parameters(self, study_id: int) -> dict[str, Any]:
        return {"study_id": study_id, "seen": self.seen, "unfinished": list(self.unfinished)}


def read_trial(database: Database, trial_id: int) -> tuple[FrozenTrial, int] | None:
    """Return a trial and the id of its study, or None if there is no such trial."""
    rows = read_rows(database, [trial_id])
    return (whole(rows[0]), rows[0].study_id) if rows else None


def read_rows(database: Database, trial_ids: Sequence[int]) -> Rows:
    """Return the rows of some trials with all details, by id."""
    return database.rows(_BY_IDS, {"trial_ids": list(trial_ids), "horizon": _ONLY_WHOLE}) if trial_ids else []


def read_in_states(database: Database, study_id: int, states: Sequence[str]) -> list[FrozenTrial]:
    """Return the study's trials in some states, by id.

    Raises:
        KeyError: There is no such study.
    """
    rows = database.rows(_IDS_IN_STATES, {"study_id": study_id, "states": list(states)})
    _of_study(rows, study_id)
    return [whole(row) for row in read_rows(database, rows[0].found) if row.state in states]


def read_newly_finished(database: Database, study_id: int, known: Known) -> tuple[Rows, Rows]:
    """Read which trials have finished, without reading those that run.

    Returns:
        Rows of the trials that have, with all details, and rows of those that are new and have not, without any.

    Raises:
        KeyError: There is no such study.
    """
    rows = _of_study(database.rows(_NEWLY_FINISHED, known._parameters(study_id)), study_id)
    finished = [row.trial_id for row in rows if STATES[row.state] in FINISHED]
    return read_rows(database, finished), [row for row in rows if STATES[row.state] not in FINISHED]


def read_news(database: Database, study_id: int, known: Known) -> tuple[Rows, str]:
    """Read what is new in a study.

    Returns:
        Rows of all trials that are unfinished, or were; and the horizon for the next reading.

    Raises:
        KeyError: There is no such study.
    """
    parameters = known._parameters(study_id) | {"loaded": list(known.loaded), "horizon": known.horizon}
    rows = database.rows(_NEWS, parameters)
    return _of_study(rows, study_id), rows[0].horizon


def _of_study(rows: Rows, study_id: int) -> Rows:
    if not rows:
        raise KeyError(f"there is no study with id {study_id}")
    return [row for row in rows if getattr(row, "trial_id", None) is not None]


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
