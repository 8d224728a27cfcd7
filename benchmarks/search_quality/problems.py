"""The objectives of the benchmark: length of a trial, number of trainings, and use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.search_quality.likelihood import BreastCancerLikelihood, DigitsLikelihood
from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.builtin.denoise import Denoise
from hpsearch.objectives.builtin.gan import Gan
from hpsearch.objectives.builtin.series import Series

NO_END = 10**6


@dataclass(frozen=True)
class Problem:
    """An objective and its use in the benchmark.

    Attributes:
        objective: an objective of this repository, with its search space.
        use: whether search methods may be tuned on it, or are evaluated on it.
        configurations: number of configurations to train.
        repeated: number of configurations, the first ones, to train with several seeds.
        seeds: number of seeds for these.
        epochs: number of epochs of a full trial.
        trials: number of trials that a search may begin.
        budget_epochs: budget in epochs of a study in Postgres, whose rest completes the best trials; None means
            that the study has no such budget.
        default: configuration that the objective's author suggests, which a search runs first; None if there is none.
    """

    objective: type[BaseObjective]
    use: Literal["tuning", "held out"]
    configurations: int = 300
    repeated: int = 10
    seeds: int = 2
    epochs: int = 27
    trials: int = field(default=NO_END, repr=False)  # curves and surrogates do not depend on it
    budget_epochs: int | None = field(default=None, repr=False)
    default: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def maximize(self) -> bool:
        return self.objective.direction == "maximize"

    @property
    def jobs(self) -> list[tuple[int, int]]:
        """The configuration and seed number of each training, in order."""
        first = [(number, seed) for number in range(self.repeated) for seed in range(self.seeds)]
        return [*first, *((number, 0) for number in range(self.repeated, self.configurations))]


PROBLEMS = {
    "digits": Problem(DigitsLikelihood, "tuning"),  # categorical and conditional parameters
    "series": Problem(Series, "tuning"),
    # Most measurements of noise are made on breast_cancer.
    "breast_cancer": Problem(BreastCancerLikelihood, "held out", repeated=30, seeds=3),
    "denoise": Problem(Denoise, "held out"),
    "gan": Problem(Gan, "held out"),
}
