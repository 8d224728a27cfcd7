"""Writes of a trial. Each write is one statement, which locks the trial, checks the permission, and writes.

If an attempt owns the trial (see `storage.trials.claims`), only this attempt may write, and only while the attempt is
live and the trial is RUNNING. A trial without an owner may be written by every process until the trial is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState

from hpsearch.storage.database.fencing import FENCING, make_claim_lost_error
from hpsearch.storage.database.statements import Database, Rows
from hpsearch.storage.database.trial_rows import (
    SET_ATTRS,
    SET_VALUES,
    encode_value,
    make_attr_parameters,
    make_value_parameters,
)
from hpsearch.storage.study_storage.lost_replies import has_state
from hpsearch.storage.study_storage.reading import FINISHED_STATES, STATE_BY_NAME, read_trial, utc_to_local

# `trial` is locked, so that no other process can finish it now; `mine` is the same row if writes are allowed.
_UNOWNED_GUARD = """
    WITH trial AS (SELECT trial_id, number, state FROM trials WHERE trial_id = :trial_id FOR {lock}),
         mine AS (SELECT trial_id, state FROM trial WHERE state IN ('RUNNING', 'WAITING'))
"""
_OWNER_GUARD = f"""
    WITH trial AS (SELECT t.trial_id, t.number, t.state
                     FROM hpsearch_attempts a, trials t WHERE {FENCING} FOR {{lock}}),
         mine AS (SELECT trial_id, state FROM trial)
"""  # noqa: S608 the parts are constants

# The first value of a parameter is kept, as in RDBStorage; all other writes replace the stored value.
_PARAMS = """
    params AS (
        INSERT INTO trial_params (trial_id, param_name, param_value, distribution_json)
        SELECT mine.trial_id, p.name, p.value, p.distribution
          FROM mine, unnest(CAST(:param_names AS text[]), CAST(:param_values AS float8[]),
                            CAST(:distributions AS text[])) WITH ORDINALITY AS p (name, value, distribution, place)
         ORDER BY p.place
        ON CONFLICT (trial_id, param_name) DO NOTHING)
"""
_STEP = """
    step AS (
        INSERT INTO trial_intermediate_values (trial_id, step, intermediate_value, intermediate_value_type)
        SELECT trial_id, :step, CAST(:value AS float8), CAST(:kind AS trialintermediatevaluetype) FROM mine
        ON CONFLICT (trial_id, step) DO UPDATE SET intermediate_value = excluded.intermediate_value,
                                                   intermediate_value_type = excluded.intermediate_value_type)
"""
_STATE = """
    moved AS (
        UPDATE trials t SET state = CAST(:state AS trialstate), datetime_start = {start}, datetime_complete = {complete}
          FROM mine WHERE t.trial_id = mine.trial_id {when}
        RETURNING 1)
