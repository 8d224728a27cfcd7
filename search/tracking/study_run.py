"""Log results and finalists of a study to MLflow, and write the study's note in the dashboard."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.console import format_command, format_score, pluralize
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.refit import tabulate_refit
from hpsearch.search.finalists.table import Finalists, find_effective_set, read_finalists, to_record
from hpsearch.search.finalists.text import compute_search_bias, format_confirmation, rank_finalists
from hpsearch.search.report import update_report
from hpsearch.search.report.headline import make_headline
from hpsearch.search.report.show import format_best_forecast, format_promotions
from hpsearch.search.services import Services
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.ranking import get_first_value, is_feasible
from hpsearch.search.study.study import StoredStudy, list_finalist_trials, load_companion, load_parent_study
from hpsearch.search.study.summary import Summary, format_rungs, format_value, summarise
from hpsearch.search.tracking.tracker import open_parent_run
from hpsearch.storage.attributes import INFEASIBLE, REASON, RUN_ID, RUN_URL
from hpsearch.storage.display import escape_markdown, format_markdown_code, format_markdown_link
from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.client import Tracking, make_metrics
from hpsearch.storage.mlflow.health import check_server, describe_error, get_or_none, is_retryable
from hpsearch.storage.mlflow.runs_view import share_view
from hpsearch.storage.mlflow.tag_names import (
    FINALIST,
    FINALIST_RANK,
    FINALISTS_FRONT,
    ON_FRONT,
    OUT_OF_BOUNDS,
    TEST_CONFIRMED,
    TEST_OPENED,
    WINNER,
    WINNER_RUN_ID,
)
from hpsearch.storage.records.test_evaluations import TestEvaluation, read_test_evaluation
from hpsearch.storage.trials.finishing import Outcome

log = logging.getLogger(__name__)

FINALISTS_ARTIFACT = "finalists.json"


def log_confirmation(study: StoredStudy, tracking: Tracking) -> None:
    """Log the finalists' results and the test scores to MLflow. Repeated and concurrent calls have no other effect."""
    runs = {trial.number: str(trial.user_attrs[RUN_ID]) for trial in study.trials() if RUN_ID in trial.user_attrs}
    effective = find_effective_set(study)
    if effective is not None and not effective[1].pending:
        _log_finalists(study, *effective, runs, tracking)
    evaluation = read_test_evaluation(study.engine, study.study_id)
    if evaluation is not None and evaluation.scores is not None and (run := _find_run(study, evaluation, runs)):
        _annotate(
            tracking,
            run,
            tags={TEST_OPENED: evaluation.description, TEST_CONFIRMED: str(evaluation.finalists is not None).lower()},
            metrics={f"test_{name}": value for name, value in evaluation.scores.items()},
            at=evaluation.opened_at.timestamp(),
        )


def _find_run(study: StoredStudy, evaluation: TestEvaluation, runs: dict[int, str]) -> str | None:
    """Return the MLflow run of the model that was evaluated: the run of the trial, or of its refit."""
    if evaluation.refit is None:
        return runs.get(evaluation.trial_number)
    with suppress(SearchError):  # the refit may have been deleted
        made = load_companion(study, evaluation.refit)
        selected = tabulate_refit(made).selected_trial
        return None if selected is None else made.trials()[selected].user_attrs.get(RUN_ID)
    return None


def _log_finalists(
    study: StoredStudy, chosen: StoredStudy, found: Finalists, runs: dict[int, str], tracking: Tracking
) -> None:
    ended = max(t.datetime_complete.timestamp() for t in chosen.trials() if t.datetime_complete is not None)
    parent = str(study.attrs[RUN_ID])
    tracking.client.log_dict(parent, make_table_record(study, found), FINALISTS_ARTIFACT)
    winner, its_run = ("", "") if found.winner is None else (str(found.winner), runs.get(found.winner, ""))
    front = {FINALISTS_FRONT: ", ".join(map(str, found.front))} if study.spec.is_multi_objective else {}
    tracking.annotate_run(parent, tags={WINNER: winner, WINNER_RUN_ID: its_run, **front}, metrics={}, at=ended)
    for rank, row in enumerate(rank_finalists(study, found), 1):
        if row.trial not in runs:
            continue
        figures = {"finalist_mean": row.mean, "finalist_spread": row.spread}
        means = zip(study.spec.direction_by_metric, row.means, strict=False)
        figures |= {f"finalist_mean_{name}": mean for name, mean in means}
        if row.trial == found.winner and found.expected_score is not None:
            figures |= {
                "expected": found.expected_score.mean,
                "expected_low": found.expected_score.low,
                "expected_high": found.expected_score.high,
            }
        _annotate(
            tracking,
            runs[row.trial],
            tags={FINALIST: found.verdict(row), FINALIST_RANK: str(rank)},
            metrics={key: value for key, value in figures.items() if value is not None},
            at=ended,
        )
    for number in list_finalist_trials(study) - set(chosen.finalists_of.trials):
        if number in runs:
            _annotate(tracking, runs[number], tags={FINALIST: "in another set of finalists"}, metrics={}, at=ended)


