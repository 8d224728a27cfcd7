"""The text output of `hpsearch show`: one study or one trial."""

from __future__ import annotations

import datetime
import math
import textwrap
from collections.abc import Container, Sequence

from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from hpsearch.search.console import command, plain_table
from hpsearch.search.curves.forecast import CHOSEN, Forecast, chosen_line, foreseeable, told
from hpsearch.search.finalists import read_finalists
from hpsearch.search.finalists.refit import current
from hpsearch.search.finalists.text import confirmation_lines, finalist_table
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.devices import devices_line, devices_of
from hpsearch.search.study.ranking import best_first, first_value
from hpsearch.search.study.steering import find_trial
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import (
    Summary,
    broken_bounds,
    format_seconds,
    format_value,
    front_lines,
    rung_lines,
    seconds_run,
    study_page,
    summarise,
    told_values,
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
from hpsearch.storage.study_storage.reading import rung_key
from hpsearch.storage.trials.history import (
    TIMES,
    AttemptRecord,
    read_attempts,
    read_epoch_values,
)


def last_failure(study: StoredStudy) -> list[str]:
    """Return a line with the reason of the last failed trial; no line if no trial has failed."""
    failed = [t for t in study.trials(TrialState.FAIL) if REASON in t.user_attrs]
    return [f"the last failure, of trial {t.number}: {t.user_attrs[REASON]}" for t in failed[-1:]]


def _bounds(spec: StudySpec) -> str:
    return " or ".join(map(str, spec.bounds))


def summary_lines(study: StoredStudy, summary: Summary, *, dashboard_url: str | None) -> list[str]:
    """Return the end of a run as lines of plain text."""
    spec = study.spec
    always = ("complete", "pruned", "failed")
    counts = [f"{count} {state}" for state, count in summary.by_state.items() if count or state in always]
    lines = [f"study {spec.name}: {study.done(summary.finished)} ({', '.join(counts)})"]
    if (given_up := study.given_up) is not None:
        lines.append(f"stopped after {given_up.started} of {given_up.budget} trials: {given_up.why}")
    if spec.several and summary.front:
        lines += front_lines(spec, summary.front)
    elif summary.best is not None:
        best = summary.best
        lines.append(f"best: trial {best.number}, val {spec.metric} {first_value(best):.4f}")
        lines += [f"    {key} = {format_value(value)}" for key, value in best.params.items()]
    else:
        why = "all break a constraint" if summary.out_of_bounds else "no trial has run to its end"
        lines.append(f"best: none, {why}")
        lines += last_failure(study)
    if summary.out_of_bounds:
        lines.append(f"out of bounds: {summary.out_of_bounds} of the complete trials break {_bounds(spec)}")
    lines += confirmation_lines(study)
    if summary.epochs_saved:
        lines.append(
            f"pruning saved {summary.epochs_saved} of {summary.epochs_saved + summary.epochs_run} epochs, "
            f"about {format_seconds(summary.seconds_saved)} of worker time"
        )
    lines += rung_lines(study)
    if (devices := devices_of(study)) is not None:
        lines.append(f"devices: {devices_line(devices)}")
    if summary.untracked:
        first = next(trial for trial in study.trials() if TRACKING in trial.user_attrs)
        why = textwrap.shorten(str(first.user_attrs[TRACKING]), 160, placeholder=" ...")
        lines.append(f"MLflow lacks something of {summary.untracked} trials, such as of trial {first.number}: {why}")
    if summary.best is not None and (url := summary.best.user_attrs.get(RUN_URL)):
        which = f"trial {summary.best.number}:" if spec.several else "best trial:"
        lines.append(f"MLflow, {which} {url}")
    if url := study.attrs.get(RUN_URL):
        lines.append(f"MLflow, study:      {url}")
    if dashboard_url:
        lines.append(f"Optuna dashboard:   {study_page(dashboard_url, study.study_id)}")
    return lines


def promotion_lines(study: StoredStudy, *, trial: int | None = None) -> list[str]:
    """Return a line for each promotion of a study, or of one of its trials, that holds."""
    return [tell(promotion) for promotion in current(study, trial=trial)]


def tell(promotion: Promotion) -> str:
    """Return ``promoted: trial 7 is digits@champion (version 3), by ann@host on 2026-05-01 12:00 UTC, unconfirmed``."""
    why = promotion.evidence.get("unconfirmed")
    doubt = f", unconfirmed ({why})" if why else ""
    return (
        f"promoted: {subject(promotion)} is {promotion.model_name}@{promotion.alias} "
        f"(version {promotion.version}), by {promotion.promoted_by} on {format_utc(promotion.promoted_at)}{doubt}"
    )


def format_utc(moment: datetime.datetime) -> str:
    """Return ``2026-05-01 12:00 UTC``."""
    return f"{moment.astimezone(datetime.UTC):%Y-%m-%d %H:%M UTC}"


def subject(promotion: Promotion) -> str:
    """Return whose model it is: ``trial 7``, or ``the refit of trial 7``."""
    refit = promotion.evidence.get("refit")
    return f"trial {promotion.trial_number}" if refit is None else f"the refit of trial {refit['of']}"


_LINES = 10  # of trials, the best first


def foreseen(
    study: StoredStudy, trials: Sequence[FrozenTrial], of: Container[int] | None = None
) -> dict[int, Forecast]:
    """Return forecasts of final values, by trial number, the best first; none for several metrics.

    Args:
        study: the study.
        trials: all its trials.
        of: numbers of the trials to forecast; None for all that run or wait.
    """
    spec = study.spec
    if spec.several or not foreseeable(trials, spec.epochs):
        return {}
    from hpsearch.search.curves.forecast import forecasts  # it loads torch: a second, which most studies do not need

    found = forecasts(trials, epochs=spec.epochs, maximize=spec.maximize, metric=spec.metric, of=of)
    order = best_first({number: each.value for number, each in found.items()}, maximize=spec.maximize)
    return {number: found[number] for number in order}


def foreseen_line(study: StoredStudy) -> str | None:
    """Return the best forecast of a trial that runs or waits, in one line; None without a forecast."""
    trials = study.trials()
    for number, found in foreseen(study, trials).items():
        does = _STATES[trials[number].state]
        return f"trial {number}, which {does}, is foreseen to end with {study.spec.metric} {found}"
    return None


_STATES = {TrialState.RUNNING: "runs", TrialState.WAITING: "waits"}


def foreseen_table(study: StoredStudy, *, every: bool) -> Table | None:
    """Return a row for each forecast, or for the best of them; None without a forecast."""
    trials = study.trials()
    found = foreseen(study, trials)
    if not found:
        return None
    shown = list(found.items())[: None if every else _LINES]
    left = f", the best {len(shown)} of {len(found)}" if len(shown) < len(found) else ""
    numbers, between = ("epochs", "best so far", "foreseen"), "nine of ten between"
    table = plain_table("trial", "", *numbers, between, right=("trial", *numbers), wrap=())
    table.title = f"foreseen after epoch {study.spec.epochs}{left}"
    table.title_justify, table.title_style = "left", "bold"
    best = max if study.spec.maximize else min
    for number, forecast in shown:
        trial = trials[number]
        # A trial with a forecast has reported a value that is not NaN.
        so_far = best(value for value in trial.intermediate_values.values() if not math.isnan(value))
        epochs = str(len(trial.intermediate_values))
        table.add_row(str(number), _STATES[trial.state], epochs, *told(so_far, forecast))
    return table


# What became of an attempt after which its trial waits.
_ENDED = {"released": "was given back", "lost": "lost its worker", "failed": "failed"}


def print_trial(console: Console, study: StoredStudy, number: int) -> None:
    """Print all there is to know about a trial.

    Raises:
        SearchError: the study has no such trial.
    """
    trial = find_trial(study, number)
    state = "infeasible" if trial.user_attrs.get(INFEASIBLE) else trial.state.name
    console.print(f"trial {number} of {study.spec.name}: {state}", style="bold")
    for name, value in _facts(study, trial):
        console.print(f"{name:>9}  {value}")
    _print_section(console, "parameters", _parameters(trial))
    attempts = read_attempts(study.engine, [trial._trial_id]).get(trial._trial_id, [])
    _print_section(console, "attempts", _attempts(attempts))
    _print_section(console, "epochs", _epochs(study, trial))


def why_waiting(study: StoredStudy) -> dict[int, str]:
    """Return why trials wait, by their numbers: what became of the last attempt at each."""
    waiting = [trial for trial in study.trials() if trial.state == TrialState.WAITING]
    attempts = read_attempts(study.engine, [trial._trial_id for trial in waiting])
    enqueued = "enqueued: no worker has taken it yet"
    if waiting and study.given_up is not None:
        enqueued = f"enqueued: the study stopped early, start it with {command('start', study.spec.name)}"
    found = ((trial, attempts.get(trial._trial_id)) for trial in waiting)
    return {trial.number: _why(trial, made[-1]) if made else enqueued for trial, made in found}


def _why(trial: FrozenTrial, last: AttemptRecord) -> str:
    if last.outcome == "paused" and (rung := trial.user_attrs.get(RUNG)):
        return (
            f"paused at rung {rung['rung']}, epoch {rung['epoch'] + 1}: rank {rung['rank']} of {rung['reached']} then"
        )
    ended = _ENDED.get(last.outcome or "", "was to be made again")
    why = f" ({trial.user_attrs[REASON]})" if last.outcome == "failed" and REASON in trial.user_attrs else ""
    return f"attempt {last.number} {ended}{why}: it is the next to be taken"


def _facts(study: StoredStudy, trial: FrozenTrial) -> list[tuple[str, str]]:
    attrs = trial.user_attrs
    reason = why_waiting(study).get(trial.number) or attrs.get(REASON)
    facts: list[tuple[str, object]] = [
        ("given by", attrs.get(ORIGIN)),
        ("foreseen", foreseen(study, study.trials(), of={trial.number}).get(trial.number)),
        ("curves", chosen_line(note) if (note := trial.system_attrs.get(CHOSEN)) else None),
        ("reason", reason),
        ("pruning", _pruning(attrs.get(PRUNING))),
    ]
    if trial.values:
        last = ", of its last epoch" if trial.state == TrialState.PRUNED else ""
        facts.append(("values" if study.spec.several else "value", f"{told_values(study.spec, trial)}{last}"))
    facts += [("bounds", f"broken: {line}") for line in broken_bounds(study.spec, trial)]
    if trial.duration is not None:
        ran = format_seconds(seconds_run(study, [trial])[trial._trial_id])
        of_which = f", {ran} of which it ran" if RUNG in attrs else ""
        whole = format_seconds(trial.duration.total_seconds())
        facts.append(("time", f"{whole} from its first start to its end{of_which}"))
    facts += [("promoted", line.removeprefix("promoted: ")) for line in promotion_lines(study, trial=trial.number)]
    facts += [("MLflow", attrs.get(RUN_URL)), ("tracking", attrs.get(TRACKING))]
    return [(name, str(value)) for name, value in facts if value]


def _pruning(record: dict[str, object] | None) -> str:
    """Return the grounds of a pruner's decision: ``median pruner, epoch 5, value 0.71, cutoff 0.83, peers 12``."""
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


def _parameters(trial: FrozenTrial) -> Table:
    table = plain_table("name", "value")
    table.show_header = False
    for name, value in trial.params.items():
        table.add_row(name, format_value(value))
    return table


def _attempts(attempts: list[AttemptRecord]) -> Table:
    several = any(TIMES in (attempt.device or "") for attempt in attempts)
    # A line of 80 columns has no room for a device and two moments.
    when = ("device", "start (UTC)", "time") if several else ("start (UTC)", "end (UTC)")
    table = plain_table("attempt", "worker", *when, "outcome", wrap=("worker",))  # names of hosts may be long
    for attempt in attempts:
        start, end = attempt.started_at, attempt.ended_at
        cells = [_time(start), _time(end) if end else ""]
        if several:
            cells = [attempt.device or "", _time(start), format_seconds((end - start).total_seconds()) if end else ""]
        table.add_row(str(attempt.number), attempt.worker, *cells, attempt.outcome or "running")
    return table


def _time(moment: datetime.datetime) -> str:
    return f"{moment.astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S}"


def _epochs(study: StoredStudy, trial: FrozenTrial) -> Table:
    """Return the values of each epoch, from 1, with the rungs of successive halving that the trial reached there."""
    rungs, spec = _rungs(study, trial), study.spec
    names = list(spec.ways) if spec.several else [f"val {spec.metric}"]
    others = read_epoch_values(study.engine, study.study_id).get(trial._trial_id, {}) if spec.several else {}
    table = plain_table("epoch", *names, *(["rung"] if rungs else []))
    for step, value in sorted(trial.intermediate_values.items()):
        reached = ", ".join(str(rung) for rung, epoch in rungs.items() if epoch == step)
        values = [value, *others.get(step, [])[1:]]
        table.add_row(str(step + 1), *(f"{each:.6g}" for each in values), *([reached] if rungs else []))
    return table


def _rungs(study: StoredStudy, trial: FrozenTrial) -> dict[int, int]:
    """Return the rungs that the trial noted a value at, each with its epoch from 0."""
    halving = study.spec.pruner.halving(study.spec.name, trial.number)
    rungs: dict[int, int] = {}
    while halving is not None and rung_key(len(rungs)) in trial.system_attrs:
        rungs[len(rungs)] = halving.epoch_of(len(rungs))
    return rungs


_LAST = 20
_WIDE = 100  # columns, from which on there is room for more


def print_study(console: Console, study: StoredStudy, dashboard_url: str | None, *, every: bool) -> None:
    """Print all there is to know about a study; of its trials the last ones, or `every` one."""
    told = {"metric", "direction"} if study.spec.several else set()  # by the directions
    for key, value in study.spec.model_dump(exclude={"name", "version", *told}).items():
        if value is None:
            continue
        shown = ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
        shown = ", ".join(value) if isinstance(value, list) else shown
        shown = ", ".join(map(str, study.spec.bounds)) if key == "constraints" else shown
        console.print(f"{key:>13}  {shown}")
    console.print()
    _print_trials(console, study, every=every)
    console.print()
    if (table := foreseen_table(study, every=every)) is not None:
        console.print(table)
        console.print()
    if (found := read_finalists(study)) is not None:
        console.print(finalist_table(study, found))
        console.print()
    lines = [*summary_lines(study, summarise(study), dashboard_url=dashboard_url), *promotion_lines(study)]
    if why := study.attrs.get(STOPPED):
        lines.append(f"stopped {why}")
    for line in lines:
        console.print(line)


def _print_trials(console: Console, study: StoredStudy, *, every: bool) -> None:
    # A narrow terminal has room for reasons alone: who ran a trial is told by `show --trial`.
    worker = ("worker",) if console.width >= _WIDE else ()
    values = tuple(study.spec.ways) if study.spec.several else ("value",)
    columns = ("trial", "state", "epochs", *values, *worker, "reason")
    table = plain_table(*columns, right=("trial", "epochs", *values), wrap=("reason",))
    trials, waiting = study.trials(), why_waiting(study)
    for trial in trials if every else trials[-_LAST:]:
        attrs = trial.user_attrs
        again = f"trial {attrs[PARENT_TRIAL]} again" if PARENT_TRIAL in attrs else None
        reason = "; ".join(filter(None, [attrs.get(ORIGIN), again, waiting.get(trial.number) or attrs.get(REASON)]))
        table.add_row(
            str(trial.number),
            trial.state.name,
            str(len(trial.intermediate_values)),
            *(format_value(value) for value in trial.values or [""] * len(values)),
            *[attrs.get(WORKER, "") for _ in worker],
            reason.splitlines()[0] if reason else "",
        )
    if not every and len(trials) > _LAST:
        console.print(f"the last {_LAST} of {len(trials)} trials; all of them with --all")
    console.print(table)
