# ruff: noqa: S608  the parts of the statements are constants of this file
"""Queries that read trials from Optuna's tables, one by one or in bulk."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpsearch.storage.attributes import decode_attr
from hpsearch.storage.database.statements import Database, Rows
from hpsearch.storage.database.trial_rows import decode_param, decode_value
from hpsearch.storage.study_storage.studies import require_study

STATE_BY_NAME = {state.name: state for state in TrialState}
FINISHED_STATES = frozenset(state for state in TrialState if state.is_finished())

_SCALARS = (str, int, float, type(None))  # bool is an int


def utc_now() -> datetime:
    """Return the current time of this machine as naive UTC, as in Optuna's tables."""
    return datetime.now(UTC).replace(tzinfo=None)


def local_to_utc(local: datetime | None) -> datetime | None:
    """Convert Optuna's naive local time to the naive UTC of its tables."""
    return None if local is None else local.astimezone(UTC).replace(tzinfo=None)


def utc_to_local(utc: datetime | None) -> datetime | None:
    """Convert the naive UTC of the tables to Optuna's naive local time."""
    return None if utc is None else utc.replace(tzinfo=UTC).astimezone().replace(tzinfo=None)


def make_bare_trial(row: Any) -> FrozenTrial:
    """Return a trial that contains only the id, number, state and times from a row."""
    return FrozenTrial(
        number=row.number,
        state=STATE_BY_NAME[row.state],
        value=None,
        datetime_start=utc_to_local(row.datetime_start),
        datetime_complete=utc_to_local(row.datetime_complete),
        params={},
        distributions={},
        user_attrs={},
        system_attrs={},
        intermediate_values={},
        trial_id=row.trial_id,
    )


def copy_trial(trial: FrozenTrial) -> FrozenTrial:
    """Return a copy of a trial; copy and original share only the distributions, which are never modified.

    This function is about thirty times as fast as `copy.deepcopy`.
    """
    return FrozenTrial(
        number=trial.number,
        state=trial.state,
        value=None,
        values=trial.values,
        datetime_start=trial.datetime_start,
        datetime_complete=trial.datetime_complete,
        params=dict(trial.params),
        distributions=dict(trial.distributions),
        user_attrs=_copy_attrs(trial.user_attrs),
        system_attrs=_copy_attrs(trial.system_attrs),
        intermediate_values=dict(trial.intermediate_values),
        trial_id=trial._trial_id,
    )


def _copy_attrs(attrs: dict[str, Any]) -> dict[str, Any]:
    return {key: value if isinstance(value, _SCALARS) else copy.deepcopy(value) for key, value in attrs.items()}


# Details of trials `t`, one row per trial. If t.changes is set, only the details that were written since :horizon, the
# oldest transaction that was open at the last read (`xmin` is the transaction that wrote a row). Unlike a comparison of
# ids or times, this finds all changes, in any order of commits. age() compares transaction ids across a wraparound.
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
_BY_IDS = f"""
    SELECT * FROM (SELECT {_ROW}, false AS changes FROM trials WHERE trial_id = ANY (CAST(:trial_ids AS int[]))) t
      {_DETAILS} ORDER BY t.trial_id
"""
_IDS_IN_STATES = """
    SELECT ARRAY(SELECT trial_id FROM trials
                  WHERE study_id = s.study_id AND state = ANY (CAST(CAST(:states AS text[]) AS trialstate[]))) AS found
      FROM studies s WHERE s.study_id = :study_id
"""

