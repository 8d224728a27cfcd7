"""The text output of `hpsearch show` for a study or a trial."""

from __future__ import annotations

import datetime
import math
import textwrap
from collections.abc import Container, Sequence

from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from hpsearch.search.console import format_command, plain_table
from hpsearch.search.finalists import read_finalists
from hpsearch.search.finalists.refit import list_current_promotions
from hpsearch.search.finalists.text import finalist_table, format_confirmation
from hpsearch.search.freeze_thaw.forecast import (
    SUGGESTION_REASON_KEY,
    Forecast,
    can_forecast,
    format_forecast,
    format_suggestion_reason,
)
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.control import find_trial
from hpsearch.search.study.device_summary import format_devices, summarize_devices
from hpsearch.search.study.ranking import get_first_value, sort_best_first
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import (
    Summary,
    compute_run_seconds,
    format_front,
    format_rungs,
    format_seconds,
    format_value,
    format_values,
    get_study_page,
    list_violations,
    summarise,
)
from hpsearch.storage.attributes import (
    INFEASIBLE,
    ORIGIN,
    PARENT_TRIAL,
    PRUNING,
    REASON,
    RUN_URL,
    RUNG,
    STOPPED,
    TRACKING,
    WORKER,
)
from hpsearch.storage.records.promotions import Promotion
from hpsearch.storage.study_storage.reading import get_rung_key
from hpsearch.storage.trials.history import (
    DEVICE_COUNT_SEPARATOR,
    AttemptRecord,
    read_attempts,
    read_epoch_values,
)


def format_last_failure(study: StoredStudy) -> list[str]:
    """Return a line with the reason of the last failed trial; an empty list if no trial has failed."""
    failed = [t for t in study.trials(TrialState.FAIL) if REASON in t.user_attrs]
    return [f"last failure: trial {t.number}: {t.user_attrs[REASON]}" for t in failed[-1:]]


def _join_bounds(spec: StudySpec) -> str:
    return " or ".join(map(str, spec.bounds))


