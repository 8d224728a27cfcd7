"""A worker of several processes: rank 0 is the worker, the others train what it trains."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from hpsearch.kill_points import kill_point
from hpsearch.objectives.fit import fit
from hpsearch.objectives.loading import load_objective
from hpsearch.objectives.objective import BaseObjective
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.ranks import RankLostError, Ranks
from hpsearch.objectives.training.result import RunResult
from hpsearch.objectives.training.session import Session
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.study import judge_by_metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A training that rank 0 tells the others to join.

    Attributes:
        trial, attempt: their numbers.
        spec: of the study; it names the objective and its metrics.
        config: as the objective's `suggest` made it.
        plan: its epochs, seeds and data.
    """

    trial: int
    attempt: int
    spec: StudySpec
    config: Any
    plan: RunPlan


def fit_together(
    ranks: Ranks, objective: BaseObjective, job: Job, *, session: Session, device: str | None
) -> RunResult:
    """Train on rank 0, and on all others; alone it is `fit`.

    Raises:
        RankLostError: a rank is gone or does not answer: this process has to end.
        Exception: what `fit` raised, on this rank or another.
    """
    _tell(ranks, job)
    with ranks.together():
        return fit(objective, job.config, job.plan, session=session, device=device)


def follow(ranks: Ranks, *, device: str | None) -> int:
    """Train what rank 0 says, job after job, until it says that it leaves; return its exit code.

    Raises:
        RankLostError: a rank is gone, or does not answer.
    """
    loaded: dict[str, BaseObjective] = {}
    while isinstance(job := _next(ranks), Job):
        try:
            with ranks.together():
                name = job.spec.objective
                objective = loaded[name] = loaded.get(name) or load_objective(name)
                judge_by_metrics(objective, job.spec)
                fit(objective, job.config, job.plan, device=device)
        except RankLostError:
            raise
        except (Exception, SystemExit) as error:  # rank 0 has the same, and ends the trial by it
            log.debug("rank %d: %s", ranks.rank, error)
    return job


@kill_point("receive job")
def _next(ranks: Ranks) -> Job | int:
    """What rank 0 says, on the others."""
    return _tell(ranks, 0)


def _tell(ranks: Ranks, said: Job | int) -> Job | int:
    """What rank 0 says between two trials, where no error can be but that a rank is gone."""
    try:
        return ranks.told(said)
    except (RuntimeError, ValueError) as error:
        raise RankLostError(f"a rank is gone: {error}") from error


def dismiss(ranks: Ranks, code: int) -> None:
    """Tell the others, which wait for a job, that there is none, and with which exit code to leave.

    Raises:
        RankLostError: a rank is gone.
    """
    _tell(ranks, code)