# `study_id + 0` makes the planner use the primary key, which reads few rows. Without statistics it may use the index on
# study_id and read the whole study.
_FINISHED = "('COMPLETE', 'PRUNED', 'FAIL')"
_NEW = "FROM trials WHERE trial_id > :seen AND study_id + 0 = :study_id"
_JUST_FINISHED = f"FROM trials WHERE trial_id = ANY (CAST(:unfinished AS int[])) AND state IN {_FINISHED}"
_UNFINISHED = "FROM trials WHERE study_id = :study_id AND state IN ('RUNNING', 'WAITING') AND trial_id <= :seen"
# The columns of a `ReadMark`. A transaction that reopens trials also updates the row of the study.
_MARK = """
    CAST(s.xmin AS text) AS study_version,
    CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS xid) AS text) AS horizon
"""
_UPDATES = f"""
    SELECT {_MARK}, t.*, p.*, i.*, v.*, u.*, y.*
      FROM studies s LEFT JOIN LATERAL (
            SELECT {_ROW}, false AS changes {_NEW}
            UNION ALL SELECT {_ROW}, false {_JUST_FINISHED}
            UNION ALL SELECT {_ROW}, trial_id = ANY (CAST(:loaded AS int[])) {_UNFINISHED}) t ON true
      {_DETAILS}
     WHERE s.study_id = :study_id ORDER BY t.trial_id
"""
_NEWLY_FINISHED = f"""
    SELECT {_MARK}, t.*
      FROM studies s LEFT JOIN LATERAL (
            SELECT {_ROW} {_NEW}
            UNION ALL SELECT {_ROW} {_JUST_FINISHED}) t ON true
     WHERE s.study_id = :study_id ORDER BY t.trial_id
"""
_WRITTEN_SINCE = f"""
    SELECT * FROM (SELECT {_ROW}, false AS changes FROM trials
                    WHERE study_id = :study_id AND age(xmin) <= age(CAST(:horizon AS xid))) t
      {_DETAILS} ORDER BY t.trial_id
"""

_NO_HORIZON = "0"  # older than all transactions


class ReadMark(NamedTuple):
    """State of the database at a read.

    Attributes:
        study_version: id of the last transaction that reopened trials, or created the study.
        horizon: id of the oldest open transaction; all rows that only later reads find are from it or later ones.
    """

    study_version: str
    horizon: str


@dataclass
class ReadCursor:
    """Position of a reader in a study.

    Attributes:
        last_trial_id: highest trial id that was read; -1 if no trial was read.
        unfinished_ids: ids of the trials that were not finished at the last read.
        loaded_ids: ids of the unfinished trials whose details were read completely up to `details_horizon`.
        details_horizon: id of a transaction; the next read of loaded trials reads only rows written since this one.
        mark: state of the database at the last read of any kind.
    """

    last_trial_id: int = -1
    unfinished_ids: set[int] = field(default_factory=set)
    loaded_ids: set[int] = field(default_factory=set)
    details_horizon: str = _NO_HORIZON
    mark: ReadMark = field(default=ReadMark("", _NO_HORIZON))

    def _parameters(self, study_id: int) -> dict[str, Any]:
        return {"study_id": study_id, "seen": self.last_trial_id, "unfinished": list(self.unfinished_ids)}


def read_trial(database: Database, trial_id: int) -> tuple[FrozenTrial, int] | None:
    """Return (trial, study id) of a trial id; None if the trial does not exist."""
    rows = read_rows(database, [trial_id])
    return (merge_row(rows[0]), rows[0].study_id) if rows else None


def read_rows(database: Database, trial_ids: Sequence[int]) -> Rows:
    """Return the rows of these trials with all details, in the order of ids."""
    return database.fetch_rows(_BY_IDS, {"trial_ids": list(trial_ids), "horizon": _NO_HORIZON}) if trial_ids else []


def read_in_states(database: Database, study_id: int, states: Sequence[str]) -> list[FrozenTrial]:
    """Return the study's trials in these states, in the order of ids.

    Raises:
        KeyError: the study does not exist.
    """
    rows = database.fetch_rows(_IDS_IN_STATES, {"study_id": study_id, "states": list(states)})
    _get_trial_rows(rows, study_id)
    return [merge_row(row) for row in read_rows(database, rows[0].found) if row.state in states]


