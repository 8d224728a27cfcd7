"""One trial on a page: what it was given, who ran it when, what it reported, and why it ended as it did."""

from __future__ import annotations

import datetime

from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from hpsearch.search.console import command
from hpsearch.search.curves.foreseen import CHOSEN, chosen_line
from hpsearch.search.report.foreseen import foreseen
from hpsearch.search.report.promotions import promotion_lines
from hpsearch.search.study.front import broken_bounds, told_values
from hpsearch.search.study.rungs import seconds_run
from hpsearch.search.study.steering import find_trial
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import format_seconds, format_value
from hpsearch.storage.attributes import INFEASIBLE, ORIGIN, PRUNING, REASON, RUN_URL, RUNG, TRACKING
from hpsearch.storage.study_storage.rungs import rung_key
from hpsearch.storage.trials.attempts import TIMES, AttemptRecord, last_attempts, read_attempts
from hpsearch.storage.trials.epoch_values import read_epoch_values

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
    _print_section(console, "attempts", _attempts(read_attempts(study.engine, trial._trial_id)))
    _print_section(console, "epochs", _epochs(study, trial))


def why_waiting(study: StoredStudy) -> dict[int, str]:
    """Return why trials wait, by their numbers: what became of the last attempt at each."""
    waiting = [trial for trial in study.trials() if trial.state == TrialState.WAITING]
    last = last_attempts(study.engine, [trial._trial_id for trial in waiting]) if waiting else {}
    enqueued = "enqueued: no worker has taken it yet"
    if waiting and study.given_up is not None:
        enqueued = f"enqueued: the study stopped early, start it with {command('start', study.spec.name)}"
    found = ((trial, last.get(trial._trial_id)) for trial in waiting)
    return {trial.number: enqueued if attempt is None else _why(trial, attempt) for trial, attempt in found}


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
        ("foreseen", foreseen(study, of={trial.number}).get(trial.number)),
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
    if table.row_count:
        console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 2), header_style="bold")
    for column in columns:
        table.add_column(column)
    return table


def _parameters(trial: FrozenTrial) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 2), show_header=False)
    for name, value in trial.params.items():
        table.add_row(name, format_value(value))
    return table


def _attempts(attempts: list[AttemptRecord]) -> Table:
    several = any(TIMES in (attempt.device or "") for attempt in attempts)
    # A line of 80 columns has no room for a device and two moments.
    when = ("device", "start (UTC)", "time") if several else ("start (UTC)", "end (UTC)")
    table = _table("attempt", "worker", *when, "outcome")
    for column in table.columns:
        column.no_wrap, column.overflow = column.header != "worker", "fold"  # names of hosts may be long
    for attempt in attempts:
        start, end = attempt.started_at, attempt.ended_at
        if several:
            cells = [attempt.device or "", _time(start), format_seconds((end - start).total_seconds()) if end else ""]
        else:
            cells = [_time(start), _time(end) if end else ""]
        table.add_row(str(attempt.number), attempt.worker, *cells, attempt.outcome or "running")
    return table


def _time(moment: datetime.datetime) -> str:
    return f"{moment.astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S}"


def _epochs(study: StoredStudy, trial: FrozenTrial) -> Table:
    """Return the values of each epoch, from 1, with the rungs of successive halving that the trial reached there."""
    rungs, spec = _rungs(study, trial), study.spec
    names = list(spec.ways) if spec.several else [f"val {spec.metric}"]
    others = read_epoch_values(study.engine, study.study_id).get(trial._trial_id, {}) if spec.several else {}
    table = _table("epoch", *names, *(["rung"] if rungs else []))
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