def _annotate(tracking: Tracking, run: str, *, tags: dict[str, str], metrics: dict[str, float], at: float) -> None:
    """Log tags and metrics to a trial's run.

    A rejected request, for example for a deleted run, raises no error, so that the other runs get their annotations.
    """
    try:
        tracking.annotate_run(run, tags=tags, metrics=metrics, at=at)
    except Exception as error:  # MLflow's client rejects requests with several types of errors
        if is_retryable(error):
            raise
        log.warning("MLflow run %s: results of the finalists not logged (%s)", run, describe_error(error))


def make_table_record(study: StoredStudy, found: Finalists) -> dict[str, Any]:
    """Return the table of finalists as JSON values."""
    rows = [{**to_record(row), "bias": compute_search_bias(study, row)} for row in rank_finalists(study, found)]
    return {
        "study": study.spec.name,
        "metric": f"val_{study.spec.metric}",
        "direction": study.spec.direction,
        "finalists": found.study,
        "seeds": list(found.seeds),
        "winner": found.winner,
        "tie": list(found.tie),
        **({"directions": study.spec.directions, "front": list(found.front)} if study.spec.is_multi_objective else {}),
        "standard_error_of_difference": found.standard_error,
        "tie_margin": found.tie_margin,
        "fresh_divisions": found.is_resplit,
        "expected": None if found.expected_score is None else asdict(found.expected_score),
        "rows": rows,
    }


_MAX_LISTED = 20  # maximum number of trials of the Pareto front in the note


def write_note(study: StoredStudy, summary: Summary) -> None:
    """Write the note of the study in the Optuna dashboard."""
    from optuna_dashboard import save_note  # imported here, because it would delay the start of a worker by a second

    save_note(study.open(), study_note(study, summary))


def study_note(study: StoredStudy, summary: Summary) -> str:
    """Return the note of the study in Markdown, the result first, because MLflow shows only the first lines.

    The links are in the note because the dashboard does not render links in attributes.
    """
    spec = study.spec
    about = f"{spec.objective}, {_format_directions(spec)}, {study.format_progress(summary.finished)}."
    lines = [f"**{escape_markdown(spec.name)}**: {escape_markdown(about)}"]
    headline = make_headline(study, summary, read_finalists(study))
    results = escape_markdown(" ".join(f"{line[:1].upper()}{line[1:]}." for line in headline.format_lines()))
    if headline.next_steps:
        results += f" Next: {format_markdown_code(headline.next_steps[0].command)}."
    if spec.is_multi_objective and summary.front:
        lines = [results, "", "Pareto front:", "", *_format_front_table(spec, summary.front), "", *lines]
    elif (best := summary.best) is not None:
        params = ", ".join(
            f"{format_markdown_code(key)} = {escape_markdown(format_value(value))}"
            for key, value in best.params.items()
        )
        value = f"val {escape_markdown(spec.metric)} {format_score(get_first_value(best))}"
        lines = [f"Best: {_format_trial_link(best)}, {value}. {results}", "", f"Parameters: {params}.", "", *lines]
    elif results:
        lines += ["", results]
    if summary.out_of_bounds:
        bounds = " or ".join(format_markdown_code(str(bound)) for bound in spec.constraint_bounds)
        lines += ["", f"{pluralize(summary.out_of_bounds, 'complete trial')} out of bounds: {bounds} is violated."]
    for line in format_confirmation(study):
        lines += ["", escape_markdown(f"{line[:1].upper()}{line[1:]}.")]
    rungs = format_rungs(study)
    rungs += [best_open] if (best_open := format_best_forecast(study)) else []
    lines += ["", *(f"- {escape_markdown(line)}" for line in rungs)] if rungs else []
    promoted = [line for line in format_promotions(study) if line]
    lines += ["", *(f"- {escape_markdown(line)}" for line in promoted)] if promoted else []
    link = format_markdown_link("The study in MLflow", study.attrs.get(RUN_URL))
    return "\n".join([*lines, "", f"{link}; its workers: {format_markdown_code(format_command('top', spec.name))}"])