def read_newly_finished(database: Database, study_id: int, known: ReadCursor) -> tuple[Rows, Rows, ReadMark]:
    """Read the trials that were created, finished or reopened since the last read; other running trials are not read.

    Returns:
        Rows of the finished and the reopened trials with all details, rows of the new unfinished trials without
        details, and the mark for the next read.

    Raises:
        KeyError: the study does not exist.
    """
    rows, mark = _split_mark(database.fetch_rows(_NEWLY_FINISHED, known._parameters(study_id)), study_id)
    finished = [row.trial_id for row in rows if STATE_BY_NAME[row.state] in FINISHED_STATES]
    others = [row for row in rows if STATE_BY_NAME[row.state] not in FINISHED_STATES]
    if mark.study_version == known.mark.study_version:
        return read_rows(database, finished), others, mark
    return _read_written(database, study_id, known.mark.horizon), others, mark


def _read_written(database: Database, study_id: int, horizon: str) -> Rows:
    """Scan the study and return rows, with all details, of the trials whose state was written since a transaction."""
    return database.fetch_rows(_WRITTEN_SINCE, {"study_id": study_id, "horizon": horizon})


def read_updates(database: Database, study_id: int, known: ReadCursor) -> tuple[Rows, ReadMark]:
    """Read the changes of a study since the last read.

    Returns:
        Rows of all trials that are new, unfinished, or finished since the last read; then rows of the reopened trials,
        which may be among the former; and the mark for the next read, whose horizon applies to the loaded trials too.

    Raises:
        KeyError: the study does not exist.
    """
    parameters = known._parameters(study_id) | {"loaded": list(known.loaded_ids), "horizon": known.details_horizon}
    rows, mark = _split_mark(database.fetch_rows(_UPDATES, parameters), study_id)
    if mark.study_version == known.mark.study_version:
        return rows, mark
    # The values of a reopened trial may have been deleted, which its changes do not show.
    return [*rows, *_read_written(database, study_id, known.mark.horizon)], mark


def _split_mark(rows: Rows, study_id: int) -> tuple[Rows, ReadMark]:
    return _get_trial_rows(rows, study_id), ReadMark(rows[0].study_version, rows[0].horizon)


def _get_trial_rows(rows: Rows, study_id: int) -> Rows:
    return [row for row in require_study(rows, study_id) if getattr(row, "trial_id", None) is not None]


def merge_row(row: sa.Row[Any], known: FrozenTrial | None = None) -> FrozenTrial:
    """Return the trial of a row.

    Args:
        row: row with all details of the trial, or with the changes since `known` was read.
        known: earlier version of the trial, which is not modified; None if the row has all details.
    """
    params = dict(known.params) if known else {}
    distributions = dict(known.distributions) if known else {}
    for name, value, text in zip(row.param_names or (), row.param_values or (), row.distributions or (), strict=True):
        if (found := decode_param(value, text)) is not None:
            params[name], distributions[name] = found
    steps = dict(known.intermediate_values) if known else {}
    for step, value, kind in zip(row.steps or (), row.step_values or (), row.step_kinds or (), strict=True):
        steps[step] = decode_value(value, kind)
    results = zip(row.results or (), row.result_kinds or (), strict=True)
    return FrozenTrial(
        number=row.number,
        state=STATE_BY_NAME[row.state],
        value=None,
        values=[decode_value(*pair) for pair in results] or None,
        datetime_start=utc_to_local(row.datetime_start),
        datetime_complete=utc_to_local(row.datetime_complete),
        params=params,
        distributions=distributions,
        user_attrs=_attrs(known.user_attrs if known else {}, row.user_keys, row.user_values),
        system_attrs=_attrs(known.system_attrs if known else {}, row.system_keys, row.system_values),
        intermediate_values=steps,
        trial_id=row.trial_id,
    )


def _attrs(known: dict[str, Any], keys: Sequence[str] | None, texts: Sequence[str] | None) -> dict[str, Any]:
    return known | {key: decode_attr(text) for key, text in zip(keys or (), texts or (), strict=True)}


