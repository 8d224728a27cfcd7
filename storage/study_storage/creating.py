"""Creation of trials, with consecutive numbers, and without duplicates if the reply to a statement is lost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from optuna.distributions import distribution_to_json
from optuna.trial import FrozenTrial

from hpsearch.storage.database.statements import Database, to_sql
from hpsearch.storage.database.trial_rows import CLIENT_TIMEOUT, LOCK_STUDY, NEXT_NUMBER, encode_value
from hpsearch.storage.study_storage.lost_replies import SELECT_CREATED_TRIAL, has_trial
from hpsearch.storage.study_storage.reading import local_to_utc
from hpsearch.storage.study_storage.studies import require_study

_CREATE = f"""
    {LOCK_STUDY}
    WITH made AS ({SELECT_CREATED_TRIAL}), new AS (
        INSERT INTO trials (number, study_id, state, datetime_start)
        SELECT {NEXT_NUMBER}, study_id, 'RUNNING', CAST(:start AS timestamp) FROM studies
         WHERE study_id = :study_id AND NOT EXISTS (SELECT FROM made)
        RETURNING trial_id, number)
    SELECT trial_id, number FROM made UNION ALL SELECT trial_id, number FROM new
"""  # noqa: S608 the parts are constants

_INSERT = f"""
    {CLIENT_TIMEOUT} {LOCK_STUDY}
    WITH given AS (
        SELECT * FROM unnest(CAST(:states AS text[]), CAST(:starts AS timestamp[]), CAST(:completes AS timestamp[]))
               WITH ORDINALITY AS g (state, start, complete, place)
    ), new AS (
        INSERT INTO trials (number, study_id, state, datetime_start, datetime_complete)
        SELECT {NEXT_NUMBER} + g.place - 1, s.study_id, CAST(g.state AS trialstate), g.start, g.complete
          FROM studies s, given g WHERE s.study_id = :study_id ORDER BY g.place
        RETURNING trial_id, number
    ), placed AS (
        SELECT trial_id, number, row_number() OVER (ORDER BY number) AS place FROM new
    ), params AS (
        INSERT INTO trial_params (trial_id, param_name, param_value, distribution_json)
        SELECT placed.trial_id, p.name, p.value, p.distribution
          FROM unnest(CAST(:param_places AS int[]), CAST(:param_names AS text[]), CAST(:param_values AS float8[]),
                      CAST(:param_distributions AS text[]))
               WITH ORDINALITY AS p (place, name, value, distribution, sequence) JOIN placed USING (place)
         ORDER BY p.sequence
    ), results AS (
        INSERT INTO trial_values (trial_id, objective, value, value_type)
        SELECT placed.trial_id, v.objective, v.value, CAST(v.kind AS trialvaluetype)
          FROM unnest(CAST(:value_places AS int[]), CAST(:value_objectives AS int[]), CAST(:value_values AS float8[]),
                      CAST(:value_kinds AS text[])) AS v (place, objective, value, kind) JOIN placed USING (place)
    ), steps AS (
        INSERT INTO trial_intermediate_values (trial_id, step, intermediate_value, intermediate_value_type)
        SELECT placed.trial_id, v.step, v.value, CAST(v.kind AS trialintermediatevaluetype)
          FROM unnest(CAST(:step_places AS int[]), CAST(:step_steps AS int[]), CAST(:step_values AS float8[]),
                      CAST(:step_kinds AS text[])) WITH ORDINALITY AS v (place, step, value, kind, sequence)
               JOIN placed USING (place)
         ORDER BY v.sequence
    ), user_attrs AS (
        INSERT INTO trial_user_attributes (trial_id, key, value_json)
        SELECT placed.trial_id, a.key, a.value
          FROM unnest(CAST(:user_places AS int[]), CAST(:user_keys AS text[]), CAST(:user_values AS text[]))
               AS a (place, key, value) JOIN placed USING (place)
    ), system_attrs AS (
        INSERT INTO trial_system_attributes (trial_id, key, value_json)
        SELECT placed.trial_id, a.key, a.value
          FROM unnest(CAST(:system_places AS int[]), CAST(:system_keys AS text[]), CAST(:system_values AS text[]))
               AS a (place, key, value) JOIN placed USING (place))
    SELECT trial_id, number FROM placed ORDER BY place
