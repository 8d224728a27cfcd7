"""Ends of attempts and trials: state, values and attributes in one statement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

import sqlalchemy as sa

from hpsearch.storage.database.fencing import FENCING
from hpsearch.storage.database.trial_rows import (
    FIRST_START,
    SET_ATTRS,
    SET_VALUES,
    make_attr_parameters,
    make_value_parameters,
)


class Outcome(Enum):
    """Outcome of an attempt, and of its trial if the trial gets no further attempt.

    Attributes:
        value: name of the outcome in the table `hpsearch_attempts`.
        trial_state: Optuna's name of the trial's state; another attempt may take a ``WAITING`` trial.
        mlflow_status: status of the trial's MLflow run.
    """

    trial_state: str
    mlflow_status: str

    # MLflow has no status PRUNED, and shows KILLED like a failure. The tag `hpsearch.state` has the outcome.
    COMPLETE = "complete", "COMPLETE", "FINISHED"
    PRUNED = "pruned", "PRUNED", "FINISHED"
    INFEASIBLE = "infeasible", "PRUNED", "FAILED"  # diverged or out of memory; PRUNED, so that samplers use the trial
    FAILED = "failed", "FAIL", "FAILED"
    LOST = "lost", "FAIL", "FAILED"  # the worker died or froze; without a retry, the trial fails
    CANCELLED = "cancelled", "FAIL", "KILLED"  # another program ended the trial
    RELEASED = "released", "WAITING", "RUNNING"  # the worker shut down
    PAUSED = "paused", "WAITING", "RUNNING"  # the trial waits at a rung until it is promoted or pruned

    def __new__(cls, value: str, trial_state: str, mlflow_status: str) -> Self:
        """Create a member from its value, trial state and MLflow status."""
        member = object.__new__(cls)
        member._value_ = value
        member.trial_state, member.mlflow_status = trial_state, mlflow_status
        return member

    @property
    def run_state(self) -> str:
        """Value of the MLflow tag that distinguishes outcomes with the same run status."""
        return "fail" if self in {Outcome.FAILED, Outcome.LOST} else str(self.value)

    @classmethod
    def from_run_state(cls, state: str) -> Outcome:
        """Return the outcome with this run state, which is case-insensitive.

        Raises:
            ValueError: no outcome has this run state.
        """
        for outcome in cls:
            if outcome.run_state == state.lower():
                return outcome
        raise ValueError(f"unknown run state {state!r}")

    @classmethod
    def from_trial_state(cls, state: str, *, infeasible: bool) -> Outcome:
        """Return the outcome of a finished trial, given Optuna's name of the trial's state."""
        return cls.INFEASIBLE if infeasible else cls.from_run_state(state)


@dataclass(frozen=True)
class TrialEnd:
    """Outcome of a trial, and the reason of the outcome as text for users."""

    outcome: Outcome
    reason: str


def finish_attempt(  # noqa: PLR0913 keyword arguments for all columns of one statement
    connection: sa.Connection,
    trial_id: int,
    attempt: int,
    outcome: Outcome,
    *,
    retry: bool = False,
    value: float | Sequence[float] | None = None,
    attrs: Mapping[str, Any] | None = None,
    system: Mapping[str, Any] | None = None,
) -> bool:
    """End a live attempt and set the state of its trial.

    Args:
        connection: connection in a transaction.
        trial_id: id of the trial.
        attempt: number of the attempt.
        outcome: outcome of the attempt and of the trial.
        retry: whether to set the trial to WAITING, regardless of the outcome.
        value: value or values of the trial; infinities are stored as in Optuna; if a value is NaN, none is stored.
        attrs: user attributes to set.
        system: system attributes to set.

    Returns:
        False if the attempt has ended, or the trial is not RUNNING; nothing was written then.
    """
    # Optuna stores no NaN among the values of a trial.
    values = [value] if isinstance(value, float | int) else value or ()
    arguments = {
        "trial_id": trial_id,
        "attempt": attempt,
        "state": "WAITING" if retry else outcome.trial_state,
        "outcome": outcome.value,
        **make_value_parameters([] if any(map(math.isnan, values)) else values),
        **make_attr_parameters("user", attrs or {}),
        **make_attr_parameters("system", system or {}),
    }
    return bool(connection.execute(_FINISH_ATTEMPT, arguments).scalar())


def prune_waiting_trial(connection: sa.Connection, trial_id: int, *, attrs: Mapping[str, Any]) -> None:
    """Set a waiting trial to PRUNED, with its last reported value as its value."""
    connection.execute(_PRUNE_WAITING, {"trial_id": trial_id, **make_attr_parameters("user", attrs)})


def close_attempt(connection: sa.Connection, trial_id: int, attempt: int, outcome: Outcome) -> None:
    """End an attempt if it is live, without a change of its trial."""
    connection.execute(_CLOSE_ATTEMPT, {"trial": trial_id, "attempt": attempt, "outcome": outcome.value})


# A released trial has no start time until the next claim, which distinguishes it from trials that wait at rungs.
_FINISH_ATTEMPT = sa.text(f"""
    WITH mine AS (
        UPDATE hpsearch_attempts a SET ended_at = clock_timestamp(), outcome = :outcome FROM trials t WHERE {FENCING}
        RETURNING a.trial_id
    ), ended AS (
        UPDATE trials SET state = CAST(:state AS trialstate),
               datetime_start = CASE WHEN :state = 'WAITING' AND :outcome <> 'paused' THEN NULL ELSE datetime_start END,
               datetime_complete = CASE WHEN :state = 'WAITING' THEN NULL ELSE timezone('utc', clock_timestamp()) END
         WHERE trial_id IN (SELECT trial_id FROM mine)
    ), {SET_VALUES}, {SET_ATTRS.format(kind="user")}, {SET_ATTRS.format(kind="system")}
    SELECT count(*) FROM mine