def _format_directions(spec: StudySpec) -> str:
    if not spec.is_multi_objective:
        return f"{spec.direction} val {spec.metric}"
    return " and ".join(f"{direction} {name}" for name, direction in spec.direction_by_metric.items())


def _format_trial_link(trial: FrozenTrial) -> str:
    return format_markdown_link(f"trial {trial.number}", trial.user_attrs.get(RUN_URL))


def _format_front_table(spec: StudySpec, front: Sequence[FrozenTrial]) -> list[str]:
    n_metrics, omitted = len(spec.direction_by_metric), len(front) - _MAX_LISTED
    lines = [f"| trial | {' | '.join(map(escape_markdown, spec.direction_by_metric))} |", f"|---|{'---|' * n_metrics}"]
    for trial in front[:_MAX_LISTED]:
        lines.append(f"| {_format_trial_link(trial)} | {' | '.join(f'{value:.4g}' for value in trial.values)} |")
    return [*lines, f"| and {omitted} more trials | {'| ' * n_metrics}"] if omitted > 0 else lines


def close_study(study: StoredStudy, summary: Summary, tracking: Tracking) -> None:
    """Log the study's result to its parent run and write the dashboard's note; end the run if the budget is spent.

    Repeated calls, also from several processes, have the same effect as one call.
    """
    tags = {
        tag_names.TRIALS: study.format_progress(summary.finished).removesuffix(" trials"),
        tag_names.COMPLETE: str(summary.complete),
        tag_names.PRUNED: str(summary.pruned),
        tag_names.INFEASIBLE: str(summary.infeasible),
        tag_names.FAILED: str(summary.failed),
    }
    if summary.best is not None:
        tags[tag_names.BEST_TRIAL] = str(summary.best.number)
        tags[tag_names.BEST_RUN_ID] = str(summary.best.user_attrs.get(RUN_ID, ""))
    if study.spec.is_multi_objective:
        names = study.spec.direction_by_metric
        front = {trial.number: dict(zip(names, trial.values, strict=True)) for trial in summary.front}
        tags[tag_names.FRONT] = json.dumps(front)
    if study.spec.constraints:
        tags[OUT_OF_BOUNDS] = str(summary.out_of_bounds)
    parent = open_parent_run(study, tracking)
    end_open_runs(study, tracking)
    if study.spec.is_multi_objective:
        _tag_front(study, summary, tracking)
    log_confirmation(study, tracking)
    _share_view(study, summary, tracking, parent)
    tags[tag_names.NOTE] = study_note(study, summary)
    course = [
        metric
        for step, (at, value) in enumerate(list_best_values(study), 1)
        for metric in make_metrics(step, at.timestamp(), {f"search_best_val_{study.spec.metric}": value})
    ]
    ends = [int(t.datetime_complete.timestamp() * 1000) for t in study.trials() if t.datetime_complete is not None]
    end_ms = max(ends, default=None) if study.is_spent(summary.finished) else None
    tracking.end_study_run(parent, tags=tags, metrics=course, end_ms=end_ms)
    write_note(study, summary)


def list_best_values(study: StoredStudy) -> list[tuple[datetime, float]]:
    """Return, for each complete feasible trial in order of completion, its end and the best value until then.

    In a multi-objective study, these are values of the first metric.
    """
    ended = [
        (trial.datetime_complete, value)
        for trial in study.trials(TrialState.COMPLETE)
        if is_feasible(trial) and trial.datetime_complete is not None and (value := get_first_value(trial)) is not None
    ]
    best = max if study.spec.maximize else min
    times, values = zip(*sorted(ended), strict=True) if ended else ((), ())
    return list(zip(times, itertools.accumulate(values, best), strict=True))


