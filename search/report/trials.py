"""The trials in the report: rows of the table of trials, and the epochs over time."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.console import format_command, format_score
from hpsearch.search.errors import SearchError, suggest_names
from hpsearch.search.freeze_thaw.forecast_text import Forecast
from hpsearch.search.pruners.study_pruner import make_rungs
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import compute_run_seconds, format_seconds, format_value, list_violations
from hpsearch.storage.attributes import INFEASIBLE, PRUNING, REASON, RUN_URL, RUNG
from hpsearch.storage.display import find_link
from hpsearch.storage.trials.history import AttemptRecord, RunInterval, read_attempts, read_run_intervals
from hpsearch.storage.trials.lost_attempts import LossCause

MAX_SHOWN_TRIALS = 500  # a page with thousands of trials opens slowly
PARAMETER_PREFIX = "params_"  # of columns, as in `optuna.Study.trials_dataframe`


def get_pruning_record(trial: FrozenTrial) -> dict[str, Any]:
    """Return the record of the pruner's decision about a trial; empty if there is none, or a worker has damaged it."""
    record = trial.user_attrs.get(PRUNING)
    if not isinstance(record, dict) or not isinstance(record.get("epoch"), int):
        return {}
    numbers = [value for value in record.values() if isinstance(value, int)]
    has_small_numbers = all(abs(number) <= sys.maxsize for number in numbers)
    return record if has_small_numbers and isinstance(record.get("rung"), int | None) else {}


def format_state(trial: FrozenTrial) -> str:
    """Return the state of a trial as text for the report."""
    if trial.user_attrs.get(INFEASIBLE):
        return "infeasible"
    return "failed" if trial.state == TrialState.FAIL else trial.state.name.lower()


def select_shown_trials(study: StoredStudy) -> list[FrozenTrial]:
    """Return the trials that the report shows, in the order of `sort_trials`. The number of trials is limited."""
    return sort_trials(study)[:MAX_SHOWN_TRIALS]


def sort_trials(study: StoredStudy) -> list[FrozenTrial]:
    """Return all trials: feasible complete trials, best first, then all others.

    In a multi-objective study, the Pareto front comes first. The feasible trials are followed by complete trials that
    violate a constraint, best first, and then by all other trials, latest first.
    """
    within = [*study.front(), *study.best_trials()] if study.spec.is_multi_objective else study.best_trials()
    order = [*within, *study.best_trials(infeasible=True), *reversed(study.trials())]
    return list({trial.number: trial for trial in order}.values())


def sort_trials_by(study: StoredStudy, key: str) -> list[FrozenTrial]:
    """Return all trials in ascending order of a column; trials without a value in it are last.

    Args:
        study: the study.
        key: `trial`, `epochs`, the name of a metric or a parameter, or `params_NAME` for a parameter with the name of
            another column; with `-` in front, the order is descending.

    Raises:
        SearchError: the study has no such column.
    """
    trials, metrics = study.trials(), list(study.spec.direction_by_metric)
    name = key.removeprefix("-")
    known = list_parameter_names(trials)
    parameter = name if name in known else name.removeprefix(PARAMETER_PREFIX)
    cells: dict[int, Any]
    if name == "trial":
        cells = {trial.number: trial.number for trial in trials}
    elif name == "epochs":
        cells = {trial.number: len(trial.intermediate_values) for trial in trials}
    elif name in metrics:
        cells = {trial.number: trial.values[metrics.index(name)] for trial in trials if trial.values}
    elif parameter in known:
        cells = {trial.number: trial.params[parameter] for trial in trials if parameter in trial.params}
    else:
        hint = suggest_names(name, ["trial", "epochs", *metrics, *known])
        raise SearchError(f"--sort {key!r}: study {study.spec.name!r} has no such column{hint}")
    with_cell = [trial for trial in trials if trial.number in cells]
    with_cell.sort(key=lambda trial: _make_sort_key(cells[trial.number]), reverse=key != name)
    return [*with_cell, *(trial for trial in trials if trial.number not in cells)]


def _make_sort_key(value: Any) -> tuple[bool, Any]:
    """Return a key that sorts numbers before texts, which a categorical parameter may mix."""
    return (False, value) if isinstance(value, int | float) else (True, str(value))


def list_parameter_names(trials: list[FrozenTrial]) -> list[str]:
    """Return the names of all parameters of the trials, in the order of their first use."""
    return list(dict.fromkeys(name for t in sorted(trials, key=lambda t: t.number) for name in t.params))


def make_trial_rows(
    study: StoredStudy, trials: list[FrozenTrial], names: list[str], forecasts: Mapping[int, Forecast]
) -> list[dict[str, Any]]:
    """Return the rows of the table of trials, with formatted values and with sort keys."""
    seconds, waiting = compute_run_seconds(study, trials), find_waiting_reasons(study)
    rows = []
    for trial in trials:
        forecast = f"forecast {found}" if (found := forecasts.get(trial.number)) else ""
        reason = "; ".join(
            filter(None, [waiting.get(trial.number) or str(trial.user_attrs.get(REASON) or ""), forecast])
        )
        rows.append(_make_trial_row(study, trial, names, seconds.get(trial._trial_id), reason))
    return rows


