"""The last phase of a budget in epochs, in which the rest is kept to complete the best trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from hpsearch.storage.rungs.rungs import Rungs, find_next_to_complete, find_next_to_promote


@dataclass(frozen=True)
class NextStep:
    """The next step of a free worker.

    Attributes:
        waiting: (id, rung) of the trial to promote; None if no trial is promoted now.
        can_start: whether a new trial may start instead.
    """

    waiting: tuple[int, int] | None
    can_start: bool


_IS_PROMOTED = sa.text("SELECT promoted_at IS NOT NULL FROM hpsearch_rungs WHERE trial_id = :trial AND rung = :rung")

# `needed`: epochs until the running trials complete, if they are promoted, or else pause.
_SELECT_PROGRESS = sa.text("""
    SELECT (SELECT count(*) FROM (
             SELECT FROM trials e WHERE e.study_id = :study AND e.state = 'COMPLETE' LIMIT :complete) AS e) AS complete,
           count(*) FILTER (WHERE at.promoted) AS promoted,
           coalesce(sum(at.next - at.reported), 0) AS committed,
           coalesce(sum(CASE WHEN at.promoted THEN :epochs ELSE at.next END - at.reported), 0) AS needed
      FROM trials t, LATERAL (
        SELECT v.reported, coalesce((SELECT min(e) FROM unnest(:ends) AS e WHERE e > v.reported), v.reported) AS next,
               EXISTS (SELECT FROM hpsearch_rungs r
                        WHERE r.trial_id = t.trial_id AND r.promoted_at IS NOT NULL) AS promoted
          FROM (SELECT count(*) AS reported FROM trial_intermediate_values WHERE trial_id = t.trial_id) AS v) AS at
     WHERE t.study_id = :study AND t.state = 'RUNNING' AND t.trial_id <> :besides
""")


def plan_next_step(
    connection: sa.Connection,
    study_id: int,
    rungs: Rungs,
    *,
    epochs_left: int | None,
    may_start: bool,
    running: int,
) -> NextStep:
    """Return the next trial to promote, and whether a new trial may start instead.

    Args:
        connection: connection whose transaction holds the lock of the study's row.
        study_id: id of the study.
        rungs: rungs of the study.
        epochs_left: the rest of the study's budget in epochs; None if it has no such budget.
        may_start: whether the budgets allow a new trial. If not, a trial may also be promoted to reach `min_complete`
            complete trials.
        running: number of running trials.
    """
    found = find_next_to_promote(connection, study_id)
    if epochs_left is not None:
        rung = None if found is None else found[1]
        last = _plan_last_phase(connection, study_id, rungs, rung=rung, epochs_left=epochs_left, running=running)
        if last is not None:
            return NextStep(last.waiting, can_start=may_start and last.can_start)
    if found is None and not may_start:
        found = find_next_to_complete(connection, study_id, rungs, running=running)
    return NextStep(found, can_start=may_start)


def _plan_last_phase(
    connection: sa.Connection, study_id: int, rungs: Rungs, *, rung: int | None, epochs_left: int, running: int
) -> NextStep | None:
    """Return the next step if the rest of a budget in epochs is needed for `min_complete` complete trials; else None.

    A trial starts or resumes only if the budget also suffices for the epochs that the running trials need.

    Args:
        connection: connection whose transaction holds the lock of the study's row.
        study_id: id of the study.
        rungs: rungs of the study.
        rung: rung of the trial that would be promoted; None if a new trial would start.
        epochs_left: the rest of the study's budget in epochs.
        running: number of running trials.
    """
    progress = _read_last_phase(connection, study_id, rungs, rung=rung, epochs_left=epochs_left, running=running)
    if progress is None:
        return None
    waiting = find_next_to_complete(connection, study_id, rungs, running=progress.promoted)
    if waiting is not None:
        needed = rungs.max_epochs - rungs.epochs[waiting[1]] + progress.needed
    else:
        needed = rungs.max_epochs * (running + 1)
    has_budget = needed <= epochs_left
    if not has_budget and running == 0:
        return None  # the rest of the budget cannot complete a trial
    if waiting is not None:
        return NextStep(waiting if has_budget else None, can_start=False)
    return NextStep(None, can_start=has_budget and progress.complete + running < rungs.min_complete)


def has_budget_to_continue(
    connection: sa.Connection, study_id: int, trial_id: int, rungs: Rungs, *, rung: int, epochs_left: int, running: int
) -> bool:
    """Return whether a trial may continue at a rung without taking epochs from the trials that must be completed.

    A trial whose promotion is recorded may always continue: it reaches the rung again when it resumes.

    Args:
        connection: connection whose transaction holds the lock of the study's row.
        study_id: id of the study.
        trial_id: id of the trial.
        rungs: rungs of the study.
        rung: the reached rung, from 0.
        epochs_left: the rest of the study's budget in epochs.
        running: number of running trials, with this trial.
    """
    others = {"epochs_left": epochs_left, "running": running - 1, "besides": trial_id}
    progress = _read_last_phase(connection, study_id, rungs, rung=rung, **others)
    if progress is None or connection.execute(_IS_PROMOTED, {"trial": trial_id, "rung": rung}).scalar_one():
        return True
    needed = int(progress.needed) + rungs.max_epochs - rungs.epochs[rung]
    return needed <= epochs_left and int(progress.complete) + int(progress.promoted) < rungs.min_complete


def _read_last_phase(
    connection: sa.Connection,
    study_id: int,
    rungs: Rungs,
    *,
    rung: int | None,
    epochs_left: int,
    running: int,
    besides: int = 0,
) -> sa.Row[Any] | None:
    """Return the progress of a study's trials, except the trial `besides`; None before the last phase.

    In the last phase, the epochs from the given rung to the next are needed to complete `min_complete` trials.
    """
    ends = [*rungs.epochs, rungs.max_epochs]
    steps = [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    step = steps[0 if rung is None else rung + 1]
    needed_each = rungs.max_epochs - ends[0]  # by each trial that must be completed, at most
    if epochs_left - step - running * max(steps) >= rungs.min_complete * needed_each:
        return None  # the usual case, without a query
    arguments = {"study": study_id, "complete": rungs.min_complete, "epochs": rungs.max_epochs, "ends": ends}
    progress = connection.execute(_SELECT_PROGRESS, {**arguments, "besides": besides}).one()
    missing = rungs.min_complete - progress.complete
    return progress if missing > 0 and epochs_left - step - progress.committed < missing * needed_each else None
