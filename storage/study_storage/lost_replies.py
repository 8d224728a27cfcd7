"""Lost replies: find out whether a statement was committed, so that a retry does not execute it a second time.

If a connection breaks during a commit, the client does not receive the reply. `Database` then calls again, with the
information that this call is a retry. The functions of this module find the rows of the first try. Statements that are
idempotent, such as a write of the same attribute, need no such search.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpsearch.storage.database.statements import to_sql
from hpsearch.storage.database.trial_rows import CLIENT_TIMEOUT, LOCK_STUDY

# A retry finds the trial of the first try by its start, which has microseconds; `floor` is an id from before the first
# try. The first try does not search: two processes of a large fleet may start a trial in the same microsecond.
SELECT_CREATED_TRIAL = """
    SELECT trial_id, number FROM trials
     WHERE :repeated AND trial_id > :floor AND study_id = :study_id
       AND datetime_start = CAST(:start AS timestamp)
"""

_SELECT_CLAIM = """
    SELECT trial_id, number, attempt FROM hpsearch_attempts JOIN trials USING (trial_id)
     WHERE claim_id = :claim AND ended_at IS NULL
"""


def has_study(connection: sa.Connection, study_id: int, name: str) -> bool:
    """Return whether the study with this id and name was committed."""
    statement = to_sql("SELECT study_id FROM studies WHERE study_name = :name")
    return bool(connection.execute(statement, {"name": name}).scalar() == study_id)


def has_trial(connection: sa.Connection, study_id: int, trial_id: int) -> bool:
    """Wait until the transaction that inserted a trial has ended, and return whether the trial was committed."""
    connection.execute(to_sql(CLIENT_TIMEOUT + LOCK_STUDY), {"study_id": study_id})
    return connection.execute(to_sql("SELECT 1 FROM trials WHERE trial_id = :id"), {"id": trial_id}).first() is not None


def find_claim(connection: sa.Connection, claim_id: uuid.UUID) -> sa.Row[Any] | None:
    """Return the trial's id and number, and the attempt, of a committed claim; None if the claim was not committed."""
    return connection.execute(to_sql(_SELECT_CLAIM), {"claim": claim_id}).one_or_none()


def has_ended_as(connection: sa.Connection, trial_id: int, attempt: int, outcome: str) -> bool:
    """Return whether the attempt has ended with this outcome."""
    statement = to_sql("SELECT outcome FROM hpsearch_attempts WHERE trial_id = :trial AND attempt = :attempt")
    return bool(connection.execute(statement, {"trial": trial_id, "attempt": attempt}).scalar() == outcome)


def has_state(
    trial: FrozenTrial, state: TrialState, values: Sequence[float] | None, local_start: datetime | None
) -> bool:
    """Return whether a trial has the state and values that an earlier try has set, possibly without a reply.

    If the state is RUNNING, the start time in microseconds must be equal too, because it identifies the process that
    set the state. Other states count as written, even if another process set them.

    Args:
        trial: the stored trial.
        state: the new state.
        values: the new values; None if they do not change.
        local_start: the start time of the try, in local time.
    """
    return (
        trial.state == state
        and (state != TrialState.RUNNING or trial.datetime_start == local_start)
        and (values is None or repr(trial.values) == repr([float(value) for value in values]))  # repr: NaN equals NaN
    )
