"""The samplers and pruners of hpsearch in the simulation, built and called as by a worker.

The study is in memory instead of Postgres: samplers use an Optuna study in both cases, and pruners read other trials
by the protocol `OtherTrials`, which is implemented here in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import optuna
from optuna.trial import FrozenTrial, TrialState

from benchmarks.search_quality.optuna_study import OptunaStudy
from benchmarks.search_quality.problems import Problem
from benchmarks.search_quality.simulation import Work
from hpsearch.search.pruners import PrunerSpec
from hpsearch.search.pruners.base_and_halving import PruningContext
from hpsearch.search.samplers import SamplerSpec
from hpsearch.search.samplers.suggest import make_sampler

Rungs = dict[int, dict[int, float]]  # values by rung and trial


@dataclass(frozen=True)
class Others:
    """The in-memory implementation of `OtherTrials`."""

    study: optuna.Study
    number: int
    rungs: Rungs

    def get_finished_trials(self) -> Sequence[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))

    def count_reached_rungs(self) -> int:
        rung = 0
        while self.number in self.rungs.get(rung, {}):
            rung += 1
        return rung

    def record_rung_value(self, rung: int, value: float) -> None:
        self.rungs.setdefault(rung, {})[self.number] = value

    def read_rung_values(self, rung: int) -> list[tuple[int, float]]:
        return [(number, value) for number, value in self.rungs.get(rung, {}).items() if number != self.number]

    def read_fold_values(self, epoch: int, trial: FrozenTrial | None = None) -> list[float]:
        raise NotImplementedError("the simulated trials have no folds")


class Production:
    """A sampler and a pruner of hpsearch, given by their names or tables as in a study."""

    def __init__(self, problem: Problem, sampler: object, pruner: object, *, seed: int) -> None:
        self._problem, self._seed = problem, seed
        self._sampler = SamplerSpec.parse(table(sampler))
        self._pruner = PrunerSpec.parse(table(pruner)).fit_to_epochs(problem.epochs)
        self._trials = OptunaStudy(problem, f"{problem.objective.name}-{seed}")
        self._trials.study.pruner = self._pruner.build()  # samplers read the bracket of a trial from it
        self._rungs: Rungs = {}

    def next_work(self) -> Work | None:
        if len(self._trials.values) == self._problem.trials:
            return None
        study = self._trials.study
        which = {"study_seed": self._seed, "trial_number": len(self._trials.values)}
        study.sampler = make_sampler(self._sampler, epochs=self._problem.epochs, **which)
        return self._trials.begin()

    def report(self, trial: int, epoch: int, value: float) -> bool:
        self._trials.note(trial, epoch, value)
        if trial not in self._trials.running:
            return False
        case = PruningContext(
            pruner=self._pruner.name,
            study=self._trials.name,
            number=trial,
            metric=self._problem.objective.metric,
            maximize=self._problem.maximize,
            epochs=self._problem.epochs,
            values=self._trials.values[trial],
        )
        decision = self._pruner.decide(case, Others(self._trials.study, trial, self._rungs))
        if decision.prune:
            self._trials.prune(trial)
        return not decision.prune


def table(kind: object) -> object:
    """Return the table that a name stands for."""
    return {"name": kind} if isinstance(kind, str) else kind