"""  # noqa: S608 the parts are constants

_BATCH_SIZE = 1000  # trials in one statement


def create_trial(database: Database, study_id: int, start: datetime, floor: int) -> tuple[int, int]:
    """Create a RUNNING trial and return its id and number.

    Args:
        database: database of the study.
        study_id: id of the study.
        start: start time with microseconds, as naive UTC; a retry uses it to find the trial of the first try.
        floor: trial id; a new trial of this study has a higher id, so a retry searches only higher ids.

    Raises:
        KeyError: the study does not exist.
    """
    parameters = {"study_id": study_id, "start": start, "floor": floor}
    rows = database.retry(lambda repeated: database.run_once(_CREATE, {**parameters, "repeated": repeated}))
    require_study(rows, study_id)
    return rows[0].trial_id, rows[0].number


def insert_trials(database: Database, study_id: int, trials: Sequence[FrozenTrial]) -> list[tuple[int, int]]:
    """Insert trials with new numbers in one transaction, and return their ids and numbers.

    Raises:
        KeyError: the study does not exist.
    """
    batches = _make_batches(trials)
    sent: list[tuple[int, int]] = []

    def insert_rows(connection: sa.Connection, repeated: bool) -> list[tuple[int, int]]:
        # If the connection broke during the commit, the trials may exist.
        if repeated and sent and has_trial(connection, study_id, sent[-1][0]):
            return sent
        sent[:] = _insert_batches(connection, study_id, batches)
        return sent

    return database.run_transaction(insert_rows) if trials else []


def insert_trials_in(connection: sa.Connection, study_id: int, trials: Sequence[FrozenTrial]) -> None:
    """Insert trials with new numbers in the transaction of the connection."""
    _insert_batches(connection, study_id, _make_batches(trials))


def insert_missing_in(connection: sa.Connection, study_id: int, trials: Sequence[FrozenTrial]) -> tuple[int, int]:
    """Insert those of the given trials whose fixed parameters differ from those of all trials of the study.

    The transaction must hold the lock of the study's row.

    Returns:
        The number of inserted trials, and the number of all trials in the study after the insertion.
    """
    statement = """
        SELECT value_json FROM trial_system_attributes JOIN trials USING (trial_id)
         WHERE study_id = :study_id AND key = 'fixed_params'
    """
    known = [json.loads(row.value_json) for row in connection.execute(to_sql(statement), {"study_id": study_id})]
    missing = [trial for trial in trials if trial.system_attrs["fixed_params"] not in known]
    if missing:
        insert_trials_in(connection, study_id, missing)
    count = "SELECT count(*) FROM trials WHERE study_id = :study_id"
    return len(missing), int(connection.execute(to_sql(count), {"study_id": study_id}).scalar_one())


def _make_batches(trials: Sequence[FrozenTrial]) -> list[dict[str, list[Any]]]:
    return [_columns(trials[first : first + _BATCH_SIZE]) for first in range(0, len(trials), _BATCH_SIZE)]


def _insert_batches(
    connection: sa.Connection, study_id: int, batches: Iterable[dict[str, list[Any]]]
) -> list[tuple[int, int]]:
    created: list[tuple[int, int]] = []
    for columns in batches:
        rows = require_study(connection.execute(to_sql(_INSERT), {"study_id": study_id, **columns}).all(), study_id)
        created.extend((row.trial_id, row.number) for row in rows)
    return created


def _columns(trials: Sequence[FrozenTrial]) -> dict[str, list[Any]]:
    """Return the array parameters of `_INSERT`; a "place" is the position of a trial in the batch, from 1."""
    placed = list(enumerate(trials, 1))
    params = [
        (
            place,
            name,
            trial.distributions[name].to_internal_repr(value),
            distribution_to_json(trial.distributions[name]),
        )
        for place, trial in placed
        for name, value in trial.params.items()
    ]
    values = [
        (place, objective, *encode_value(value))
        for place, trial in placed
        for objective, value in enumerate(trial.values or ())
        if value is not None
    ]
    steps = [
        (place, step, *encode_value(value, nan=True))
        for place, trial in placed
        for step, value in trial.intermediate_values.items()
    ]
    return {
        "states": [trial.state.name for trial in trials],
        "starts": [local_to_utc(trial.datetime_start) for trial in trials],
        "completes": [local_to_utc(trial.datetime_complete) for trial in trials],
        **_to_columns(params, "param_places", "param_names", "param_values", "param_distributions"),
        **_to_columns(values, "value_places", "value_objectives", "value_values", "value_kinds"),
        **_to_columns(steps, "step_places", "step_steps", "step_values", "step_kinds"),
        **_to_columns(_rows((p, t.user_attrs) for p, t in placed), "user_places", "user_keys", "user_values"),
        **_to_columns(_rows((p, t.system_attrs) for p, t in placed), "system_places", "system_keys", "system_values"),
    }


def _rows(attrs_by_place: Iterable[tuple[int, dict[str, Any]]]) -> list[tuple[Any, ...]]:
    return [(place, key, json.dumps(value)) for place, attrs in attrs_by_place for key, value in attrs.items()]


def _to_columns(rows: Sequence[tuple[Any, ...]], *names: str) -> dict[str, list[Any]]:
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    return {name: list(column) for name, column in zip(names, columns, strict=True)}
