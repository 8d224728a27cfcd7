"""What epochs were spent on: the best value so far by the epochs trained in all, and where trials paused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.pruning import study_rungs
from hpsearch.search.study.front import broken_bounds
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import INFEASIBLE
from hpsearch.storage.trials.attempts import Stretch, read_stretches


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
    for place, step in enumerate(steps, start=1):
        yield _within(times, place / len(steps)), step


def _within(times: list[tuple[float, float]], share: float) -> float:
    """The moment at which a share of stretches of time was over."""
    left = share * sum(end - start for start, end in times)
    for start, end in times:
        if left <= end - start:
            return start + left
        left -= end - start
    return times[-1][1]