def _make_trial_row(
    study: StoredStudy, trial: FrozenTrial, names: list[str], seconds: float | None, reason: str
) -> dict[str, Any]:
    values: list[float | None] = [*trial.values] if trial.values else [None] * len(study.spec.direction_by_metric)
    form = format_value if study.spec.is_multi_objective else format_score  # metrics may differ in magnitude
    return {
        "number": trial.number,
        "state": format_state(trial),
        "broken": list_violations(study.spec, trial),
        "values": ["" if value is None else form(value) for value in values],
        "epochs": f"{len(trial.intermediate_values)}/{study.spec.epochs}",
        "duration": "" if seconds is None else format_seconds(seconds),
        "params": [format_value(trial.params[name]) if name in trial.params else "" for name in names],
        "listed": ", ".join(f"{k} = {format_value(v)}" for k, v in trial.params.items()),
        "reason": reason,
        "url": find_link(trial.user_attrs.get(RUN_URL)),
        "by": {
            "values": values,
            "epochs": len(trial.intermediate_values),
            "duration": seconds,
            "params": [trial.params.get(name, "") for name in names],
        },
    }


@dataclass(frozen=True)
class EpochUsage:
    """The epochs of all trials of a study, in chronological order.

    Attributes:
        epochs: total number of epochs of all trials, including pruned and failed trials.
        best_values: each new best value, as (epochs of the study so far, value, trial, epoch of the trial from 1).
        pause_epochs: epochs, counted from 1, after which a trial paused, by trial number.
        epoch_order: (trial, epoch from 0) of all epochs, in the order in which the epochs ended.
    """

    epochs: int
    best_values: list[tuple[int, float, int, int]]
    pause_epochs: dict[int, list[int]]
    epoch_order: list[tuple[int, int]]

    @property
    def figure(self) -> dict[str, Any]:
        """The JSON data of the figure of epochs over time."""
        return {"epochs": self.epochs, "best": [(at, float(f"{v:.6g}"), *which) for at, v, *which in self.best_values]}


def compute_epoch_usage(study: StoredStudy) -> EpochUsage:
    """Return the epochs of all trials of a study, in chronological order."""
    rungs = make_rungs(study.spec)
    by_trial: dict[int, list[RunInterval]] = defaultdict(list)
    for interval in read_run_intervals(study.engine, study.study_id):
        by_trial[interval.number].append(interval)
    sign, order, pauses = 1 if study.spec.maximize else -1, [], {}
    for trial in study.trials():
        intervals, at_rungs = by_trial[trial.number], rungs.epochs if rungs else ()
        pauses[trial.number] = [at_rungs[each.rung] for each in intervals if each.rung is not None]
        order += [(at, trial.number, step) for at, step in estimate_epoch_ends(trial, intervals, at_rungs)]
    best: list[tuple[int, float, int, int]] = []
    trials, usable = study.trials(), find_eligible_trials(study)
    ordered = [(number, step) for _, number, step in sorted(order)]
    for count, (number, step) in enumerate(ordered, start=1):
        value = trials[number].intermediate_values[step]
        if number in usable and abs(value) < float("inf") and (not best or sign * value > sign * best[-1][1]):
            best.append((count, value, number, step + 1))
    return EpochUsage(len(order), best, {number: epochs for number, epochs in pauses.items() if epochs}, ordered)


def find_eligible_trials(study: StoredStudy) -> set[int]:
    """Return the numbers of the trials that did not fail, are not infeasible, and violate no constraint."""
    valid = [t for t in study.trials() if t.state != TrialState.FAIL and not t.user_attrs.get(INFEASIBLE)]
    return {trial.number for trial in valid if not list_violations(study.spec, trial)}


def estimate_epoch_ends(
    trial: FrozenTrial, intervals: Sequence[RunInterval], rungs: Sequence[int]
) -> Iterator[tuple[float, int]]:
    """Estimate when the epochs of a trial ended.

    The epochs between two pauses are assumed to have equal durations.

    Args:
        trial: the trial. If no worker of hpsearch ran it, its start and end times are used.
        intervals: periods in which the trial ran.
        rungs: epochs after which the trial may have paused.

    Yields:
        The end in Unix seconds, and the epoch, counted from 0.
    """
    steps = sorted(trial.intermediate_values)
    times: list[tuple[float, float]] = []
    if not intervals and trial.datetime_start is not None:
        end = trial.datetime_complete or datetime.now()
        times.append((trial.datetime_start.timestamp(), end.timestamp()))
    for place, each in enumerate(intervals):
        times.append((each.started_at.timestamp(), each.ended_at.timestamp()))
        if each.rung is not None and place < len(intervals) - 1:
            ran = [step for step in steps if step < rungs[each.rung]]
            yield from _spread_epochs(times, ran)
            times, steps = [], steps[len(ran) :]
    if times:
        yield from _spread_epochs(times, steps)


def _spread_epochs(times: list[tuple[float, float]], steps: Sequence[int]) -> Iterator[tuple[float, int]]:
    total = sum(end - start for start, end in times)
    for place, step in enumerate(steps, start=1):
        left, moment = total * place / len(steps), 0.0
        for start, end in times:
            moment = min(start + left, end)
            left -= end - start
            if left <= 0:
                break
        yield moment, step


# Outcomes of an attempt after which the trial waits.
_OUTCOMES = {"released": "was released by its worker", "lost": "lost its worker", "failed": "failed"}
_OUTCOMES |= {cause.value: f"lost its worker ({cause.value})" for cause in LossCause}


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
