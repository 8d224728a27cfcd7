"""The text output of `hpsearch show` for a study, and its summary, promotions and forecasts."""

from __future__ import annotations

import datetime
import math
import textwrap
from collections.abc import Container, Iterable, Sequence

from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from hpsearch.search.console import format_command, format_score, plain_table, pluralize
from hpsearch.search.errors import SearchError, suggest_names
from hpsearch.search.finalists import read_finalists
from hpsearch.search.finalists.text import finalist_table, format_confirmation
from hpsearch.search.freeze_thaw.forecast_text import Forecast, can_forecast, format_forecast
from hpsearch.search.pruners.pbt import PBT
from hpsearch.search.report.headline import make_headline
from hpsearch.search.report.trial_table import make_trial_table
from hpsearch.search.report.trials import find_waiting_reasons, list_parameter_names, sort_trials, sort_trials_by
from hpsearch.search.spec.spec import MAX_TRIALS, StudySpec
from hpsearch.search.study.device_summary import format_devices, summarize_devices
from hpsearch.search.study.promotions import list_current_promotions
from hpsearch.search.study.ranking import get_first_value, get_last_params, sort_best_first
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import (
    Summary,
    format_folds,
    format_front,
    format_rungs,
    format_value,
    get_study_page,
    summarise,
)
from hpsearch.storage.attributes import CONFIG_SCHEDULE, INFEASIBLE, PENDING, REASON, REFUSED, RUN_ID, RUN_URL, TRACKING
from hpsearch.storage.display import escape_line
from hpsearch.storage.mlflow.runs_view import get_view_url
from hpsearch.storage.records.promotions import Promotion


def format_last_failure(study: StoredStudy) -> list[str]:
    """Return a line with the reason of the last failed trial; an empty list if no trial has failed."""
    failed = [t for t in study.trials(TrialState.FAIL) if REASON in t.user_attrs]
    return [f"last failure: trial {t.number}: {escape_line(str(t.user_attrs[REASON]))}" for t in failed[-1:]]


def _join_bounds(spec: StudySpec) -> str:
    return " or ".join(map(str, spec.constraint_bounds))


def format_settings(spec: StudySpec) -> str:
    """Return the most important settings of a study: ``digits, maximize accuracy, 20 epochs per trial, ...``."""
    parts = [
        spec.objective,
        *(f"{direction} {name}" for name, direction in spec.direction_by_metric.items()),
        *map(str, spec.constraint_bounds),
        f"{spec.epochs} epochs per trial",
        *([f"{spec.folds} folds"] if spec.folds else []),
        f"sampler {spec.sampler.name}",
        f"pruner {spec.pruner.name}{_format_in_flight(spec)}",
        f"seed {spec.seed}",
    ]
    return ", ".join(parts)


def _format_in_flight(spec: StudySpec) -> str:
    return f" (changes {', '.join(spec.pruner.parameters or ())})" if isinstance(spec.pruner, PBT) else ""


def format_summary(study: StoredStudy, summary: Summary, *, dashboard_url: str | None) -> list[str]:
    """Return the summary of a study as lines of plain text, the result last, where a terminal shows it."""
    spec = study.spec
    shown_always = ("complete", "pruned", "failed")
    counts = [f"{count} {state}" for state, count in summary.by_state.items() if count or state in shown_always]
    lines = [f"study {spec.name}: {study.format_progress(summary.finished)} ({', '.join(counts)})"]
    if (early_stop := study.early_stop) is not None:
        lines.append(f"stopped after {early_stop.started} of {early_stop.budget} trials: {early_stop.reason}")
    if summary.epochs_saved:
        lines.append(f"pruning saved {summary.epochs_saved} of {summary.epochs_saved + summary.epochs_run} epochs")
    lines += format_rungs(study)
    if (devices := summarize_devices(study)) is not None:
        lines.append(f"devices: {format_devices(devices)}")
    if summary.untracked:
        lines += _format_untracked(study)
    lines += _format_links(study, summary, dashboard_url)
    return [*lines, "", *_format_result(study, summary)]


