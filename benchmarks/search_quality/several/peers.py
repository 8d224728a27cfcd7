"""The deciding code of Optuna and Syne Tune on several metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler

from benchmarks.search_quality.peers import Flat, syne_tune_domain
from benchmarks.search_quality.several.problems import TwoMetrics
from benchmarks.search_quality.simulation import Work
from hpsearch.search.freeze_thaw.multi_objective import track_incumbent
from hpsearch.storage.rungs.fronts import compute_front_ranks


class Optuna:
    """A sampler of Optuna's: `ask`, `tell`. It prunes no trial of several metrics: `report` is refused."""

    def __init__(self, training: TwoMetrics, sampler: BaseSampler) -> None:
        self._training = training
        self._study = optuna.create_study(directions=training.directions, sampler=sampler)
        self._running: dict[int, optuna.Trial] = {}
        self._values: dict[int, dict[int, Sequence[float]]] = {}

    def next_work(self) -> Work:
        trial = self._study.ask()
        self._training.problem.objective().configure(trial)
        self._running[trial.number], self._values[trial.number] = trial, {}
        return Work(trial.number, self._training.problem.epochs, trial.params)

    def report(self, trial: int, epoch: int, value: Sequence[float]) -> bool:
        """A full trial is told with its vector at the best epoch of the first metric."""
        self._values[trial][epoch + 1] = value
        if epoch + 1 < self._training.problem.epochs:
            return True
        best = track_incumbent(self._values.pop(trial), self._training.maximize)[epoch + 1]
        self._study.tell(self._running.pop(trial), (best * np.where(self._training.maximize, -1.0, 1.0)).tolist())
        return False


class SyneTune:
    """Syne Tune's MO-ASHA, of the kind that stops: it has no other.

    Its draws come from numpy's global state, which is set and put back around each question.

    Args:
        training: the problem.
        seed: of the draws.
        priority: gives the places of those at a rung [n, metrics]; None for Syne Tune's own.
    """

    def __init__(self, training: TwoMetrics, *, seed: int, priority: Any = None) -> None:
        from syne_tune.optimizer.schedulers.multiobjective.moasha import MOASHA

        self._signs = np.where(training.maximize, -1.0, 1.0)
        self._epochs = training.problem.epochs
        self._flat = Flat(training.problem)
        self._scheduler = MOASHA(
            self._flat.domains(syne_tune_domain),
            metrics=["first", "second"],
            time_attr="epoch",
            max_t=training.problem.epochs,
            multiobjective_priority=priority,
            random_seed=seed,
        )
        self._state = np.random.RandomState(seed).get_state()
        self._trials: list[Any] = []

    def next_work(self) -> Work:
        import datetime

        from syne_tune.backend.trial_status import Trial

        suggestion = self._drawing(self._scheduler.suggest)
        number = len(self._trials)
        trial = Trial(number, suggestion.config, datetime.datetime.now(datetime.UTC))
        self._drawing(lambda: self._scheduler.on_trial_add(trial))
        self._trials.append(trial)
        return Work(number, self._epochs, self._flat.params(suggestion.config))

    def report(self, trial: int, epoch: int, value: Sequence[float]) -> bool:
        first, second = np.asarray(value) * self._signs
        result = {"first": float(first), "second": float(second), "epoch": epoch + 1}
        found = self._drawing(lambda: self._scheduler.on_trial_result(self._trials[trial], result))
        return bool(found == "CONTINUE")

    def _drawing(self, question: Callable[[], Any]) -> Any:
        others = np.random.get_state()
        np.random.set_state(self._state)
        answer = question()
        self._state = np.random.get_state()
        np.random.set_state(others)
        return answer


def as_shipped(objectives: np.ndarray) -> np.ndarray:
    """What Syne Tune 0.16 takes for the places of vectors [n], computed in a hundredth of its time.

    Twice it takes the one for the other: places in a front for the members in their order, and then the indices of the
    sorted vectors for their places; so it stops others than it means to.
    """
    found: list[int] = []
    find_pareto_front = compute_front_ranks(objectives)
    for front in range(int(find_pareto_front.max()) + 1):
        members = np.flatnonzero(find_pareto_front == front)
        found += members[np.argsort(net(objectives[members]))].tolist()
    return np.array(found)


def as_meant(objectives: np.ndarray) -> np.ndarray:
    """The places of vectors [n] as Schmucker et al. have them: by front, within one by an epsilon-net, not scaled."""
    find_pareto_front = compute_front_ranks(objectives)
    found = np.empty(len(objectives), dtype=int)
    for front in range(int(find_pareto_front.max()) + 1):
        members = np.flatnonzero(find_pareto_front == front)
        found[members[net(objectives[members])]] = (find_pareto_front < front).sum() + np.arange(len(members))
    return found


def net(vectors: np.ndarray) -> list[int]:
    """The best of the first metric, then ever the one that is farthest from those before."""
    chosen, nearest = int(np.argmin(vectors[:, 0])), np.full(len(vectors), np.inf)
    found: list[int] = []
    for _ in range(len(vectors)):
        found.append(chosen)
        nearest = np.minimum(nearest, np.linalg.norm(vectors - vectors[chosen], axis=1))
        nearest[found] = -1.0
        chosen = int(np.argmax(nearest))
    return found
