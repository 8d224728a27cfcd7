"""The objectives of the benchmark: how long a trial is, how many were trained, and what each is for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from benchmarks.search_quality.likelihood import BreastCancerLikelihood, DigitsLikelihood
from hpsearch.objectives.builtin.denoise import Denoise
from hpsearch.objectives.builtin.gan import Gan
from hpsearch.objectives.builtin.series import Series
from hpsearch.objectives.objective import BaseObjective

NO_END = 10**6


@dataclass(frozen=True)
class Problem:
    """An objective, and what is made of it.

    Attributes:
        objective: of this repository, with its own search space.
        use: whether ways of searching may be tuned on it, or are judged by it.
        configurations: how many were trained.
        repeated: how many of these, the first ones, were trained on further seeds.
        seeds: on how many seeds those were.
        epochs: length of a full trial.
        trials: that a search may begin.
    """

    objective: type[BaseObjective]
    use: Literal["tuning", "held out"]
    configurations: int = 300
    repeated: int = 10
    seeds: int = 2
    epochs: int = 27
    trials: int = field(default=NO_END, repr=False)  # nothing that curves or surrogates depend on

    @property
    def maximize(self) -> bool:
        return self.objective.direction == "maximize"

    @property
    def jobs(self) -> list[tuple[int, int]]:
        """Configuration and number of the seed of each training, in the order in which they are made."""
        first = [(number, seed) for number in range(self.repeated) for seed in range(self.seeds)]
        return [*first, *((number, 0) for number in range(self.repeated, self.configurations))]


PROBLEMS = {
    "digits": Problem(DigitsLikelihood, "tuning"),  # categorical and conditional parameters
    "series": Problem(Series, "tuning"),
    "breast_cancer": Problem(
        BreastCancerLikelihood, "held out", repeated=30, seeds=3
    ),  # noise is measured here above all
    "denoise": Problem(Denoise, "held out"),
    "gan": Problem(Gan, "held out"),
}
