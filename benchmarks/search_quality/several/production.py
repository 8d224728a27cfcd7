"""The samplers of hpsearch with several metrics, and promotions from rungs by Pareto fronts, in the simulation.

The study is in memory instead of Postgres. Samplers use the same view of it as in a worker, and promotions use the same
order and rule as `hpsearch.storage.trials`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from optuna.trial import TrialState

from benchmarks.search_quality.production import table
from benchmarks.search_quality.several.problems import TwoMetrics
from benchmarks.search_quality.simulation import Work
from hpsearch.search.freeze_thaw.multi_objective import track_incumbent
from hpsearch.search.pruners import PrunerSpec
from hpsearch.search.samplers import SamplerSpec
from hpsearch.search.samplers.known_trials import make_sampler_study_view
from hpsearch.search.samplers.suggest import make_sampler
from hpsearch.storage.rungs.fronts import sort_by_front


class Production:
    """A sampler, and `asha` or no pruner, given by their names or tables as in a study.

    Args:
        training: the problem.
        sampler, pruner: names, or tables with options.
        seed: seed of the search.
    """

    def __init__(self, training: TwoMetrics, sampler: object, pruner: object, *, seed: int) -> None:
        self._training, self._seed = training, seed
        self._epochs = training.problem.epochs
        self._sampler = SamplerSpec.parse(table(sampler))
        self._schedule = PrunerSpec.parse(table(pruner)).fit_to_epochs(self._epochs).get_rung_schedule(self._epochs)
        self._values: dict[int, dict[int, list[float]]] = {}  # by the trial's id, which is its number here
        study = optuna.create_study(directions=training.directions)
        self._study = make_sampler_study_view(study, lambda: self._values)
        self._rungs: list[dict[int, np.ndarray]] = [{} for _ in (self._schedule.epochs if self._schedule else ())]
        self._promoted: list[set[int]] = [set() for _ in self._rungs]  # trials promoted from each rung
        self._best: list[list[int]] = [[] for _ in self._rungs]  # trials that may be promoted from each rung

    def next_work(self) -> Work:
        """Return the best promotable trial of the highest rung that has one; otherwise a new trial."""
        for rung in reversed(range(len(self._rungs))):
            if (trial := self._promotable(rung)) is not None:
                self._promoted[rung].add(trial)
                self._study._storage.set_trial_state_values(trial, TrialState.RUNNING)
                return Work(trial, self._epochs)
        return self._begun()

    def report(self, trial: int, epoch: int, value: Sequence[float]) -> bool:
        """Record the vector; at a rung, pause the trial unless it is promoted."""
        storage, values = self._study._storage, self._values[trial]
        values[epoch] = list(value)
        storage.set_trial_intermediate_value(trial, epoch, value[0])
        if epoch + 1 == self._epochs:
            best = self._worth(trial) * np.where(self._training.maximize, -1.0, 1.0)
            storage.set_trial_state_values(trial, TrialState.COMPLETE, best.tolist())
            return False
        if self._schedule is None or epoch + 1 not in self._schedule.epochs:
            return True
        rung = self._schedule.epochs.index(epoch + 1)
        self._rungs[rung][trial] = self._worth(trial)
        self._best[rung] = self._find_best(rung)
        if trial in self._best[rung]:
            self._promoted[rung].add(trial)
            return True
        storage.set_trial_state_values(trial, TrialState.WAITING)
        return False

    def _begun(self) -> Work:
        number = len(self._values)
        which: Any = {"study_seed": self._seed, "trial_number": number, "epochs": self._epochs}
        self._study.sampler = make_sampler(self._sampler, **which)
        self._study._thread_local.cached_all_trials = None
        trial_id = self._study._storage.create_new_trial(self._study._study_id)
        assert trial_id == number
        self._values[number] = {}
        trial = optuna.Trial(self._study, trial_id)
        self._training.problem.objective().configure(trial)
        return Work(number, self._epochs, trial.params)

    def _worth(self, trial: int) -> np.ndarray:
        values = {epoch + 1: vector for epoch, vector in self._values[trial].items()}
        return track_incumbent(values, self._training.maximize)[max(values)]

    def _promotable(self, rung: int) -> int | None:
        return next((trial for trial in self._best[rung] if trial not in self._promoted[rung]), None)

    def _find_best(self, rung: int) -> list[int]:
        """Return the best 1 in `reduction_factor` trials of a rung."""
        assert self._schedule is not None
        reached = sorted(self._rungs[rung])
        places = len(reached) // self._schedule.reduction_factor
        if not places:
            return []
        losses = np.array([self._rungs[rung][trial] for trial in reached])
        return [reached[place] for place in sort_by_front(losses, places)]
