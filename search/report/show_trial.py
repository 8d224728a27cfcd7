"""The text output of `hpsearch show --trial` for one trial."""

from __future__ import annotations

import datetime
from typing import Any

from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from hpsearch.search.console import format_number, plain_table
from hpsearch.search.freeze_thaw.forecast_text import SUGGESTION_REASON_KEY, format_suggestion_reason
from hpsearch.search.report.show import forecast_trials, format_promotions
from hpsearch.search.report.trials import find_waiting_reasons, format_state, get_pruning_record
from hpsearch.search.study.control import find_trial
from hpsearch.search.study.ranking import get_schedule
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import (
    compute_run_seconds,
    format_folds,
    format_seconds,
    format_value,
    format_values,
    list_violations,
)
from hpsearch.storage.attributes import ORIGIN, REASON, RUN_URL, RUNG, TRACKING
from hpsearch.storage.display import escape_line
from hpsearch.storage.study_storage.reading import get_rung_key
from hpsearch.storage.trials.history import DEVICE_COUNT_SEPARATOR, AttemptRecord, read_attempts, read_epoch_values


def print_trial(console: Console, study: StoredStudy, number: int) -> None:
    """Print the state, parameters, attempts and epochs of a trial.

    Raises:
        SearchError: the study has no such trial.
    """
    trial = find_trial(study, number)
    console.print(f"trial {number} of study {study.spec.name}: {format_state(trial)}", style="bold")
    for name, value in _list_facts(study, trial):
        console.print(f"{name:>9}  {value}")
    schedule = get_schedule(trial)
    title = "parameters" if schedule is None else "parameters at the start"
    _print_section(console, title, _make_parameter_table(trial))
    if schedule is not None:
        _print_section(console, "schedule", _make_schedule_table(schedule, study.spec.refit or study.spec.epochs))
    attempts = read_attempts(study.engine, [trial._trial_id]).get(trial._trial_id, [])
    _print_section(console, "attempts", _make_attempt_table(attempts))
    _print_section(console, "epochs", _make_epoch_table(study, trial))


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
        ("pruning", _format_pruning(get_pruning_record(trial))),
    ]
    if trial.values:
        last = " (last epoch)" if trial.state == TrialState.PRUNED else ""
        name = "values" if study.spec.is_multi_objective else "value"
        facts.append((name, f"{format_values(study.spec, trial)}{last}{format_folds(study.spec, trial)}"))
    facts += [("bounds", f"violated: {line}") for line in list_violations(study.spec, trial)]
    if trial.duration is not None:
        ran = format_seconds(compute_run_seconds(study, [trial])[trial._trial_id])
        running = f", of which {ran} running" if RUNG in attrs else ""
        facts.append(("time", f"{format_seconds(trial.duration.total_seconds())} from first start to end{running}"))
    facts += [("promoted", line.removeprefix("promoted: ")) for line in format_promotions(study, trial=trial.number)]
    facts += [("MLflow", attrs.get(RUN_URL)), ("tracking", attrs.get(TRACKING))]
    return [(name, escape_line(str(value))) for name, value in facts if value]


def _format_pruning(record: dict[str, Any]) -> str:
    """Return a pruner's decision as text: ``median pruner, epoch 5, value 0.71, cutoff 0.83, peers 12``."""
    if not record:
        return ""
    parts = {key: value for key, value in record.items() if key != "pruner"} | {"epoch": record["epoch"] + 1}
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


def _make_schedule_table(schedule: list[dict[str, Any]], epochs: int) -> Table:
    """Return a table with the configurations of a trial whose configuration changed, by epochs counted from 1."""
    names = list(dict.fromkeys(name for part in schedule for name in part["params"]))
    changed = [name for name in names if len({str(part["params"].get(name)) for part in schedule}) > 1]
    table = plain_table("epochs", "trained by", *changed)
    for part, end in zip(schedule, [*(part["epoch"] for part in schedule[1:]), epochs], strict=True):
        cells = (format_value(part["params"][name]) if name in part["params"] else "" for name in changed)
        table.add_row(f"{part['epoch'] + 1} to {end}", f"trial {part['trial']}", *cells)
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
        table.add_row(str(step + 1), *(format_number(each, 6) for each in values), *([reached] if rungs else []))
    return table


def _find_reached_rungs(study: StoredStudy, trial: FrozenTrial) -> dict[int, int]:
    """Return the epoch, counted from 0, of each rung at which the trial has stored a value."""
    halving = study.spec.pruner.get_halving(study.spec.name, trial.number)
    rungs: dict[int, int] = {}
    while halving is not None and get_rung_key(len(rungs)) in trial.system_attrs:
        rungs[len(rungs)] = halving.get_epoch(len(rungs))
    return rungs
