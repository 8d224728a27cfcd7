"""A trial whose machine never came back to tell MLflow of it: told by another, from the checkpoint that was kept.

The last checkpoint of a COMPLETE trial stays in the store until its model has arrived. It holds the trial's epochs and
its best weights, so that no winner is ever without a model.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from hpsearch.objectives.fit import result_of
from hpsearch.objectives.objective import BaseObjective
from hpsearch.objectives.training.reproducibility import checkpoint
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.result import RunResult
from hpsearch.search.errors import USER_ERRORS, SearchError
from hpsearch.search.study.checkpoints import StudyCheckpoints
from hpsearch.search.study.ranking import first_value
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import summarise
from hpsearch.search.tracking.tracker import Tracker
from hpsearch.search.tracking.trial_run import TrialTracking
from hpsearch.storage.attributes import ATTEMPT, REASON
from hpsearch.storage.checkpoints.pointers import read_pointers
from hpsearch.storage.errors import StoredCheckpointError
from hpsearch.storage.mlflow.health import describe_error
from hpsearch.storage.mlflow.run_links import RunLinks
from hpsearch.storage.trials.claims import Claim
from hpsearch.storage.trials.settle import Outcome

log = logging.getLogger(__name__)


def pending_trials(study: StoredStudy) -> list[FrozenTrial]:
    """Return the COMPLETE trials that MLflow does not have all of yet."""
    # As the database has it now: finished trials are read once, and what they said of MLflow then may be over.
    pending = RunLinks(study.engine).pending(study.study_id)
    return [trial for trial in study.trials() if trial._trial_id in pending]


def needed(study: StoredStudy) -> list[int]:
    """Return the trials that must not be without a model: the best; of a refit all, for one of them is taken later."""
    if study.spec.refit is not None:
        return [trial.number for trial in study.trials(TrialState.COMPLETE)]
    best = summarise(study).best
    return [] if best is None else [best.number]


def resend(
    study: StoredStudy,
    tracker: Tracker,
    checkpoints: StudyCheckpoints,
    *,
    only: Collection[int] | None = None,
    objective: BaseObjective | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Write journals for trials that no machine seems to send; ship them as any other.

    Those that this machine has in its outbox are left alone.

    Args:
        study: the study.
        tracker: takes the journals.
        checkpoints: of the study.
        only: numbers of the trials to look at; all unless given.
        objective: of the study; loaded when it is needed, unless given.
        tell: is told what is being done.

    Returns:
        A line for each trial that cannot be told of.
    """
    problems = []
    for trial in pending_trials(study):
        if (only is not None and trial.number not in only) or tracker.outbox.has(f"{trial.number:04d}-"):
            continue
        tell(f"making the model of trial {trial.number} again from its checkpoint")
        try:
            if objective is None:
                objective = study.objective()
            _resend(study, tracker, checkpoints, objective, trial)
        except (*USER_ERRORS, checkpoint.CheckpointError, StoredCheckpointError) as error:
            if trial not in pending_trials(study):  # its machine has sent it meanwhile, and removed the checkpoint
                continue
            problems.append(f"trial {trial.number}: {describe_error(error)}")
            log.warning("MLflow is not told of %s", problems[-1])
    return problems


def _resend(
    study: StoredStudy, tracker: Tracker, checkpoints: StudyCheckpoints, objective: BaseObjective, trial: FrozenTrial
) -> None:
    with tempfile.TemporaryDirectory(prefix="hpsearch-") as name:
        folder = Path(name)
        result = _result(study, checkpoints, objective, trial, folder)
        claim = Claim(trial._trial_id, trial.number, int(trial.user_attrs.get(ATTEMPT, 1)))
        tracked = TrialTracking(tracker, study, claim)
        tracked.open(resumed=True)
        tracked.log_params(trial.params)
        for record in result.history:
            tracked.log_epoch(record.epoch, record.timestamp, record.metrics)
        tracked.publish(result, [])
        ended = trial.datetime_complete
        at = int(ended.timestamp() * 1000) if ended is not None else None
        tracked.finish(Outcome.COMPLETE, str(trial.user_attrs.get(REASON, "")), kept=True, at=at)


def _result(
    study: StoredStudy, checkpoints: StudyCheckpoints, objective: BaseObjective, trial: FrozenTrial, folder: Path
) -> RunResult:
    """Return what the trial's training came to, from its last checkpoint.

    Raises:
        SearchError: there is none that has the trial's best epoch.
        StorageError: the store does not answer.
        ObjectiveError: today's code does not fit it.
    """
    pointers = read_pointers(study.engine, trial._trial_id)
    if not pointers:
        raise SearchError("its checkpoint is gone, and the machine that trained it has not sent its model")
    last = folder / "last.pt"
    checkpoints.files.get(next(iter(pointers.values())), last)
    state = checkpoint.read(last)
    best = checkpoint.promotable(state)
    if best["value"] != first_value(trial):
        raise SearchError(f"its last checkpoint has a best value of {best['value']:.6g}, not {first_value(trial):.6g}")
    checkpoint.write(folder / "best.pt", best)
    return result_of(objective, best, [EpochRecord(**record) for record in state["history"]], folder / "best.pt")
