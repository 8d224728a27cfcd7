"""Publish the state of a study to MLflow and to the dashboard: results, finalists, note."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from hpsearch.search.console import command, counted
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.refit import tabulate_refit
from hpsearch.search.finalists.table import Finalists, counting_set
from hpsearch.search.finalists.text import confirmation_lines, optimism, ranked
from hpsearch.search.report.show import foreseen_line, promotion_lines
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.ranking import first_value
from hpsearch.search.study.study import StoredStudy, finalist_trials, load_study, parent_of
from hpsearch.search.study.summary import Summary, format_value, rung_lines, summarise
from hpsearch.search.tracking.tracker import open_parent_run
from hpsearch.storage.attributes import INFEASIBLE, REASON, RUN_ID, RUN_URL
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.health import describe_error, is_away
from hpsearch.storage.mlflow.tag_names import (
    FINALIST,
    FINALIST_RANK,
    FINALISTS_FRONT,
    ON_FRONT,
    TEST_CONFIRMED,
    TEST_OPENED,
    WINNER,
    WINNER_RUN_ID,
)
from hpsearch.storage.records.test_openings import Opening, read_opening
from hpsearch.storage.trials.settle import Outcome

log = logging.getLogger(__name__)

ARTIFACT = "finalists.json"


def tell_confirmation(study: StoredStudy, tracking: Tracking) -> None:
    """Write the finalists' table and the test scores to the runs in MLflow. Safe to call again, and at once."""
    runs = {trial.number: str(trial.user_attrs[RUN_ID]) for trial in study.trials() if RUN_ID in trial.user_attrs}
    counting = counting_set(study)
    if counting is not None and not counting[1].pending:
        _tell_finalists(study, *counting, runs, tracking)
    opening = read_opening(study.engine, study.study_id)
    if opening is not None and opening.scores is not None and (run := _scored_run(study, opening, runs)):
        _annotate(
            tracking,
            run,
            tags={TEST_OPENED: opening.told, TEST_CONFIRMED: str(opening.finalists is not None).lower()},
            metrics={f"test_{name}": value for name, value in opening.scores.items()},
            at=opening.opened_at.timestamp(),
        )


def _scored_run(study: StoredStudy, opening: Opening, runs: dict[int, str]) -> str | None:
    """Return the run whose model was scored on the test set: the trial's, or that of its refit."""
    if opening.refit is None:
        return runs.get(opening.trial_number)
    with suppress(SearchError):  # somebody deleted the refit
        made = load_study(study.storage, opening.refit)
        taken = tabulate_refit(made).taken
        return None if taken is None else made.trials()[taken].user_attrs.get(RUN_ID)
    return None


def _tell_finalists(
    study: StoredStudy, chosen: StoredStudy, found: Finalists, runs: dict[int, str], tracking: Tracking
) -> None:
    ended = max(t.datetime_complete.timestamp() for t in chosen.trials() if t.datetime_complete is not None)
    parent = str(study.attrs[RUN_ID])
    tracking.client.log_dict(parent, table_record(study, found), ARTIFACT)
    winner, its_run = ("", "") if found.winner is None else (str(found.winner), runs.get(found.winner, ""))
    front = {FINALISTS_FRONT: ", ".join(map(str, found.front))} if study.spec.several else {}
    tracking.annotate(parent, tags={WINNER: winner, WINNER_RUN_ID: its_run, **front}, metrics={}, at=ended)
    for rank, row in enumerate(ranked(study, found), 1):
        if row.trial not in runs:
            continue
        figures = {"finalist_mean": row.mean, "finalist_spread": row.spread}
        figures |= {f"finalist_mean_{name}": mean for name, mean in zip(study.spec.ways, row.means, strict=False)}
        if row.trial == found.winner and found.expected is not None:
            figures |= {
                "expected": found.expected.mean,
                "expected_low": found.expected.low,
                "expected_high": found.expected.high,
            }
        _annotate(
            tracking,
            runs[row.trial],
            tags={FINALIST: found.verdict(row), FINALIST_RANK: str(rank)},
            metrics={key: value for key, value in figures.items() if value is not None},
            at=ended,
        )
    for number in finalist_trials(study) - {row.trial for row in found.rows}:
        if number in runs:
            _annotate(tracking, runs[number], tags={FINALIST: "of another set"}, metrics={}, at=ended)


def _annotate(tracking: Tracking, run: str, *, tags: dict[str, str], metrics: dict[str, float], at: float) -> None:
    """Write to a trial's run. One that somebody deleted must not keep the others from being told."""
    try:
        tracking.annotate(run, tags=tags, metrics=metrics, at=at)
    except Exception as error:  # what is away is raised again; MLflow refuses by several types
        if is_away(error):
            raise
        log.warning("run %s is not told: %s", run, describe_error(error))


