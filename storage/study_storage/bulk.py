"""Reading a big study at once: a table at a time, put together here.

Measured on 10,000 trials of 4 parameters and 10 steps: rows of the tables as they are reach Python sooner than arrays
or JSON that the server would make of them.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager

from optuna.trial import FrozenTrial

from hpsearch.storage.database.statements import Database
from hpsearch.storage.database.trial_rows import restore
from hpsearch.storage.study_storage.codec import STATES, distribution, to_local

_OF_FINISHED = """
    FROM {table} x JOIN trials t ON t.trial_id = x.trial_id
   WHERE t.study_id = :study_id AND t.trial_id <= :last AND t.state IN ('COMPLETE', 'PRUNED', 'FAIL')
   ORDER BY x.{order}
"""
_TRIALS = """
    SELECT s.study_id AS study, t.trial_id, t.number, CAST(t.state AS text), t.datetime_start, t.datetime_complete
      FROM studies s LEFT JOIN trials t ON t.study_id = s.study_id WHERE s.study_id = :study_id ORDER BY t.trial_id
"""
_PARAMS = "SELECT x.trial_id, x.param_name, x.param_value, x.distribution_json" + _OF_FINISHED.format(
    table="trial_params", order="param_id"
)
_VALUES = "SELECT x.trial_id, x.value, x.value_type" + _OF_FINISHED.format(table="trial_values", order="objective")
_STEPS = "SELECT x.trial_id, x.step, x.intermediate_value, x.intermediate_value_type" + _OF_FINISHED.format(
    table="trial_intermediate_values", order="trial_intermediate_value_id"
)
_USER_ATTRS = "SELECT x.trial_id, x.key, x.value_json" + _OF_FINISHED.format(
    table="trial_user_attributes", order="trial_user_attribute_id"
)
_SYSTEM_ATTRS = "SELECT x.trial_id, x.key, x.value_json" + _OF_FINISHED.format(
    table="trial_system_attributes", order="trial_system_attribute_id"
)


def read_study(database: Database, study_id: int) -> list[FrozenTrial]:
    """Return all trials of a study, by id: finished ones whole, the others without details.

    What is finished does not change any more, so that several statements find the same.

    Raises:
        KeyError: There is no such study.
    """
    rows = database.rows(_TRIALS, {"study_id": study_id})
    if not rows:
        raise KeyError(f"there is no study with id {study_id}")
    with _no_collection():
        trials = [
            FrozenTrial(
                number=number,
                state=STATES[state],
                value=None,
                datetime_start=to_local(start),
                datetime_complete=to_local(complete),
                params={},
                distributions={},
                user_attrs={},
                system_attrs={},
                intermediate_values={},
                trial_id=trial_id,
            )
            for _, trial_id, number, state, start, complete in rows
            if trial_id is not None
        ]
        finished = {trial._trial_id: trial for trial in trials if trial.state.is_finished()}
        if finished:
            _fill(database, finished, {"study_id": study_id, "last": max(finished)})
    return trials


def _fill(database: Database, trials: dict[int, FrozenTrial], of: dict[str, int]) -> None:
    """Give the trials their details; of those that finished only after they were listed there may be details too."""
    for trial_id, name, value, text in database.rows(_PARAMS, of):
        if trial_id in trials:
            trial, given = trials[trial_id], distribution(text)
            trial._params[name] = given.to_external_repr(value)
            trial._distributions[name] = given
    for trial_id, step, value, kind in database.rows(_STEPS, of):
        if trial_id in trials:
            trials[trial_id].intermediate_values[step] = value if value is not None else restore(value, kind)
    for trial_id, value, kind in database.rows(_VALUES, of):
        if trial_id in trials:
            trial = trials[trial_id]
            trial.values = [*(trial.values or ()), restore(value, kind)]
    for trial_id, key, text in database.rows(_USER_ATTRS, of):
        if trial_id in trials:
            trials[trial_id]._user_attrs[key] = json.loads(text)
    for trial_id, key, text in database.rows(_SYSTEM_ATTRS, of):
        if trial_id in trials:
            trials[trial_id]._system_attrs[key] = json.loads(text)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Make many objects without looking for garbage among them again and again, which takes longer than making them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
