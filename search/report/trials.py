"""The table of trials, with the epochs that they spent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.curves.forecast import Forecast
from hpsearch.search.pruners.study_pruner import study_rungs
from hpsearch.search.report.show import why_waiting
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import broken_bounds, format_seconds, format_value, seconds_run
from hpsearch.storage.attributes import INFEASIBLE, REASON, RUN_URL
from hpsearch.storage.trials.history import Stretch, read_stretches

SHOWN = 500  # trials at most: a page of thousands opens slowly, and nobody reads them


def state_of(trial: FrozenTrial) -> str:
    """Return a trial's state in the words of the page."""
    if trial.user_attrs.get(INFEASIBLE):
        return "infeasible"
    return "failed" if trial.state == TrialState.FAIL else trial.state.name.lower()


def shown_trials(study: StoredStudy) -> list[FrozenTrial]:
    """Return the trials that the page shows, complete ones first and the best of them first, then the latest.

    Of several metrics the front is first. What is out of bounds comes after all that is within.
    """
    within = [*study.front(), *study.best_trials()] if study.spec.several else study.best_trials()
    order = [*within, *study.best_trials(infeasible=True), *reversed(study.trials())]
    return list({trial.number: trial for trial in order}.values())[:SHOWN]


def parameter_names(trials: list[FrozenTrial]) -> list[str]:
    """Return the names of all parameters, those that the first trial has first."""
    return list(dict.fromkeys(name for t in sorted(trials, key=lambda t: t.number) for name in t.params))


def trial_rows(
    study: StoredStudy, trials: list[FrozenTrial], names: list[str], forecasts: Mapping[int, Forecast]
) -> list[dict[str, Any]]:
    """Return the rows of the table: what is shown, and beside it what it is sorted by."""
    seconds, waiting = seconds_run(study, trials), why_waiting(study)
    rows = []
    for trial in trials:
        forecast = f"foreseen {found}" if (found := forecasts.get(trial.number)) else ""
        reason = "; ".join(filter(None, [waiting.get(trial.number) or trial.user_attrs.get(REASON), forecast]))
        rows.append(_row(study, trial, names, seconds.get(trial._trial_id), reason))
    return rows


def _row(
    study: StoredStudy, trial: FrozenTrial, names: list[str], seconds: float | None, reason: str
) -> dict[str, Any]:
    values: list[float | None] = [*trial.values] if trial.values else [None] * len(study.spec.ways)
    form = format_value if study.spec.several else "{:.4f}".format  # several metrics differ in size
    return {
        "number": trial.number,
        "state": state_of(trial),
        "broken": broken_bounds(study.spec, trial),
        "values": ["" if value is None else form(value) for value in values],
        "epochs": f"{len(trial.intermediate_values)}/{study.spec.epochs}",
        "duration": "" if seconds is None else format_seconds(seconds),
        "params": [format_value(trial.params[name]) if name in trial.params else "" for name in names],
        "listed": ", ".join(f"{k} = {format_value(v)}" for k, v in trial.params.items()),
        "reason": reason,
        "url": trial.user_attrs.get(RUN_URL),
        "by": {
            "values": values,
            "epochs": len(trial.intermediate_values),
            "duration": seconds,
            "params": [trial.params.get(name, "") for name in names],
        },
    }


@dataclass(frozen=True)
class Spent:
    """What epochs were spent on.

    Attributes:
        epochs: that were trained in the whole study, those of pruned and failed trials too.
        best: each value that was the best when it came: after how many epochs of the study, it, trial, epoch from 1.
        pauses: epochs, from 1, after which trials waited, by number of the trial.
        order: trial and epoch (from 0) of all that were trained, in the order in which they ended.
    """

    epochs: int
    best: list[tuple[int, float, int, int]]
    pauses: dict[int, list[int]]
    order: list[tuple[int, int]]

    @property
    def figure(self) -> dict[str, Any]:
        """What the page's script draws, fit for JSON."""
        return {"epochs": self.epochs, "best": [(at, float(f"{v:.6g}"), *which) for at, v, *which in self.best]}


def spent(study: StoredStudy) -> Spent:
    """Return what the epochs of a study were spent on."""
    rungs = study_rungs(study.spec)
    by_trial: dict[int, list[Stretch]] = defaultdict(list)
    for stretch in read_stretches(study.engine, study.study_id):
        by_trial[stretch.number].append(stretch)
    sign, order, pauses = 1 if study.spec.maximize else -1, [], {}
    for trial in study.trials():
        stretches, at_rungs = by_trial[trial.number], rungs.epochs if rungs else ()
        pauses[trial.number] = [at_rungs[each.rung] for each in stretches if each.rung is not None]
        order += [(at, trial.number, step) for at, step in moments(trial, stretches, at_rungs)]
    best: list[tuple[int, float, int, int]] = []
    trials, usable, ordered = study.trials(), in_hand(study), [(number, step) for _, number, step in sorted(order)]
    for count, (number, step) in enumerate(ordered, start=1):
        value = trials[number].intermediate_values[step]
        if number in usable and abs(value) < float("inf") and (not best or sign * value > sign * best[-1][1]):
            best.append((count, value, number, step + 1))
    return Spent(len(order), best, {number: epochs for number, epochs in pauses.items() if epochs}, ordered)


def in_hand(study: StoredStudy) -> set[int]:
    """Return the numbers of the trials whose reports count: none failed or diverged, and none is out of bounds."""
    return {
        trial.number
        for trial in study.trials()
        if trial.state != TrialState.FAIL
        and not trial.user_attrs.get(INFEASIBLE)
        and not broken_bounds(study.spec, trial)
    }


def moments(trial: FrozenTrial, stretches: Sequence[Stretch], rungs: Sequence[int]) -> Iterator[tuple[float, int]]:
    """When a trial's epochs ended, in unix seconds: those between two pauses are taken to be as long as each other.

    Args:
        trial: of Optuna; its own begin and end are taken where no worker of ours ran it.
        stretches: in which it was run.
        rungs: epochs after which it may have been paused.

    Yields:
        The moment, and the epoch, from 0.
    """
    steps = sorted(trial.intermediate_values)
    times: list[tuple[float, float]] = []
    if not stretches and trial.datetime_start is not None:
        end = trial.datetime_complete or datetime.now()
        times.append((trial.datetime_start.timestamp(), end.timestamp()))
    for place, each in enumerate(stretches):
        times.append((each.started_at.timestamp(), each.until.timestamp()))
        if each.rung is not None and place < len(stretches) - 1:
            ran = [step for step in steps if step < rungs[each.rung]]
            yield from _spread(times, ran)
            times, steps = [], steps[len(ran) :]
    if times:
        yield from _spread(times, steps)


def _spread(times: list[tuple[float, float]], steps: Sequence[int]) -> Iterator[tuple[float, int]]:
    whole = sum(end - start for start, end in times)
    for place, step in enumerate(steps, start=1):
        left, moment = whole * place / len(steps), 0.0
        for start, end in times:
            moment = min(start + left, end)
            left -= end - start
            if left <= 0:
                break
        yield moment, step