def table_record(study: StoredStudy, found: Finalists) -> dict[str, Any]:
    """Return the table as plain values, for a file."""
    rows = [{**dataclasses.asdict(row), "optimism": optimism(study, row)} for row in ranked(study, found)]
    return {
        "study": study.spec.name,
        "metric": f"val_{study.spec.metric}",
        "direction": study.spec.direction,
        "finalists": found.study,
        "seeds": list(found.seeds),
        "winner": found.winner,
        "tie": list(found.tie),
        **({"directions": study.spec.directions, "front": list(found.front)} if study.spec.several else {}),
        "standard_error_of_difference": found.error,
        "fresh_divisions": found.divided,
        "expected": None if found.expected is None else dataclasses.asdict(found.expected),
        "rows": rows,
    }


_MOST = 20  # trials of a front


def write_note(study: StoredStudy, summary: Summary) -> None:
    """Write the study's note in the dashboard."""
    from optuna_dashboard import save_note  # it imports scikit-learn: a second of each worker's start

    optuna_study = optuna.load_study(study_name=study.spec.name, storage=study.storage)
    save_note(optuna_study, study_note(study, summary))


def study_note(study: StoredStudy, summary: Summary) -> str:
    """Return the study's note, in Markdown: attributes are plain text in the dashboard, links work only in notes."""
    spec = study.spec
    lines = [
        f"**{spec.name}**: {spec.objective}, {_ways(spec)}, {study.done(summary.finished)}.",
        "",
        f"[The study in MLflow]({study.attrs.get(RUN_URL, '')}); its workers: `{command('top', spec.name)}`",
    ]
    if spec.several and summary.front:
        lines += ["", "Front, the trials that no other dominates:", "", *_front_table(spec, summary.front)]
    elif (best := summary.best) is not None:
        params = ", ".join(f"`{key}` = {format_value(value)}" for key, value in best.params.items())
        lines += ["", f"Best: {_linked(best)}, val {spec.metric} {first_value(best):.4f} with {params}."]
    if summary.out_of_bounds:
        bounds = " or ".join(f"`{bound}`" for bound in spec.bounds)
        lines += ["", f"{counted(summary.out_of_bounds, 'complete trial')} out of bounds: {bounds} is broken."]
    for line in confirmation_lines(study):
        lines += ["", f"{line[:1].upper()}{line[1:]}."]
    rungs = rung_lines(study)
    rungs += [best_open] if (best_open := foreseen_line(study)) else []
    lines += ["", *(f"- {line}" for line in rungs)] if rungs else []
    promoted = [line for line in promotion_lines(study) if line]
    lines += ["", *(f"- {line}" for line in promoted)] if promoted else []
    return "\n".join(lines)


def _ways(spec: StudySpec) -> str:
    if not spec.several:
        return f"{spec.direction} val {spec.metric}"
    return " and ".join(f"{way} {name}" for name, way in spec.ways.items())


def _linked(trial: FrozenTrial) -> str:
    url = trial.user_attrs.get(RUN_URL)
    return f"[trial {trial.number}]({url})" if url else f"trial {trial.number}"


def _front_table(spec: StudySpec, front: Sequence[FrozenTrial]) -> list[str]:
    head = [f"| trial | {' | '.join(spec.ways)} |", f"|---|{'---|' * len(spec.ways)}"]
    shown = [
        f"| {_linked(trial)} | {' | '.join(f'{value:.4g}' for value in trial.values)} |" for trial in front[:_MOST]
    ]
    return head + shown + ([f"| and {len(front) - _MOST} more | {'| ' * len(spec.ways)}"] if len(front) > _MOST else [])


def close_study(study: StoredStudy, summary: Summary, tracking: Tracking) -> None:
    """Write the result to the parent run and the dashboard's note; end the run when the budget is spent.

    Safe to call more than once, and from several processes: each writes the same.
    """
    tags = {
        tag_names.TRIALS: f"{summary.finished} of {study.budget}",
        tag_names.COMPLETE: str(summary.complete),
        tag_names.PRUNED: str(summary.pruned),
        tag_names.INFEASIBLE: str(summary.infeasible),
        tag_names.FAILED: str(summary.failed),
    }
    metrics: dict[str, float] = {}
    if summary.best is not None and (value := first_value(summary.best)) is not None:
        metrics[f"best_val_{study.spec.metric}"] = value
        tags[tag_names.BEST_TRIAL] = str(summary.best.number)
        tags[tag_names.BEST_RUN_ID] = str(summary.best.user_attrs.get(RUN_ID, ""))
    if study.spec.several:
        tags[tag_names.FRONT] = json.dumps(
            {t.number: dict(zip(study.spec.ways, t.values, strict=True)) for t in summary.front}
        )
    if study.spec.constraints:
        tags[tag_names.OUT_OF_BOUNDS] = str(summary.out_of_bounds)
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
        log.warning("the end of study %s did not reach MLflow: %s", study.spec.name, describe_error(error))


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