def _format_links(study: StoredStudy, summary: Summary, dashboard_url: str | None) -> list[str]:
    lines = []
    if summary.best is not None and (url := summary.best.user_attrs.get(RUN_URL)):
        which = f"trial {summary.best.number}:" if study.spec.is_multi_objective else "best trial:"
        lines.append(f"MLflow, {which} {url}")
    if url := study.attrs.get(RUN_URL):
        lines.append(f"MLflow, study:      {url}")
        if (trials := get_view_url(str(url), str(study.attrs.get(RUN_ID)))) is not None:
            lines.append(f"MLflow, all trials: {trials}")
    if dashboard_url:
        lines.append(f"Optuna dashboard:   {get_study_page(dashboard_url, study.study_id)}")
    return lines


def _format_result(study: StoredStudy, summary: Summary) -> list[str]:
    """Return the best trial, its lead, whether new runs confirm it, the cost, and the next steps."""
    spec, lines = study.spec, []
    if spec.is_multi_objective and summary.front:
        lines += format_front(spec, summary.front)
    elif summary.best is not None:
        best = summary.best
        which = "best" if spec.finalists_of is None else "best run"
        value = f"val {spec.metric} {format_score(get_first_value(best))}{format_folds(spec, best)}"
        lines.append(f"{which}: trial {best.number}, {value}")
        if best.params:
            params = get_last_params(best)
            lines.append("    " + ", ".join(f"{key} = {format_value(value)}" for key, value in params.items()))
        if CONFIG_SCHEDULE in best.user_attrs:
            again = format_command("show", spec.name, "--trial", str(best.number))
            lines.append(f"    in the last epochs; the schedule of all epochs: {again}")
    else:
        why = "all complete trials violate a constraint" if summary.out_of_bounds else "no trial is complete"
        lines.append(f"best: none, because {why}")
        lines += format_last_failure(study)
    if summary.out_of_bounds:
        lines.append(f"out of bounds: {summary.out_of_bounds} of the complete trials violate {_join_bounds(spec)}")
    headline = make_headline(study, summary, read_finalists(study))
    return [*lines, *headline.format_lines(), *format_confirmation(study), *headline.format_next_steps()]


def _format_untracked(study: StoredStudy) -> list[str]:
    """Return a line about the trials some of whose records MLflow does not have, with the command that sends them.

    There is no line if another process has sent them since the summary was read.
    """
    states = {trial.number: str(trial.user_attrs[TRACKING]) for trial in study.trials() if TRACKING in trial.user_attrs}
    if not states:
        return []
    number, first = next(iter(states.items()))
    why = textwrap.shorten(first, 160, placeholder=" ...")
    line = f"MLflow lacks data of {pluralize(len(states), 'trial')}, such as trial {number}: {why}"
    can_send = any(state.startswith((PENDING, REFUSED)) for state in states.values())
    return [f"{line}; send them with: {format_command('sync', study.spec.name)}" if can_send else line]


def format_promotions(study: StoredStudy, *, trial: int | None = None) -> list[str]:
    """Return one line per current promotion of a study.

    Args:
        study: the study.
        trial: number of the trial whose promotions are returned; None selects all trials.
    """
    return [format_promotion(promotion) for promotion in list_current_promotions(study, trial=trial)]


def format_promotion(promotion: Promotion) -> str:
    """Return a promotion as a line of text.

    Example: ``promoted: trial 7 is digits@champion (version 3), by ann@host on 2026-05-01 12:00 UTC, unconfirmed``.
    """
    why = promotion.evidence.get("unconfirmed")
    unconfirmed = f", unconfirmed ({why})" if why else ""
    return escape_line(
        f"promoted: {describe_model(promotion)} is {promotion.model_name}@{promotion.alias} "
        f"(version {promotion.version}), by {promotion.promoted_by} on {format_utc(promotion.promoted_at)}{unconfirmed}"
    )


