"""An in-memory study of Optuna, for methods that use one."""

from __future__ import annotations

from dataclasses import dataclass, field

import optuna
from optuna.trial import TrialState

from benchmarks.search_quality.problems import Problem
from benchmarks.search_quality.simulation import Work
from hpsearch.storage.attributes import ORIGIN


@dataclass
class OptunaStudy:
    """A study with calls that begin trials, report values and end trials; the caller decides on pruning.

    Attributes:
        problem: has the search space.
        name: name of the study, by which Hyperband assigns brackets.
        study: Optuna's study; the caller sets its sampler and pruner.
        running: trials that have not ended.
        values: values of all trials by epoch, from 0.
    """

    problem: Problem
    name: str
    study: optuna.Study = field(init=False)
    running: dict[int, optuna.Trial] = field(default_factory=dict)
    values: dict[int, dict[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        objective = self.problem.objective
        self.study = optuna.create_study(study_name=self.name, direction=objective.direction)
        if self.problem.default is not None:
            self.study.enqueue_trial(dict(self.problem.default), user_attrs={ORIGIN: "default"})

    def begin(self) -> Work:
        """Begin a trial with parameters from the study's sampler."""
        trial = self.study.ask()
        self.problem.objective().configure(trial)
        self.running[trial.number] = trial
        self.values[trial.number] = {}
        return Work(trial.number, self.problem.epochs, trial.params)

    def note(self, number: int, epoch: int, value: float) -> None:
        """Report a value; after the last epoch end the trial with its best value."""
        self.values[number][epoch] = value
        self.running[number].report(value, epoch)
        if epoch == self.problem.epochs - 1:
            best = (max if self.problem.maximize else min)(self.values[number].values())
            self.study.tell(self.running.pop(number), best)

    def prune(self, number: int) -> None:
        self.study.tell(self.running.pop(number), state=TrialState.PRUNED)
