"""The pruner `pbt`: population-based training, in which the worst trials copy and perturb the best ones."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from pydantic import BeforeValidator, Field

from hpsearch.search.pruners.base_and_halving import (
    Decision,
    OtherTrials,
    PrunerSpec,
    PruningContext,
    RungSchedule,
)
from hpsearch.search.spec.kinds import Number
from hpsearch.storage.rungs.generations import Copy, Member

MIN_TRIALS = 4
SAMPLER = "random"  # others learn from trials that have ended, or number their points in the order of the workers

# The values of the paper: a factor per parameter, or a new draw from the prior.
_FACTORS = (0.8, 1.2)
_RESAMPLE_PROBABILITY = 0.25


def _split_names(given: Any) -> Any:
    return [name.strip() for name in given.split(",")] if isinstance(given, str) else given


class PBT(PrunerSpec):
    """Population-based training (Jaderberg et al. 2017), with synchronous generations.

    All trials train together as a population. After each `interval` epochs (default: a tenth of the epochs), the worst
    `quantile` of the members copy the checkpoint and the configuration of a random member of the best `quantile`, and
    multiply each of `parameters` by 0.8 or 1.2, or draw it again with a probability of 25 %. Members are compared by
    their last value. Trials that fail, are infeasible or run out of patience leave the population; when `quantile` of
    the members is less than one, no member copies any more. Without `parameters`, `run` finds the numerical parameters
    that can change during the training, before it creates the study.
    """

    name: Literal["pbt"] = "pbt"
    can_be_multi_objective: ClassVar[bool] = False
    shares_checkpoints: ClassVar[bool] = True
    interval: int | None = Field(default=None, ge=1)
    quantile: Number = Field(default=0.25, gt=0, le=0.5)
    parameters: Annotated[list[str] | None, BeforeValidator(_split_names)] = None

    def fit_to_epochs(self, epochs: int) -> Self:
        interval = self._get_interval(epochs)
        if interval >= epochs:
            raise ValueError(
                f"pruner.interval {interval} is not below --epochs {epochs}, so no trial would be copied; "
                f"{'raise --epochs' if self.interval is None else 'lower pruner.interval'}"
            )
        return self.model_copy(update={"interval": interval})

    def check_settings(self, *, n_trials: int, sampler: str, given: Sequence[str]) -> None:
        if given:
            raise ValueError(f"{given[0]} is not available with --pruner pbt; remove {given[0]}, or use --pruner asha")
        if sampler != SAMPLER:
            raise ValueError(
                f"--sampler {sampler} is not available with --pruner pbt, whose trials start together; use --sampler "
                f"{SAMPLER}"
            )
        if n_trials < MIN_TRIALS:
            raise ValueError(
                f"--trials {n_trials} is below {MIN_TRIALS}, the smallest population of --pruner pbt; raise --trials"
            )
        if n_trials * self.quantile < 1:
            raise ValueError(
                f"pruner.quantile {self.quantile:g} of --trials {n_trials} is less than one trial, so no trial would "
                "be copied; raise pruner.quantile or --trials"
            )

    def decide(self, case: PruningContext, peers: OtherTrials) -> Decision:
        return case.keep()  # the members are compared at the ends of generations, where they pause

    def get_rung_schedule(self, epochs: int) -> RungSchedule | None:
        interval = self._get_interval(epochs)
        return RungSchedule(tuple(range(interval, epochs, interval)), reduction_factor=1, min_complete=0)

    def _get_interval(self, epochs: int) -> int:
        return max(1, round(epochs / 10)) if self.interval is None else self.interval

    def choose_copies(self, seed: int, generation: int, members: Sequence[Member]) -> list[Copy]:
        """Return the copies at the end of a generation; see `hpsearch.storage.rungs.generations.Decide`.

        Only a member whose checkpoint is stored can be copied. Of two members with equal values, the one with the
        lower number is better.

        Args:
            seed: seed of the study. The random numbers depend on it, the generation and the number of the trial.
            generation: the generation, from 0.
            members: the members of the population.
        """
        ranked = sorted(members, key=lambda member: (member.loss, member.number))
        count = math.floor(self.quantile * len(ranked))
        parents = [member for member in ranked[:count] if member.has_checkpoint]
        copies = []
        for child in ranked[len(ranked) - count :] if parents else []:
            generator = random.Random(f"pbt/{seed}/{generation}/{child.number}")  # noqa: S311 not for secrets
            parent = generator.choice(parents)
            params = dict(parent.params)
            for name in sorted(set(self.parameters or ()) & params.keys()):
                params[name] = perturb(params[name], parent.distributions[name], generator)
            copies.append(Copy(child.number, parent.number, params))
        return copies


def perturb(value: float, distribution: BaseDistribution, generator: random.Random) -> float:
    """Return a value of a numerical parameter near `value`, or a new draw; always in the range and on its grid."""
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    is_new, factor, share = generator.random() < _RESAMPLE_PROBABILITY, generator.choice(_FACTORS), generator.random()
    low, high, step = distribution.low, distribution.high, distribution.step
    if not is_new:
        changed = value * factor
        if step is not None and abs(changed - value) < step:  # a small integer would never change
            changed = value + math.copysign(step, changed - value)
    elif distribution.log:
        changed = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    else:
        changed = low + share * (high - low)
    if step is not None:
        changed = low + step * round((changed - low) / step)
    changed = min(max(changed, low), high)
    return round(changed) if isinstance(distribution, IntDistribution) else float(changed)


def is_numerical(distribution: BaseDistribution) -> bool:
    """Return whether a parameter is a number with more than one possible value."""
    return not isinstance(distribution, CategoricalDistribution) and not distribution.single()
