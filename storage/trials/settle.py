"""End a trial: its final state and reason, in one transaction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

import sqlalchemy as sa

from hpsearch.storage.database.trial_rows import MAY_WRITE, SET_ATTRS, SET_VALUES, attr_parameters, value_parameters


class Outcome(Enum):
    """How an attempt ended, and its trial with it unless that is tried again.

    Attributes:
        value: what `hpsearch_attempts` has.
        trial_state: the trial's state, by Optuna's name; ``WAITING`` leaves it to the next claim.
        mlflow_status: of the trial's run.
    """

    trial_state: str
    mlflow_status: str

    # MLflow knows no PRUNED: KILLED tells it from FINISHED in lists, the run's tag tells it from one that was killed.
    COMPLETE = "complete", "COMPLETE", "FINISHED"
    PRUNED = "pruned", "PRUNED", "KILLED"
    INFEASIBLE = "infeasible", "PRUNED", "FAILED"  # it diverged or did not fit: PRUNED, from which the sampler learns
    FAILED = "failed", "FAIL", "FAILED"
    LOST = "lost", "FAIL", "FAILED"  # its worker died, or froze, and its retries are spent
    CANCELLED = "cancelled", "FAIL", "KILLED"  # the trial was ended from outside
    RELEASED = "released", "WAITING", "RUNNING"  # given back by a worker that was told to stop
    PAUSED = "paused", "WAITING", "RUNNING"  # at a rung, until it is among the best there

    def __new__(cls, value: str, trial_state: str, mlflow_status: str) -> Self:
        """Make a member of its three words."""
        member = object.__new__(cls)
        member._value_ = value
        member.trial_state, member.mlflow_status = trial_state, mlflow_status
        return member

    @property
    def run_state(self) -> str:
        """What the trial's run is tagged with: it tells apart what MLflow has one status for."""
        return "fail" if self in {Outcome.FAILED, Outcome.LOST} else str(self.value)

    @classmethod
    def of_run(cls, state: str) -> Outcome:
        """Return the outcome of a run's state, in letters of either case; raises ValueError if there is none."""
        for outcome in cls:
            if outcome.run_state == state.lower():
                return outcome
        raise ValueError(f"no trial ends as {state!r}")

    @classmethod
    def of_trial(cls, state: str, *, infeasible: bool) -> Outcome:
        """Return how a finished trial ended: its state by Optuna's name, and whether it is marked as infeasible."""
        return cls.INFEASIBLE if infeasible else cls.of_run(state)


@dataclass(frozen=True)
class Ended:
    """How a trial ended, and why."""

    outcome: Outcome
    reason: str


def settle(  # noqa: PLR0913 all that is written of an end, by keyword
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
    """End a live attempt and set its trial's state; return whether that attempt was live and its trial RUNNING.

    Args:
        connection: in a transaction.
        trial_id: the trial.
        attempt: the attempt; when it is not live nothing is written.
        outcome: of the attempt, and of the trial.
        retry: leave the trial to the next claim all the same.
        value: the trial's, or one for each of several metrics; infinities are stored as Optuna does.
        attrs: user attributes of the trial to set.
        system: system attributes of the trial to set.
    """
    # No NaN among a trial's values.
    values = [value] if isinstance(value, float | int) else value or ()
    arguments = {
        "trial_id": trial_id,
        "attempt": attempt,
        "state": "WAITING" if retry else outcome.trial_state,
        "outcome": outcome.value,
        **value_parameters([] if any(map(math.isnan, values)) else values),
        **attr_parameters("user", attrs or {}),
        **attr_parameters("system", system or {}),
    }
    return bool(connection.execute(_SETTLE, arguments).scalar())


def retire(connection: sa.Connection, trial_id: int, *, attrs: Mapping[str, Any]) -> None:
    """End a trial that waits as PRUNED, with its last value."""
    connection.execute(_RETIRE, {"trial_id": trial_id, **attr_parameters("user", attrs)})


def end_attempt(connection: sa.Connection, trial_id: int, attempt: int, outcome: Outcome) -> None:
    """End an attempt, if it is live, and leave its trial as it is."""
    connection.execute(_END, {"trial": trial_id, "attempt": attempt, "outcome": outcome.value})


def ended_as(connection: sa.Connection, trial_id: int, attempt: int, outcome: Outcome) -> bool:
    """Whether the attempt has ended so."""
    found = connection.execute(_OUTCOME, {"trial": trial_id, "attempt": attempt}).scalar()
    return bool(found == outcome.value)


# A trial that is given back has no start until it is taken again, by which claims tell it from those at rungs.
_SETTLE = sa.text(f"""
    WITH mine AS (
        UPDATE hpsearch_attempts a SET ended_at = clock_timestamp(), outcome = :outcome FROM trials t WHERE {MAY_WRITE}
        RETURNING a.trial_id
    ), ended AS (
        UPDATE trials SET state = CAST(:state AS trialstate),
               datetime_start = CASE WHEN :state = 'WAITING' AND :outcome <> 'paused' THEN NULL ELSE datetime_start END,
               datetime_complete = CASE WHEN :state = 'WAITING' THEN NULL ELSE timezone('utc', clock_timestamp()) END
         WHERE trial_id IN (SELECT trial_id FROM mine)
    ), {SET_VALUES}, {SET_ATTRS.format(kind="user")}, {SET_ATTRS.format(kind="system")}
    SELECT count(*) FROM mine
""")  # noqa: S608 the parts are constants

_RETIRE = sa.text(f"""
    WITH mine AS (
        UPDATE trials SET state = 'PRUNED', datetime_complete = timezone('utc', clock_timestamp())
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

_END = sa.text("""
    UPDATE hpsearch_attempts SET ended_at = clock_timestamp(), outcome = :outcome
     WHERE trial_id = :trial AND attempt = :attempt AND ended_at IS NULL
""")

_OUTCOME = sa.text("SELECT outcome FROM hpsearch_attempts WHERE trial_id = :trial AND attempt = :attempt")