def format_utc(moment: datetime.datetime) -> str:
    """Return a time as text in UTC: ``2026-05-01 12:00 UTC``."""
    return f"{moment.astimezone(datetime.UTC):%Y-%m-%d %H:%M UTC}"


def describe_model(promotion: Promotion) -> str:
    """Return the origin of the promoted model as text: ``trial 7``, or ``the refit of trial 7``."""
    refit = promotion.evidence.get("refit")
    return f"trial {promotion.trial_number}" if refit is None else f"the refit of trial {refit['of']}"


_MAX_FORECASTS = 10  # number of best forecasts that are shown without --all


def forecast_trials(
    study: StoredStudy, trials: Sequence[FrozenTrial], of: Container[int] | None = None
) -> dict[int, Forecast]:
    """Return forecasts of final values by trial number, best first; an empty dictionary for multi-objective studies.

    Args:
        study: the study.
        trials: all trials of the study.
        of: numbers of the trials to forecast; None selects all running and waiting trials.
    """
    spec = study.spec
    if spec.is_multi_objective or not can_forecast(trials, spec.epochs):
        return {}
    from hpsearch.search.freeze_thaw.forecast import forecast_final_values  # imports torch, which takes a second

    found = forecast_final_values(trials, epochs=spec.epochs, maximize=spec.maximize, metric=spec.metric, of=of)
    order = sort_best_first({number: each.value for number, each in found.items()}, maximize=spec.maximize)
    return {number: found[number] for number in order}


def format_best_forecast(study: StoredStudy) -> str | None:
    """Return a line with the best forecast among running and waiting trials; None if there are no forecasts."""
    trials = study.trials()
    for number, found in forecast_trials(study, trials).items():
        return f"trial {number} ({_STATES[trials[number].state]}): forecast of the final {study.spec.metric}: {found}"
    return None


_STATES = {TrialState.RUNNING: "running", TrialState.WAITING: "waiting"}


def make_forecast_table(study: StoredStudy, *, every: bool) -> Table | None:
    """Return the table of forecasts; None if there are no forecasts.

    Args:
        study: the study.
        every: whether to show all forecasts instead of only the best ones.
    """
    trials = study.trials()
    found = forecast_trials(study, trials)
    if not found:
        return None
    shown = list(found.items())[: None if every else _MAX_FORECASTS]
    left = f", the best {len(shown)} of {len(found)}" if len(shown) < len(found) else ""
    numbers = ("epochs", "best so far", "forecast")
    table = plain_table("trial", "state", *numbers, "90 % interval", right=("trial", *numbers), wrap=())
    table.title = f"forecast after epoch {study.spec.epochs}{left}"
    table.title_justify, table.title_style = "left", "bold"
    best = max if study.spec.maximize else min
    for number, forecast in shown:
        trial = trials[number]
        # A trial with a forecast has reported a value that is not NaN.
        so_far = best(value for value in trial.intermediate_values.values() if not math.isnan(value))
        epochs = str(len(trial.intermediate_values))
        table.add_row(str(number), _STATES[trial.state], epochs, *format_forecast(so_far, forecast))
    return table


_SHOWN_TRIALS, _SHOWN_OTHERS = 20, 8  # without --all: trials in the table, and those of them that are not complete


