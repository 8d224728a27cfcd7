"""Writes of a trial: each is one statement, which locks the trial, checks who may write, and writes.

Two guards stand before a write. A trial that somebody owns (see `storage.trials.claims`) is written by its live
attempt alone, while it is RUNNING; any other trial by whoever has its id, until it is finished.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState

from hpsearch.storage.database.statements import Database, Rows
from hpsearch.storage.database.trial_rows import MAY_WRITE, claim_lost, store
from hpsearch.storage.study_storage.reading import FINISHED, STATES

# `mine` is the trial, locked against whoever would finish it at the same time; `open` is it where it may be written.
_ANYBODY = """
    WITH mine AS (SELECT trial_id, number, state FROM trials WHERE trial_id = :trial_id FOR {lock}),
         open AS (SELECT trial_id, state FROM mine WHERE state IN ('RUNNING', 'WAITING'))
"""
_OWNER = f"""
    WITH mine AS (SELECT t.trial_id, t.number, t.state
                    FROM hpsearch_attempts a, trials t WHERE {MAY_WRITE} FOR {{lock}}),
         open AS (SELECT trial_id, state FROM mine)
"""  # noqa: S608 the parts are constants

# The first value of a parameter stays, as in RDBStorage; of anything else, the last.
_PARAMS = """,
    params AS (
        INSERT INTO trial_params (trial_id, param_name, param_value, distribution_json)
        SELECT open.trial_id, p.name, p.value, p.distribution
          FROM open, unnest(CAST(:param_names AS text[]), CAST(:param_values AS float8[]),
                            CAST(:distributions AS text[])) WITH ORDINALITY AS p (name, value, distribution, place)
         ORDER BY p.place
        ON CONFLICT (trial_id, param_name) DO NOTHING)
"""
_ATTRS = """,
    {kind}_attrs AS (
        INSERT INTO trial_{kind}_attributes (trial_id, key, value_json)
        SELECT open.trial_id, a.key, a.value
          FROM open, unnest(CAST(:{kind}_keys AS text[]), CAST(:{kind}_values AS text[])) AS a (key, value)
        ON CONFLICT (trial_id, key) DO UPDATE SET value_json = excluded.value_json)
"""
_STEP = """,
    step AS (
        INSERT INTO trial_intermediate_values (trial_id, step, intermediate_value, intermediate_value_type)
        SELECT trial_id, :step, CAST(:value AS float8), CAST(:kind AS trialintermediatevaluetype) FROM open
        ON CONFLICT (trial_id, step) DO UPDATE SET intermediate_value = excluded.intermediate_value,
                                                   intermediate_value_type = excluded.intermediate_value_type)
"""
_VALUES = """,
    written AS (
        INSERT INTO trial_values (trial_id, objective, value, value_type)
        SELECT open.trial_id, v.place - 1, v.value, CAST(v.kind AS trialvaluetype)
          FROM open, unnest(CAST(:values AS float8[]), CAST(:kinds AS text[])) WITH ORDINALITY AS v (value, kind, place)
        ON CONFLICT (trial_id, objective) DO UPDATE SET value = excluded.value, value_type = excluded.value_type)
"""
_STATE = """,
    moved AS (
        UPDATE trials t SET state = CAST(:state AS trialstate), datetime_start = {start}, datetime_complete = {complete}
          FROM open WHERE t.trial_id = open.trial_id {when}
        RETURNING t.datetime_start, t.datetime_complete)
"""
_CHECK = "SELECT number, state FROM mine"
_CHECK_MOVED = """
    SELECT mine.number, mine.state, (SELECT count(*) FROM moved) AS moved,
           (SELECT datetime_start FROM moved) AS start, (SELECT datetime_complete FROM moved) AS complete
      FROM mine
