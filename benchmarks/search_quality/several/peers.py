"""The samplers and schedulers of Optuna and Syne Tune with several metrics in the simulation."""

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
    """A sampler of Optuna, called by `ask` and `tell`; Optuna does not support `report` with several metrics."""

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
        """Record the vector; after the last epoch, tell the vector at the best epoch of the first metric."""
        self._values[trial][epoch + 1] = value
        if epoch + 1 < self._training.problem.epochs:
            return True
        best = track_incumbent(self._values.pop(trial), self._training.maximize)[epoch + 1]
        self._study.tell(self._running.pop(trial), (best * np.where(self._training.maximize, -1.0, 1.0)).tolist())
        return False


class SyneTune:
    """Syne Tune's MO-ASHA, which has only the variant that stops trials.

    It draws from numpy's global random state, which is replaced during each call.

    Args:
        training: the problem.
        seed: seed of the random state.
        priority: returns the ranks of the vectors at a rung [n, metrics]; None for Syne Tune's own.
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

        suggestion = self._with_state(self._scheduler.suggest)
        number = len(self._trials)
        trial = Trial(number, suggestion.config, datetime.datetime.now(datetime.UTC))
        self._with_state(lambda: self._scheduler.on_trial_add(trial))
        self._trials.append(trial)
        return Work(number, self._epochs, self._flat.params(suggestion.config))

    def report(self, trial: int, epoch: int, value: Sequence[float]) -> bool:
        first, second = np.asarray(value) * self._signs
        result = {"first": float(first), "second": float(second), "epoch": epoch + 1}
        found = self._with_state(lambda: self._scheduler.on_trial_result(self._trials[trial], result))
        return bool(found == "CONTINUE")

    def _with_state(self, call: Callable[[], Any]) -> Any:
        others = np.random.get_state()
        np.random.set_state(self._state)
        result = call()
        self._state = np.random.get_state()
        np.random.set_state(others)
        return result


def as_shipped(objectives: np.ndarray) -> np.ndarray:
    """Return the ranks [n] that Syne Tune 0.16 computes for vectors, 100 times faster.

    Syne Tune confuses ranks and order twice: it uses the ranks in a front as indices of its sorted members, and then
    returns the indices of the sorted vectors as their ranks. So it stops other trials than intended.
    """
    found: list[int] = []
    ranks = compute_front_ranks(objectives)
    for front in range(int(ranks.max()) + 1):
        members = np.flatnonzero(ranks == front)
        found += members[np.argsort(net(objectives[members]))].tolist()
    return np.array(found)


def as_intended(objectives: np.ndarray) -> np.ndarray:
    """Return ranks [n] as in Schmucker et al.: by front, within a front by an epsilon-net on unscaled vectors."""
    ranks = compute_front_ranks(objectives)
    found = np.empty(len(objectives), dtype=int)
    for front in range(int(ranks.max()) + 1):
        members = np.flatnonzero(ranks == front)
        found[members[net(objectives[members])]] = (ranks < front).sum() + np.arange(len(members))
    return found


def net(vectors: np.ndarray) -> list[int]:
    """Return indices: first the best of the first metric, then repeatedly the vector farthest from those before."""
    chosen, nearest = int(np.argmin(vectors[:, 0])), np.full(len(vectors), np.inf)
    found: list[int] = []
    for _ in range(len(vectors)):
        found.append(chosen)
        nearest = np.minimum(nearest, np.linalg.norm(vectors - vectors[chosen], axis=1))
        nearest[found] = -1.0
        chosen = int(np.argmax(nearest))
    return found
