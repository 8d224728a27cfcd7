"""How an attempt at a trial ends: one word for the worker, the database, Optuna and MLflow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Self


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