"""


@dataclass
class Batch:
    """What of a trial is to be written together."""

    params: dict[str, tuple[float, BaseDistribution]] = field(default_factory=dict)
    user_attrs: dict[str, Any] = field(default_factory=dict)
    system_attrs: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.params or self.user_attrs or self.system_attrs)

    def discard(self) -> None:
        """Drop everything: it is as if it had never been set."""
        self.params, self.user_attrs, self.system_attrs = {}, {}, {}


def write(database: Database, trial_id: int, attempt: int | None, batch: Batch) -> None:
    """Write parameters and attributes.

    Raises:
        KeyError, UpdateFinishedTrialError: as Optuna's storages.
        ClaimLostError: `attempt` is given and does not own the trial (any more).
    """
    statement = _guard(attempt, "SHARE")
    parameters: dict[str, Any] = {"trial_id": trial_id, "attempt": attempt}
    if batch.params:
        statement += _PARAMS
        parameters["param_names"] = list(batch.params)
        parameters["param_values"] = [float(value) for value, _ in batch.params.values()]
        parameters["distributions"] = [distribution_to_json(given) for _, given in batch.params.values()]
    for kind, attrs in (("user", batch.user_attrs), ("system", batch.system_attrs)):
        if attrs:
            statement += _ATTRS.format(kind=kind)
            parameters[f"{kind}_keys"] = list(attrs)
            parameters[f"{kind}_values"] = [json.dumps(value) for value in attrs.values()]
    check(database, database.rows(statement + _CHECK, parameters), trial_id, attempt)


def write_step(database: Database, trial_id: int, attempt: int | None, step: int, value: float) -> None:
    """Write an intermediate value; raises as `write`."""
    stored, kind = store(value, nan=True)
    parameters = {"trial_id": trial_id, "attempt": attempt, "step": step, "value": stored, "kind": kind}
    check(database, database.rows(_guard(attempt, "SHARE") + _STEP + _CHECK, parameters), trial_id, attempt)


def guard_of(rows: Rows, trial_id: int) -> None:
    """Raise what Optuna's storages raise where `rows`, of number and state, show a trial that may not be written."""
    if not rows:
        raise KeyError(f"there is no trial with id {trial_id}")
    if STATES[rows[0].state] in FINISHED:
        raise UpdateFinishedTrialError(f"Trial#{rows[0].number} has already finished and can not be updated.")


def check(database: Database, rows: Rows, trial_id: int, attempt: int | None) -> None:
    """Raise why a guard let nothing through."""
    if attempt is None:
        guard_of(rows, trial_id)
    elif not rows:
        raise claim_lost(database, trial_id, attempt)


def _guard(attempt: int | None, lock: str) -> str:
    return (_ANYBODY if attempt is None else _OWNER).format(lock=lock)


@dataclass(frozen=True)
class Move:
    """A trial's change of state: whether it was made, and the times (naive UTC) that it left."""

    made: bool
    start: datetime | None = None
    complete: datetime | None = None


def write_state(
    database: Database,
    trial_id: int,
    attempt: int | None,
    state: TrialState,
    *,
    values: Sequence[float] | None,
    now: datetime,
) -> Move:
    """Change a trial's state, and its values where they are given.

    A trial that nobody owns gets its times from the caller's clock (`now`, naive UTC), as Optuna does it; an owned one
    from the database's.

    Returns:
        `made` is False where a trial is to run that runs already: somebody else was quicker.
    """
    clock = "CAST(:now AS timestamp)" if attempt is None else "CAST(clock_timestamp() AT TIME ZONE 'UTC' AS timestamp)"
    running = state == TrialState.RUNNING
    statement = _guard(attempt, "NO KEY UPDATE") + _STATE.format(
        start=clock if running else "t.datetime_start",
        complete=clock if state in FINISHED else "t.datetime_complete",
        when="AND open.state = 'WAITING'" if running else "",
    )
    parameters: dict[str, Any] = {"trial_id": trial_id, "attempt": attempt, "state": state.name, "now": now}
    if values is not None:
        stored = [store(value) for value in values]
        statement += _VALUES
        parameters |= {"values": [value for value, _ in stored], "kinds": [kind for _, kind in stored]}
    rows, repeated = database.rows_once(statement + _CHECK_MOVED, parameters)
    moved = bool(rows) and rows[0].moved == 1
    if not moved and repeated and (done := _done_before(database, trial_id, attempt, state, values=values, now=now)):
        return done
    check(database, rows, trial_id, attempt)
    return Move(True, rows[0].start, rows[0].complete) if moved else Move(False)


def _done_before(
    database: Database,
    trial_id: int,
    attempt: int | None,
    state: TrialState,
    *,
    values: Sequence[float] | None,
    now: datetime,
) -> Move | None:
    """Return the change that an earlier try made and whose reply was lost, if that is what is found.

    Who set a trial to RUNNING is told by its start, to the microsecond. With any other state it does not matter who
    did it: it is as it was to be.
    """
    statement = """
        SELECT t.datetime_start AS start, t.datetime_complete AS complete,
               ARRAY(SELECT CASE v.value_type WHEN 'INF_POS' THEN float8 'Infinity' WHEN 'INF_NEG' THEN '-Infinity'
                                 ELSE v.value END
                       FROM trial_values v WHERE v.trial_id = t.trial_id ORDER BY v.objective) AS written
          FROM trials t
         WHERE t.trial_id = :trial_id AND t.state = CAST(:state AS trialstate)
           AND (:attempt IS NULL OR EXISTS (SELECT FROM hpsearch_attempts a WHERE a.trial_id = t.trial_id
                                               AND a.attempt = :attempt AND a.ended_at IS NULL))
    """
    rows = database.rows(statement, {"trial_id": trial_id, "state": state.name, "attempt": attempt})
    if not rows or (state == TrialState.RUNNING and rows[0].start != now):
        return None
    if values is not None and repr(rows[0].written) != repr([float(value) for value in values]):  # repr: NaN is NaN
        return None
    return Move(True, rows[0].start, rows[0].complete)
