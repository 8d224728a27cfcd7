"""Rebuild the MLflow run of a trial whose machine was lost, from the trial's last checkpoint.

The last checkpoint of a COMPLETE trial stays in the store until MLflow has the trial's model. The checkpoint contains
the epochs and the best weights, from which the run and the model can be rebuilt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.fit import rebuild_result
from hpsearch.objectives.private_folders import open_temporary_folder
from hpsearch.objectives.training.reproducibility import checkpoint
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.result import RunResult
from hpsearch.search.console import format_command
from hpsearch.search.errors import USER_ERRORS, SearchError
from hpsearch.search.study.checkpoint_origin import find_foreign_part, find_unsafe_part, replace_config
from hpsearch.search.study.checkpoints import StudyCheckpoints
from hpsearch.search.study.ranking import get_first_value
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import summarise
from hpsearch.search.tracking.tracker import Tracker
from hpsearch.search.tracking.trial_run import TrialTracking
from hpsearch.storage.attributes import ATTEMPT, REASON
from hpsearch.storage.errors import StoredCheckpointError
from hpsearch.storage.mlflow.health import describe_error
from hpsearch.storage.mlflow.run_links import RunLinks
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.finishing import Outcome

log = logging.getLogger(__name__)


def list_pending_trials(study: StoredStudy) -> list[FrozenTrial]:
    """Return the COMPLETE trials some of whose records MLflow does not have yet."""
    # Read from the database, because the cached attributes of finished trials may be out of date.
    pending = RunLinks(study.engine).list_pending_trials(study.study_id)
    return [trial for trial in study.trials() if trial._trial_id in pending]


def list_trials_requiring_model(study: StoredStudy) -> list[int]:
    """Return the numbers of the trials that must have a model: the best, or in a refit study all COMPLETE trials."""
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
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Rebuild the journals of trials with missing records, unless the outbox of this machine has these journals.

    Args:
        study: the study.
        tracker: tracker that sends the journals.
        checkpoints: the checkpoints of the study.
        only: numbers of the trials to resend; None selects all trials.
        objective: objective of the study; if None, it is loaded when it is needed.
        on_progress: function that is called with a text for each step.

    Returns:
        One line per trial that could not be resent, with the reason.
    """
    problems = []
    for trial in list_pending_trials(study):
        if (only is not None and trial.number not in only) or tracker.outbox.has_journal(f"{trial.number:04d}-"):
            continue
        on_progress(f"rebuilding the model of trial {trial.number} from its checkpoint")
        try:
            if objective is None:
                objective = study.objective()
            _resend(study, tracker, checkpoints, objective, trial)
        except (*USER_ERRORS, checkpoint.CheckpointError, StoredCheckpointError) as error:
            if trial not in list_pending_trials(study):  # its machine has sent the records and removed the checkpoint
                continue
            problems.append(f"trial {trial.number}: {describe_error(error)}")
            log.warning(
                "trial %d: its MLflow run cannot be completed from a checkpoint: %s",
                trial.number,
                describe_error(error),
            )
    return problems


def _resend(
    study: StoredStudy, tracker: Tracker, checkpoints: StudyCheckpoints, objective: BaseObjective, trial: FrozenTrial
) -> None:
    with open_temporary_folder() as folder:
        result = _rebuild_result(study, checkpoints, objective, trial, folder)
        claim = Claim(trial._trial_id, trial.number, int(trial.user_attrs.get(ATTEMPT, 1)))
        tracked = TrialTracking(tracker, study, claim)
        tracked.open(resumed=True)
        tracked.log_params(trial.params)
        for record in result.history:
            tracked.log_epoch(record.epoch, record.timestamp, record.metrics)
        tracked.publish(result, [])
        ended = trial.datetime_complete
        at = int(ended.timestamp() * 1000) if ended is not None else None
        tracked.finish(Outcome.COMPLETE, str(trial.user_attrs.get(REASON, "")), is_checkpoint_kept=True, at=at)


def _rebuild_result(
    study: StoredStudy, checkpoints: StudyCheckpoints, objective: BaseObjective, trial: FrozenTrial, folder: Path
) -> RunResult:
    """Rebuild the training result of a trial from its last checkpoint.

    Raises:
        SearchError: no checkpoint contains the trial's best epoch.
        StorageError: the checkpoint store does not answer.
        ObjectiveError: the current code is incompatible with the checkpoint.
    """
    if not (files := checkpoints.read_trial_files(trial._trial_id, trial.number)):
        again = format_command("sync", study.spec.name)
        raise SearchError(f"the trial has no checkpoint; run {again} on the machine that trained it, to send its model")
    last = folder / "last.pt"
    checkpoints.files.get(next(iter(files.values())), last)
    state = checkpoint.read(last)
    if (needed := checkpoints.confirmation) and (unsafe := find_unsafe_part(state, needed)):
        raise SearchError(f"the checkpoint was not loaded: {unsafe}")
    best = checkpoint.promotable(state)
    if best["value"] != get_first_value(trial):
        raise SearchError(
            f"the checkpoint's best value, {best['value']:.6g}, is not the trial's value, {get_first_value(trial):.6g}"
        )
    if foreign := find_foreign_part(study, trial, best):
        raise SearchError(f"the checkpoint belongs to another training run ({foreign})")
    best = replace_config(objective, trial, best)
    checkpoint.write(folder / "best.pt", best)
    return rebuild_result(objective, best, [EpochRecord(**record) for record in state["history"]], folder / "best.pt")
