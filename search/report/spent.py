"""What epochs were spent on: the best value so far by the epochs trained in all, and where trials paused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from search.pruning import study_rungs
from search.study.study import StoredStudy
from storage.attributes import INFEASIBLE
from storage.trials.attempts import Stretch, read_stretches


@dataclass(frozen=True)
class Spent:
    """What epochs were spent on.

    Attributes:
        epochs: that were trained in the whole study, those of pruned and failed trials too.
        best: each value that was the best when it came: after how many epochs of the study, it, trial, epoch from 1.
        pauses: epochs, from 1, after which trials waited, by number of the trial.
    """

    epochs: int
    best: list[tuple[int, float, int, int]]
    pauses: dict[int, list[int]]

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
        found = _anchors(trial, by_trial[trial.number], rungs.epochs if rungs else ())
        pauses[trial.number] = [epoch for _, epoch, paused in found if paused]
        order += [(at, trial.number, step) for at, step in _moments(trial, found)]
    best: list[tuple[int, float, int, int]] = []
    trials = study.trials()
    for count, (_, number, step) in enumerate(sorted(order), start=1):
        value = trials[number].intermediate_values[step]
        counts = trials[number].state != TrialState.FAIL and not trials[number].user_attrs.get(INFEASIBLE)
        if counts and abs(value) < float("inf") and (not best or sign * value > sign * best[-1][1]):
            best.append((count, value, number, step + 1))
    return Spent(len(order), best, {number: epochs for number, epochs in pauses.items() if epochs})


_Part = tuple[list[tuple[float, float]], int, bool]  # stretches of time, the epoch at their end, whether it paused


def _anchors(trial: FrozenTrial, stretches: Sequence[Stretch], rungs: Sequence[int]) -> list[_Part]:
    """The parts of a trial's training between two moments at which it is known how far it was."""
    parts: list[_Part] = []
    times: list[tuple[float, float]] = []
    for each in stretches:
        times.append((each.started_at.timestamp(), each.until.timestamp()))
        if each.rung is not None and each.rung < len(rungs):
            parts.append((times, rungs[each.rung], True))
            times = []
    if not stretches and trial.datetime_start is not None:  # of a trial that no worker of ours ran
        end = trial.datetime_complete or datetime.now()
        times.append((trial.datetime_start.timestamp(), end.timestamp()))
    if times:
        parts.append((times, max(trial.intermediate_values, default=-1) + 1, False))
    return parts


def _moments(trial: FrozenTrial, parts: list[_Part]) -> Iterator[tuple[float, int]]:
    """When a trial's epochs ended: between moments that are known each is taken to be as long as the others."""
    steps = sorted(trial.intermediate_values)
    for times, epoch, _ in parts:
        ran = [step for step in steps if step < epoch]
        steps = steps[len(ran) :]
        for place, step in enumerate(ran, start=1):
            yield _within(times, place / len(ran)), step


def _within(times: list[tuple[float, float]], share: float) -> float:
    """The moment at which a share of stretches of time was over."""
    left = share * sum(end - start for start, end in times)
    for start, end in times:
        if left <= end - start:
            return start + left
        left -= end - start
    return times[-1][1]
