"""Search by a Gaussian process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpsearch.search.samplers.base import SamplerSpec

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


class GP(SamplerSpec):
    """Gaussian-process Bayesian optimisation, Optuna's ``GPSampler``."""

    name: Literal["gp"] = "gp"
    n_startup_trials: int = Field(default=10, ge=0)
    deterministic_objective: bool = False

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        from optuna.samplers import GPSampler

        return GPSampler(seed=seed, warn_independent_sampling=False, **self.options)