""")  # noqa: S608 the parts are constants

_PRUNE_WAITING = sa.text(f"""
    WITH mine AS (
        UPDATE trials t SET state = 'PRUNED', datetime_start = {FIRST_START},
               datetime_complete = timezone('utc', clock_timestamp())
         WHERE trial_id = :trial_id AND state = 'WAITING'
        RETURNING trial_id
    ), retired AS (
        UPDATE hpsearch_rungs SET retired_at = clock_timestamp()
         WHERE trial_id IN (SELECT trial_id FROM mine) AND promoted_at IS NULL
    ), others AS (
        SELECT DISTINCT ON (trial_id) trial_id, metrics FROM mine JOIN hpsearch_epoch_values USING (trial_id)
         ORDER BY trial_id, step DESC
    ), valued AS (
        INSERT INTO trial_values (trial_id, objective, value, value_type)
        (SELECT trial_id, 0, intermediate_value, CAST(intermediate_value_type::text AS trialvaluetype)
          FROM mine JOIN trial_intermediate_values USING (trial_id)
         WHERE intermediate_value_type <> 'NAN'
         ORDER BY step DESC LIMIT 1)
        UNION ALL
        SELECT trial_id, v.place - 1, v.value, 'FINITE'
          FROM others, unnest(metrics) WITH ORDINALITY AS v (value, place) WHERE v.place > 1
        ON CONFLICT (trial_id, objective) DO UPDATE SET value = excluded.value, value_type = excluded.value_type
    ), {SET_ATTRS.format(kind="user")}
    SELECT count(*) FROM mine
""")  # noqa: S608 the parts are constants

_CLOSE_ATTEMPT = sa.text("""
    UPDATE hpsearch_attempts SET ended_at = clock_timestamp(), outcome = :outcome
     WHERE trial_id = :trial AND attempt = :attempt AND ended_at IS NULL
""")