"""
_SELECT_STATE = "SELECT number, state FROM trial"
_SELECT_STATE_AND_MOVED = "SELECT number, state, EXISTS (SELECT FROM moved) AS moved FROM trial"


@dataclass
class Batch:
    """Parameters and attributes of a trial that are written together."""

    params: dict[str, tuple[float, BaseDistribution]] = field(default_factory=dict)
    user_attrs: dict[str, Any] = field(default_factory=dict)
    system_attrs: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.params or self.user_attrs or self.system_attrs)

    def add(self, later: Batch) -> None:
        """Add later writes: of a parameter, the first value is kept; of an attribute, the last value is kept."""
        for name, param in later.params.items():
            self.params.setdefault(name, param)
        self.user_attrs |= later.user_attrs
        self.system_attrs |= later.system_attrs

    def discard(self) -> None:
        """Drop all writes of the batch."""
        self.params, self.user_attrs, self.system_attrs = {}, {}, {}


def write_batch(database: Database, trial_id: int, attempt: int | None, batch: Batch) -> None:
    """Write parameters and attributes of a trial.

    Args:
        database: database of the study.
        trial_id: id of the trial.
        attempt: number of the attempt that owns the trial; None if this process does not own the trial.
        batch: the parameters and attributes.

    Raises:
        KeyError: the trial does not exist.
        UpdateFinishedTrialError: the trial is finished.
        ClaimLostError: `attempt` is given, and does not own the trial any more.
    """
    parts = [_format_guard(attempt, "SHARE")]
    parameters: dict[str, Any] = {"trial_id": trial_id, "attempt": attempt}
    if batch.params:
        parts.append(_PARAMS)
        parameters["param_names"] = list(batch.params)
        parameters["param_values"] = [float(value) for value, _ in batch.params.values()]
        parameters["distributions"] = [distribution_to_json(distribution) for _, distribution in batch.params.values()]
    for kind, attrs in (("user", batch.user_attrs), ("system", batch.system_attrs)):
        if attrs:
            parts.append(SET_ATTRS.format(kind=kind))
            parameters |= make_attr_parameters(kind, attrs)
    raise_if_rejected(database, database.fetch_rows(", ".join(parts) + _SELECT_STATE, parameters), trial_id, attempt)


def write_intermediate_value(database: Database, trial_id: int, attempt: int | None, step: int, value: float) -> None:
    """Write an intermediate value of a trial; `attempt` and the exceptions are as in `write_batch`."""
    stored, kind = encode_value(value, nan=True)
    parameters = {"trial_id": trial_id, "attempt": attempt, "step": step, "value": stored, "kind": kind}
    statement = f"{_format_guard(attempt, 'SHARE')}, {_STEP} {_SELECT_STATE}"
    raise_if_rejected(database, database.fetch_rows(statement, parameters), trial_id, attempt)


def raise_if_not_writable(rows: Rows, trial_id: int) -> None:
    """Raise Optuna's error if the trial does not exist or is finished; `rows` is empty, or has number and state."""
    if not rows:
        raise KeyError(f"there is no trial with id {trial_id}")
    if STATE_BY_NAME[rows[0].state] in FINISHED_STATES:
        raise UpdateFinishedTrialError(f"Trial#{rows[0].number} has already finished and can not be updated.")


def raise_if_rejected(database: Database, rows: Rows, trial_id: int, attempt: int | None) -> None:
    """Raise the appropriate error if a write statement has rejected the write."""
    if attempt is None:
        raise_if_not_writable(rows, trial_id)
    elif not rows:
        raise make_claim_lost_error(database, trial_id, attempt)


def _format_guard(attempt: int | None, lock: str) -> str:
    return (_UNOWNED_GUARD if attempt is None else _OWNER_GUARD).format(lock=lock)


def write_state(
    database: Database,
    trial_id: int,
    attempt: int | None,
    state: TrialState,
    *,
    values: Sequence[float] | None,
    now: datetime,
) -> bool:
    """Change a trial's state, and its values if `values` is given.

    The start and end times of an owned trial are from the database clock. Those of other trials are from the caller's
    clock (`now`, as naive UTC), as in Optuna.

    Returns:
        False if `state` is RUNNING, and another process has already set the trial to RUNNING.
    """
    clock = "CAST(:now AS timestamp)" if attempt is None else "CAST(clock_timestamp() AT TIME ZONE 'UTC' AS timestamp)"
    is_running = state == TrialState.RUNNING
    moved = _STATE.format(
        start=clock if is_running else "t.datetime_start",
        complete=clock if state in FINISHED_STATES else "t.datetime_complete",
        when="AND mine.state = 'WAITING'" if is_running else "",
    )
    parts = [_format_guard(attempt, "NO KEY UPDATE"), moved]
    parameters: dict[str, Any] = {"trial_id": trial_id, "attempt": attempt, "state": state.name, "now": now}
    if values is not None:
        parts.append(SET_VALUES)
        parameters |= make_value_parameters(values)
    rows, repeated = database.fetch_with_retry_flag(", ".join(parts) + _SELECT_STATE_AND_MOVED, parameters)
    if repeated and not (rows and rows[0].moved) and (found := read_trial(database, trial_id)) is not None:
        trial, _ = found
        if has_state(trial, state, values, utc_to_local(now)):
            return True
    raise_if_rejected(database, rows, trial_id, attempt)
    return bool(rows[0].moved)
