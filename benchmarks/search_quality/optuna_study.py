"""A study of Optuna's in memory, for whatever decides by one."""

from __future__ import annotations

from dataclasses import dataclass, field

import optuna
from optuna.trial import TrialState

from benchmarks.search_quality.problems import Problem
from benchmarks.search_quality.simulation import Work


@dataclass
class OptunaStudy:
    """Begins, reports and settles trials as a search does; who decides is left open.

    Attributes:
        problem: gives the search space.
        name: of the study, by which Hyperband deals out its brackets.
        study: Optuna's; its sampler and pruner are the user's to set.
        running: trials that have not ended.
        values: of all trials, by epoch from 0.
    """

    problem: Problem
    name: str
    study: optuna.Study = field(init=False)
    running: dict[int, optuna.Trial] = field(default_factory=dict)
    values: dict[int, dict[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        objective = self.problem.objective
        self.study = optuna.create_study(study_name=self.name, direction=objective.direction)

    def begin(self) -> Work:
        """A new trial, suggested by the study's sampler."""
        trial = self.study.ask()
        self.problem.objective().configure(trial)
        self.running[trial.number] = trial
        self.values[trial.number] = {}
        return Work(trial.number, self.problem.epochs, trial.params)

    def note(self, number: int, epoch: int, value: float) -> None:
        """Takes a value; a full trial is settled by its best."""
        self.values[number][epoch] = value
        self.running[number].report(value, epoch)
        if epoch == self.problem.epochs - 1:
            best = (max if self.problem.maximize else min)(self.values[number].values())
            self.study.tell(self.running.pop(number), best)

    def prune(self, number: int) -> None:
        self.study.tell(self.running.pop(number), state=TrialState.PRUNED)