def format_summary(study: StoredStudy, summary: Summary, *, dashboard_url: str | None) -> list[str]:
    """Return the summary of a study as lines of plain text."""
    spec = study.spec
    shown_always = ("complete", "pruned", "failed")
    counts = [f"{count} {state}" for state, count in summary.by_state.items() if count or state in shown_always]
    lines = [f"study {spec.name}: {study.format_progress(summary.finished)} ({', '.join(counts)})"]
    if (early_stop := study.early_stop) is not None:
        lines.append(f"stopped after {early_stop.started} of {early_stop.budget} trials: {early_stop.reason}")
    if spec.is_multi_objective and summary.front:
        lines += format_front(spec, summary.front)
    elif summary.best is not None:
        best = summary.best
        lines.append(f"best: trial {best.number}, val {spec.metric} {get_first_value(best):.4f}")
        lines += [f"    {key} = {format_value(value)}" for key, value in best.params.items()]
    else:
        why = "all complete trials violate a constraint" if summary.out_of_bounds else "no trial is complete"
        lines.append(f"best: none, because {why}")
        lines += format_last_failure(study)
    if summary.out_of_bounds:
        lines.append(f"out of bounds: {summary.out_of_bounds} of the complete trials violate {_join_bounds(spec)}")
    lines += format_confirmation(study)
    if summary.epochs_saved:
        lines.append(
            f"pruning saved {summary.epochs_saved} of {summary.epochs_saved + summary.epochs_run} epochs, "
            f"about {format_seconds(summary.seconds_saved)} of worker time"
        )
    lines += format_rungs(study)
    if (devices := summarize_devices(study)) is not None:
        lines.append(f"devices: {format_devices(devices)}")
    if summary.untracked:
        first = next(trial for trial in study.trials() if TRACKING in trial.user_attrs)
        why = textwrap.shorten(str(first.user_attrs[TRACKING]), 160, placeholder=" ...")
        lines.append(f"MLflow lacks data of {summary.untracked} trials, such as trial {first.number}: {why}")
    if summary.best is not None and (url := summary.best.user_attrs.get(RUN_URL)):
        which = f"trial {summary.best.number}:" if spec.is_multi_objective else "best trial:"
        lines.append(f"MLflow, {which} {url}")
    if url := study.attrs.get(RUN_URL):
        lines.append(f"MLflow, study:      {url}")
    if dashboard_url:
        lines.append(f"Optuna dashboard:   {get_study_page(dashboard_url, study.study_id)}")
    return lines


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
    return (
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


# Outcomes of an attempt after which the trial waits.
_OUTCOMES = {"released": "was released by its worker", "lost": "lost its worker", "failed": "failed"}


def print_trial(console: Console, study: StoredStudy, number: int) -> None:
    """Print the state, parameters, attempts and epochs of a trial.

    Raises:
        SearchError: the study has no such trial.
    """
    trial = find_trial(study, number)
    state = "infeasible" if trial.user_attrs.get(INFEASIBLE) else trial.state.name
    console.print(f"trial {number} of {study.spec.name}: {state}", style="bold")
    for name, value in _list_facts(study, trial):
        console.print(f"{name:>9}  {value}")
    _print_section(console, "parameters", _make_parameter_table(trial))
    attempts = read_attempts(study.engine, [trial._trial_id]).get(trial._trial_id, [])
    _print_section(console, "attempts", _make_attempt_table(attempts))
    _print_section(console, "epochs", _make_epoch_table(study, trial))


def find_waiting_reasons(study: StoredStudy) -> dict[int, str]:
    """Return the reasons why trials wait, by trial number."""
    waiting = [trial for trial in study.trials() if trial.state == TrialState.WAITING]
    attempts = read_attempts(study.engine, [trial._trial_id for trial in waiting])
    enqueued = "enqueued: no worker has claimed the trial yet"
    if waiting and study.early_stop is not None:
        enqueued = f"enqueued: the study stopped early; resume it with {format_command('start', study.spec.name)}"
    found = ((trial, attempts.get(trial._trial_id)) for trial in waiting)
    return {trial.number: _format_waiting_reason(trial, past[-1]) if past else enqueued for trial, past in found}


def _format_waiting_reason(trial: FrozenTrial, last: AttemptRecord) -> str:
    if last.outcome == "paused" and (at := trial.user_attrs.get(RUNG)):
        return f"paused at rung {at['rung']}, epoch {at['epoch'] + 1}, with rank {at['rank']} of {at['reached']}"
    ended = _OUTCOMES.get(last.outcome or "", "must be repeated")
    why = f" ({trial.user_attrs[REASON]})" if last.outcome == "failed" and REASON in trial.user_attrs else ""
    return f"attempt {last.number} {ended}{why}; a free worker resumes the trial next"


def _list_facts(study: StoredStudy, trial: FrozenTrial) -> list[tuple[str, str]]:
    attrs = trial.user_attrs
    reason = find_waiting_reasons(study).get(trial.number) or attrs.get(REASON)
    facts: list[tuple[str, object]] = [
        ("origin", attrs.get(ORIGIN)),
        ("forecast", forecast_trials(study, study.trials(), of={trial.number}).get(trial.number)),
        (
            "freeze_thaw",
            format_suggestion_reason(note) if (note := trial.system_attrs.get(SUGGESTION_REASON_KEY)) else None,
        ),
        ("reason", reason),
        ("pruning", _format_pruning(attrs.get(PRUNING))),
    ]
    if trial.values:
        last = " (last epoch)" if trial.state == TrialState.PRUNED else ""
        name = "values" if study.spec.is_multi_objective else "value"
        facts.append((name, f"{format_values(study.spec, trial)}{last}"))
    facts += [("bounds", f"violated: {line}") for line in list_violations(study.spec, trial)]
    if trial.duration is not None:
        ran = format_seconds(compute_run_seconds(study, [trial])[trial._trial_id])
        running = f", of which {ran} running" if RUNG in attrs else ""
        facts.append(("time", f"{format_seconds(trial.duration.total_seconds())} from first start to end{running}"))
    facts += [("promoted", line.removeprefix("promoted: ")) for line in format_promotions(study, trial=trial.number)]
    facts += [("MLflow", attrs.get(RUN_URL)), ("tracking", attrs.get(TRACKING))]
    return [(name, str(value)) for name, value in facts if value]


def _format_pruning(record: dict[str, object] | None) -> str:
    """Return a pruner's decision as text: ``median pruner, epoch 5, value 0.71, cutoff 0.83, peers 12``."""
    if not record:
        return ""
    parts = {key: value for key, value in record.items() if key != "pruner"}
    if isinstance(epoch := parts.get("epoch"), int):
        parts["epoch"] = epoch + 1
    return ", ".join([f"{record.get('pruner')} pruner", *(f"{key} {format_value(v)}" for key, v in parts.items())])


def _print_section(console: Console, title: str, table: Table) -> None:
    console.print(f"\n{title}" if table.row_count else f"\n{title}: none", style="bold")
    table.padding = (0, 1, 0, 2)
    if table.row_count:
        console.print(table)


def _make_parameter_table(trial: FrozenTrial) -> Table:
    table = plain_table("name", "value")
    table.show_header = False
    for name, value in trial.params.items():
        table.add_row(name, format_value(value))
    return table


def _make_attempt_table(attempts: list[AttemptRecord]) -> Table:
    has_device = any(DEVICE_COUNT_SEPARATOR in (attempt.device or "") for attempt in attempts)
    # 80 characters are too few for a device and two times.
    when = ("device", "start (UTC)", "time") if has_device else ("start (UTC)", "end (UTC)")
    table = plain_table("attempt", "worker", *when, "outcome", wrap=("worker",))  # host names may be long
    for attempt in attempts:
        start, end = attempt.started_at, attempt.ended_at
        cells = [_format_time(start), _format_time(end) if end else ""]
        if has_device:
            took = format_seconds((end - start).total_seconds()) if end else ""
            cells = [attempt.device or "", _format_time(start), took]
        table.add_row(str(attempt.number), attempt.worker, *cells, attempt.outcome or "running")
    return table


def _format_time(moment: datetime.datetime) -> str:
    return f"{moment.astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S}"


def _make_epoch_table(study: StoredStudy, trial: FrozenTrial) -> Table:
    """Return a table with the values of each epoch, counted from 1, and the rungs that the trial reached."""
    rungs, spec = _find_reached_rungs(study, trial), study.spec
    names = list(spec.direction_by_metric) if spec.is_multi_objective else [f"val {spec.metric}"]
    others = read_epoch_values(study.engine, study.study_id).get(trial._trial_id, {}) if spec.is_multi_objective else {}
    table = plain_table("epoch", *names, *(["rung"] if rungs else []))
    for step, value in sorted(trial.intermediate_values.items()):
        reached = ", ".join(str(rung) for rung, epoch in rungs.items() if epoch == step)
        values = [value, *others.get(step, [])[1:]]
        table.add_row(str(step + 1), *(f"{each:.6g}" for each in values), *([reached] if rungs else []))
    return table


def _find_reached_rungs(study: StoredStudy, trial: FrozenTrial) -> dict[int, int]:
    """Return the epoch, counted from 0, of each rung at which the trial has stored a value."""
    halving = study.spec.pruner.get_halving(study.spec.name, trial.number)
    rungs: dict[int, int] = {}
    while halving is not None and get_rung_key(len(rungs)) in trial.system_attrs:
        rungs[len(rungs)] = halving.get_epoch(len(rungs))
    return rungs


_LAST_TRIALS = 20
_WIDE_COLUMNS = 100  # in characters; a narrower table has only the essential columns


def print_study(console: Console, study: StoredStudy, dashboard_url: str | None, *, every: bool) -> None:
    """Print the spec, trials and result of a study.

    Args:
        console: console to print on.
        study: the study.
        dashboard_url: address of the dashboard; None prints no link.
        every: whether to print all trials and forecasts instead of the last trials and the best forecasts.
    """
    redundant = {"metric", "direction"} if study.spec.is_multi_objective else set()  # `directions` has them
    for key, value in study.spec.model_dump(exclude={"name", "version", *redundant}).items():
        if value is None:
            continue
        shown = ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
        shown = ", ".join(value) if isinstance(value, list) else shown
        shown = ", ".join(map(str, study.spec.bounds)) if key == "constraints" else shown
        console.print(f"{key:>13}  {shown}")
    console.print()
    _print_trials(console, study, every=every)
    console.print()
    if (table := make_forecast_table(study, every=every)) is not None:
        console.print(table)
        console.print()
    if (found := read_finalists(study)) is not None:
        console.print(finalist_table(study, found))
        console.print()
    lines = [*format_summary(study, summarise(study), dashboard_url=dashboard_url), *format_promotions(study)]
    if why := study.attrs.get(STOPPED):
        lines.append(f"stopped {why}")
    for line in lines:
        console.print(line)


def _print_trials(console: Console, study: StoredStudy, *, every: bool) -> None:
    # A narrow terminal has no room for workers, which `show --trial` prints too.
    worker = ("worker",) if console.width >= _WIDE_COLUMNS else ()
    values = tuple(study.spec.direction_by_metric) if study.spec.is_multi_objective else ("value",)
    columns = ("trial", "state", "epochs", *values, *worker, "reason")
    table = plain_table(*columns, right=("trial", "epochs", *values), wrap=("reason",))
    trials, waiting = study.trials(), find_waiting_reasons(study)
    for trial in trials if every else trials[-_LAST_TRIALS:]:
        attrs = trial.user_attrs
        again = f"retrains trial {attrs[PARENT_TRIAL]}" if PARENT_TRIAL in attrs else None
        reason = "; ".join(filter(None, [attrs.get(ORIGIN), again, waiting.get(trial.number) or attrs.get(REASON)]))
        table.add_row(
            str(trial.number),
            trial.state.name,
            str(len(trial.intermediate_values)),
            *(format_value(value) for value in trial.values or [""] * len(values)),
            *[attrs.get(WORKER, "") for _ in worker],
            reason.splitlines()[0] if reason else "",
        )
    if not every and len(trials) > _LAST_TRIALS:
        console.print(f"the last {_LAST_TRIALS} of {len(trials)} trials; --all prints all of them")
    console.print(table)
