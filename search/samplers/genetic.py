"""Search by generations, each bred from the best of those before."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hpsearch.search.kinds import Number
from hpsearch.search.samplers.base import SamplerSpec

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


class _Genetic(SamplerSpec):
    """What the two have in common."""

    population_size: int = Field(default=50, ge=2)
    mutation_prob: Number | None = Field(default=None, ge=0, le=1)
    crossover_prob: Number = Field(default=0.9, ge=0, le=1)
    swapping_prob: Number = Field(default=0.5, ge=0, le=1)

    repeats: ClassVar[bool] = True  # a child may have all of one parent

    def for_trials(self, n_trials: int) -> None:
        if self.population_size >= n_trials:
            raise ValueError(
                f"sampler.population_size {self.population_size} is not below the budget of {n_trials} trials: all "
                "would be of the first generation, which is random; lower it, or give more --trials"
            )


class NSGA2(_Genetic):
    """Genetic search with a sorted population (Deb et al. 2002), Optuna's ``NSGAIISampler``.

    A generation is of `population_size` trials that have run to their end: a pruned one is no parent.
    """

    name: Literal["nsga2"] = "nsga2"

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        from optuna.samplers import NSGAIISampler

        return NSGAIISampler(seed=seed, **self.options)


class NSGA3(_Genetic):
    """As nsga2, with parents chosen by reference points (Deb and Jain 2014), Optuna's ``NSGAIIISampler``."""

    name: Literal["nsga3"] = "nsga3"
    dividing_parameter: int = Field(default=3, ge=1)

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        from optuna.samplers import NSGAIIISampler

        return NSGAIIISampler(seed=seed, **self.options)