_FINISHED_DETAILS = """
    SELECT trial_id, {columns} FROM {table} x JOIN trials t USING (trial_id)
     WHERE t.study_id = :study_id AND trial_id <= :last AND t.state IN ('COMPLETE', 'PRUNED', 'FAIL')
     ORDER BY x.{order}
"""
_TRIALS = f"""
    SELECT {_MARK}, t.trial_id, t.number, t.state, t.datetime_start, t.datetime_complete
      FROM studies s LEFT JOIN trials t ON t.study_id = s.study_id WHERE s.study_id = :study_id ORDER BY t.trial_id
"""


def read_study(database: Database, study_id: int) -> tuple[list[FrozenTrial], ReadMark]:
    """Read all trials of a study: finished trials with details, unfinished trials without.

    The details are read by several statements. The result is consistent, because finished trials do not change, except
    for trials that are reopened meanwhile, which the next read replaces.

    Returns:
        The trials in the order of ids, and the mark for the next read.

    Raises:
        KeyError: the study does not exist.
    """
    rows, mark = _split_mark(database.fetch_rows(_TRIALS, {"study_id": study_id}), study_id)
    with _paused_gc():
        trials = [make_bare_trial(row) for row in rows]
        finished = {trial._trial_id: trial for trial in trials if trial.state.is_finished()}
        if finished:
            _fill_values_and_attrs(database, finished, {"study_id": study_id, "last": max(finished)})
    return trials, mark


def _fill_values_and_attrs(database: Database, trials: dict[int, FrozenTrial], of: dict[str, int]) -> None:
    """Add details to the trials; rows of trials that finished after `trials` was read are skipped."""

    def fetch(table: str, order: str, columns: str) -> Rows:
        return database.fetch_rows(_FINISHED_DETAILS.format(table=table, order=order, columns=columns), of)

    for trial_id, name, value, text in fetch("trial_params", "param_id", "param_name, param_value, distribution_json"):
        if trial_id in trials and (found := decode_param(value, text)) is not None:
            trials[trial_id]._params[name], trials[trial_id]._distributions[name] = found
    columns = "step, intermediate_value, intermediate_value_type"
    for trial_id, step, value, kind in fetch("trial_intermediate_values", "trial_intermediate_value_id", columns):
        if trial_id in trials:
            trials[trial_id].intermediate_values[step] = value if value is not None else decode_value(value, kind)
    for trial_id, value, kind in fetch("trial_values", "objective", "value, value_type"):
        if trial_id in trials:
            trial = trials[trial_id]
            trial.values = [*(trial.values or ()), decode_value(value, kind)]
    for trial_id, key, text in fetch("trial_user_attributes", "trial_user_attribute_id", "key, value_json"):
        if trial_id in trials:
            trials[trial_id]._user_attrs[key] = decode_attr(text)
    for trial_id, key, text in fetch("trial_system_attributes", "trial_system_attribute_id", "key, value_json"):
        if trial_id in trials:
            trials[trial_id]._system_attrs[key] = decode_attr(text)


@contextmanager
def _paused_gc() -> Iterator[None]:
    """Disable garbage collection within the context, because it would slow down the creation of many objects."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_RUNG_PREFIX = "completed_rung_"

# Trials in all states: the values of pruned trials count for the cutoff too.
_RUNG_VALUES = sa.text("""
    SELECT t.number, a.value_json FROM trials t JOIN trial_system_attributes a USING (trial_id)
     WHERE t.study_id = :study AND a.key = :key
""")


def get_rung_key(rung: int) -> str:
    """Return the name of the trial system attribute that contains the value at a rung (from 0), as in Optuna."""
    return f"{_RUNG_PREFIX}{rung}"


def read_rung_values(engine: sa.Engine, study_id: int, rung: int) -> list[tuple[int, float | list[float]]]:
    """Return (trial number, value or list of objective values) of each trial at a rung, in no particular order."""
    rows = Database(engine).fetch_rows(_RUNG_VALUES, {"study": study_id, "key": get_rung_key(rung)})
    return [(row.number, json.loads(row.value_json)) for row in rows]