def _share_view(study: StoredStudy, summary: Summary, tracking: Tracking, parent: str) -> None:
    """Store the view of the study's runs in the MLflow UI, with the parameters of all trials as columns."""
    spec = study.spec
    names = list(spec.direction_by_metric) if spec.is_multi_objective else [spec.metric]
    run_id = None if summary.best is None else summary.best.user_attrs.get(RUN_ID)
    run = None if run_id is None else get_or_none(tracking.client.get_run, str(run_id))
    known = run.data.metrics if run is not None else {}
    # The model metrics, such as latency_ms, are no metrics of the validation data.
    metrics = [f"best_{name}" if f"best_{name}" in known else f"best_val_{name}" for name in names]
    params = sorted({name for trial in study.trials() for name in trial.params})
    tags = [OUT_OF_BOUNDS] if spec.constraints else []
    if spec.is_multi_objective:
        share_view(tracking, parent, metrics=metrics, params=params, tags=[ON_FRONT, *tags], order_by_tag=ON_FRONT)
    else:
        share_view(tracking, parent, metrics=metrics, params=params, tags=tags, is_ascending=not spec.maximize)


def _tag_front(study: StoredStudy, summary: Summary, tracking: Tracking) -> None:
    """Tag the runs of trials on the Pareto front, so that users can search for them in MLflow; untag all other runs."""
    tagged = tracking.find_tagged_trial_runs(study.spec.name, str(study.attrs[RUN_ID]), ON_FRONT)
    on_front = {str(trial.user_attrs[RUN_ID]) for trial in summary.front if RUN_ID in trial.user_attrs}
    for run in on_front - tagged:
        tracking.log(run, tags={ON_FRONT: "true"})
    for run in tagged - on_front:
        tracking.log(run, tags={ON_FRONT: "false"})


def end_open_runs(study: StoredStudy, tracking: Tracking) -> None:
    """End the open MLflow runs of finished trials. Their workers died before they could end the runs."""
    left = tracking.find_running_trial_runs(study.spec.name, str(study.attrs[RUN_ID]))
    for trial in study.trials() if left else []:
        if trial.number in left and trial.state.is_finished():
            outcome = Outcome.from_trial_state(trial.state.name, infeasible=bool(trial.user_attrs.get(INFEASIBLE)))
            reason = str(trial.user_attrs.get(REASON, ""))
            tracking.end_trial_run(left[trial.number], outcome, reason, end_ms=int(time.time() * 1000))


def log_report(study: StoredStudy, report: Path, tracking: Tracking) -> None:
    """Log the report to the study's parent run.

    Raises:
        StorageError: the study has no parent run.
    """
    if (run_id := study.attrs.get(RUN_ID)) is None:
        raise StorageError("the study has no run there yet")
    tracking.log_file(str(run_id), report)


def publish_result(services: Services, study: StoredStudy, tracking: Tracking) -> Path | None:
    """Close a study if its budget is spent, and write its report again. The last worker of a study calls this function.

    A finalist or refit study has no parent run of its own, so the parent run and the report of its search are updated.

    Returns:
        The path of the report; None if it was not written, which is logged as a warning.
    """
    try:
        is_spent, search = study.is_spent(summarise(study).finished), study
        if study.spec.finalists_of is not None:
            search = load_parent_study(study)
        if is_spent:
            check_server(tracking.uri)  # answers sooner than other requests fail
        if is_spent and search is not study:
            end_open_runs(study, tracking)
        if is_spent:
            close_study(search, summarise(search), tracking)
        report = update_report(services, search)
        check_server(tracking.uri)
        log_report(search, report, tracking)
    except Exception as error:  # the trials are stored, and `hpsearch report` closes the study later
        log.warning("study %s: result not logged to MLflow (%s)", study.spec.name, describe_error(error))
        return None
    return report


def reopen_study(study: StoredStudy, tracking: Tracking) -> None:
    """Set the parent run of a study that has new trials to run to RUNNING, and update the run's tags."""
    if study.spec.finalists_of is not None:
        return  # finalists use the run of the search, which has ended
    tracking.reopen_run(open_parent_run(study, tracking))
    close_study(study, summarise(study), tracking)


def reopen_trial_run(trial: FrozenTrial, tracking: Tracking) -> None:
    """Set the MLflow run of a trial to SCHEDULED. The trial's next attempt resumes the run."""
    run_id = trial.user_attrs.get(RUN_ID)
    if run_id is not None:
        tracking.mark_run_scheduled(str(run_id))
