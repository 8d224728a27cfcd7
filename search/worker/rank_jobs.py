"""Workers with several processes, the ranks: rank 0 runs the worker loop, and all ranks train together."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from hpsearch.kill_points import kill_point
from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.fit import fit
from hpsearch.objectives.loading import load_objective
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.rank_errors import RankLostError
from hpsearch.objectives.training.ranks import Ranks, current_ranks
from hpsearch.objectives.training.result import RunResult
from hpsearch.objectives.training.session import Session
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.study import set_metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A training that all ranks run together. Rank 0 broadcasts it to the other ranks.

    Attributes:
        trial: number of the trial.
        attempt: number of the attempt.
        spec: spec of the study, with the objective and its metrics.
        config: return value of the objective's `suggest`.
        plan: epochs, seeds and data of the run.
    """

    trial: int
    attempt: int
    spec: StudySpec
    config: Any
    plan: RunPlan


def fit_on_all_ranks(objective: BaseObjective, job: Job, *, session: Session, device: str | None) -> RunResult:
    """Broadcast the job from rank 0, and train on all ranks; a worker with one process only trains.

    Raises:
        RankLostError: a rank ended or does not answer, and this process has to exit.
        Exception: `fit` raised the exception on any rank.
    """
    ranks = current_ranks()
    _broadcast(ranks, job)
    with ranks.fail_together():
        return fit(objective, job.config, job.plan, session=session, device=device)


def run_follower_rank(ranks: Ranks, *, device: str | None) -> int:
    """Train the jobs that rank 0 broadcasts until rank 0 sends an exit code, and return that code.

    Raises:
        RankLostError: a rank ended or does not answer.
    """
    loaded: dict[str, BaseObjective] = {}
    while isinstance(job := _receive_job(ranks), Job):
        try:
            with ranks.fail_together():
                name = job.spec.objective
                objective = loaded[name] = loaded.get(name) or load_objective(name)
                set_metrics(objective, job.spec)
                fit(objective, job.config, job.plan, device=device)
        except (RankLostError, KeyboardInterrupt):
            raise
        except BaseException as error:  # rank 0 raises the same error and ends the trial
            log.debug("rank %d: %s", ranks.rank, error)
    return job


@kill_point("receive job")
def _receive_job(ranks: Ranks) -> Job | int:
    return _broadcast(ranks, 0)


def _broadcast(ranks: Ranks, message: Job | int) -> Job | int:
    """Return the message of rank 0. No training runs at this time, so any error means that a rank ended."""
    try:
        return ranks.wait_for_rank_zero(message)
    except (RuntimeError, ValueError) as error:
        raise RankLostError(f"connection to another rank lost: {error}") from error


def stop_followers(ranks: Ranks, code: int) -> None:
    """Send the exit code to the other ranks, which wait for a job.

    Raises:
        RankLostError: a rank ended.
    """
    _broadcast(ranks, code)