def print_study(
    console: Console,
    study: StoredStudy,
    dashboard_url: str | None,
    *,
    every: bool,
    sort: str | None = None,
    parameters: Sequence[str] | None = None,
) -> None:
    """Print the settings, trials and result of a study.

    Args:
        console: console to print on.
        study: the study.
        dashboard_url: address of the dashboard; None prints no link.
        every: whether to print all settings, trials and forecasts, instead of the most important settings, and the best
            and latest trials.
        sort: order of the trials, see `sort_trials_by`; None for the best first.
        parameters: names of the parameters to show as columns; None for those that fit.

    Raises:
        SearchError: the study has no such column.
    """
    ordered = None if sort is None else sort_trials_by(study, sort)
    known = list_parameter_names(study.trials())
    if unknown := [name for name in parameters or () if name not in known]:
        hint = suggest_names(unknown[0], known)
        raise SearchError(f"--columns {unknown[0]!r}: study {study.spec.name!r} has no such parameter{hint}")
    if every or study.spec.finalists_of is not None:
        _print_settings(console, study.spec)
    else:
        console.print(f"{format_settings(study.spec)}; --all shows all settings")
    console.print()
    _print_trials(console, study, ordered, every=every, parameters=parameters)
    console.print()
    if (table := make_forecast_table(study, every=every)) is not None:
        console.print(table)
        console.print()
    if (found := read_finalists(study)) is not None:
        console.print(finalist_table(study, found))
        console.print()
    summary = summarise(study)
    lines = [*format_summary(study, summary, dashboard_url=dashboard_url), *format_promotions(study)]
    if study.stopped:
        lines.append(f"study stopped {study.stopped}")
    elif not study.is_spent(summary.finished) and not summary.running:
        lines.append(f"not finished; continue with: {study.resume_command}")
    print_lines(console, lines)


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print lines; on a terminal, sentences wrap between words, but tables, commands and links can be copied."""
    for line in lines:
        is_sentence = " = " in line or ("://" not in line and not line.startswith(" "))
        console.print(line, soft_wrap=not (is_sentence and console.is_terminal))


def _print_settings(console: Console, spec: StudySpec) -> None:
    redundant = {"metric", "direction"} if spec.is_multi_objective else set()  # `directions` has them
    for key, value in spec.model_dump(exclude={"name", "version", *redundant}).items():
        if value is None:
            continue
        shown = ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
        shown = ", ".join(value) if isinstance(value, list) else shown
        shown = ", ".join(map(str, spec.constraint_bounds)) if key == "constraints" else shown
        if key == "n_trials" and value == MAX_TRIALS and spec.has_epoch_or_time_budget:
            shown = "unlimited"
        console.print(f"{key:>13}  {shown}")


def _print_trials(
    console: Console,
    study: StoredStudy,
    ordered: Sequence[FrozenTrial] | None,
    *,
    every: bool,
    parameters: Sequence[str] | None,
) -> None:
    """Print the table of trials, and the complete reasons of failed and infeasible trials.

    Args:
        console: console to print on.
        study: the study.
        ordered: all trials in the order of the table; None for the best first.
        every: whether to print all trials.
        parameters: names of the parameters to show; None for those that fit.
    """
    trials, waiting = ordered or sort_trials(study), find_waiting_reasons(study)
    shown = trials
    if not every and ordered is not None:
        shown = trials[:_SHOWN_TRIALS]
        if len(shown) < len(trials):
            console.print(f"the first {len(shown)} of {len(trials)} trials; --all shows all trials")
    elif not every and len(trials) > _SHOWN_TRIALS:
        n_best = sum(trial.state == TrialState.COMPLETE for trial in trials)
        n_others = min(len(trials) - n_best, max(_SHOWN_OTHERS, _SHOWN_TRIALS - n_best))
        shown = [*trials[: min(n_best, _SHOWN_TRIALS - n_others)], *trials[n_best : n_best + n_others]]
        parts = ["the best" if n_best else "", f"the latest {n_others} others" if n_others else ""]
        which = " and ".join(filter(None, parts))
        console.print(f"{len(shown)} of {len(trials)} trials, {which}; --all shows all trials")
    table = make_trial_table(study.spec, shown, width=console.width, waiting=waiting, parameters=parameters)
    console.print(table)
    failed = [trial for trial in shown if trial.state == TrialState.FAIL or trial.user_attrs.get(INFEASIBLE)]
    for reason, numbers in _group_by_reason(failed).items():
        noun = "trial" if len(numbers) == 1 else "trials"
        console.print(f"{noun} {', '.join(map(str, sorted(numbers)))} failed: {reason}")


def _group_by_reason(trials: Sequence[FrozenTrial]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for trial in trials:
        if reason := str(trial.user_attrs.get(REASON, "")).split("\n", 1)[0]:
            found.setdefault(reason, []).append(trial.number)
    return found
