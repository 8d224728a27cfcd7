"""The end of a study: its parent run says what came of it, and its note in the dashboard links to MLflow."""

from __future__ import annotations

import json
import logging
import time

from optuna.trial import FrozenTrial

from hpsearch.search.publish.finalists import tell_confirmation
from hpsearch.search.publish.note import write_note
from hpsearch.search.study.ranking import first_value
from hpsearch.search.study.study import StoredStudy, parent_of
from hpsearch.search.study.summary import Summary, summarise
from hpsearch.search.tracking.study_run import open_parent_run
from hpsearch.storage.attributes import INFEASIBLE, REASON, RUN_ID
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.health import one_line
from hpsearch.storage.trials.outcome import Outcome

log = logging.getLogger(__name__)

ON_FRONT = "hpsearch.on_front"  # tag of a trial's run


def close_study(study: StoredStudy, summary: Summary, tracking: Tracking) -> None:
    """Write the result to the parent run and the dashboard's note; end the run when the budget is spent.

    Safe to call more than once, and from several processes: each writes the same.
    """
    tags = {
        "hpsearch.trials": f"{summary.finished} of {study.budget}",
        "hpsearch.complete": str(summary.complete),
        "hpsearch.pruned": str(summary.pruned),
        "hpsearch.infeasible": str(summary.infeasible),
        "hpsearch.failed": str(summary.failed),
    }
    metrics: dict[str, float] = {}
    if summary.best is not None and (value := first_value(summary.best)) is not None:
        metrics[f"best_val_{study.spec.metric}"] = value
        tags["hpsearch.best_trial"] = str(summary.best.number)
        tags["hpsearch.best_run_id"] = str(summary.best.user_attrs.get(RUN_ID, ""))
    if study.spec.several:
        tags["hpsearch.front"] = json.dumps(
            {t.number: dict(zip(study.spec.ways, t.values, strict=True)) for t in summary.front}
        )
    if study.spec.constraints:
        tags["hpsearch.out_of_bounds"] = str(summary.out_of_bounds)
    parent = open_parent_run(study, tracking)
    end_open_runs(study, tracking)
    if study.spec.several:
        _tag_front(study, summary, tracking)
    tell_confirmation(study, tracking)
    tracking.end_study_run(
        parent,
        tags=tags,
        metrics=metrics,
        step=summary.finished,
        finished=study.is_spent(summary.finished),
    )
    write_note(study, summary)


def _tag_front(study: StoredStudy, summary: Summary, tracking: Tracking) -> None:
    """Tag the runs of the front's trials, by which the MLflow UI finds them, and no longer those that were on it."""
    tagged = tracking.tagged_trial_runs(study.spec.name, str(study.attrs[RUN_ID]), ON_FRONT)
    on_front = {str(trial.user_attrs[RUN_ID]) for trial in summary.front if RUN_ID in trial.user_attrs}
    for run in on_front - tagged:
        tracking.log(run, tags={ON_FRONT: "true"})
    for run in tagged - on_front:
        tracking.log(run, tags={ON_FRONT: "false"})


def end_open_runs(study: StoredStudy, tracking: Tracking) -> None:
    """End the runs of trials that have ended, whose workers died before they could say so in MLflow."""
    left = tracking.open_trial_runs(study.spec.name, str(study.attrs[RUN_ID]))
    for trial in study.trials() if left else []:
        if trial.number in left and trial.state.is_finished():
            outcome = Outcome.of_trial(trial.state.name, infeasible=bool(trial.user_attrs.get(INFEASIBLE)))
            reason = str(trial.user_attrs.get(REASON, ""))
            tracking.end_trial_run(left[trial.number], outcome, reason, at=int(time.time() * 1000))


def close_if_spent(study: StoredStudy, tracking: Tracking) -> None:
    """Close a study whose budget is spent: in a fleet without `run`, the last worker is the only one to do it.

    Finalists have no run of their own: when they are done, the study that they are of has more to tell.
    """
    summary = summarise(study)
    if not study.is_spent(summary.finished):
        return
    try:
        if study.spec.finalists_of is not None:
            end_open_runs(study, tracking)
            study = parent_of(study)
            summary = summarise(study)
        close_study(study, summary, tracking)
    except Exception as error:  # its trials are safe: `hpsearch report` closes it later
        log.warning("the end of study %s did not reach MLflow: %s", study.spec.name, one_line(error))


def reopen_study(study: StoredStudy, tracking: Tracking) -> None:
    """Reopen the run of a study that has trials to run again, and bring its tags up to date; a running one stays so."""
    if study.spec.finalists_of is not None:
        return  # the run is that of the search, which is over
    tracking.reopen(open_parent_run(study, tracking))
    close_study(study, summarise(study), tracking)


def reopen_trial_run(trial: FrozenTrial, tracking: Tracking) -> None:
    """Show a trial's run, which its next attempt goes on with, as one that is still to be run."""
    run_id = trial.user_attrs.get(RUN_ID)
    if run_id is not None:
        tracking.schedule(str(run_id))
