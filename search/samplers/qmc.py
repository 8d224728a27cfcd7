"""Search along a sequence that fills the space: one for the whole study."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hpsearch.search.samplers.base import SamplerSpec

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


class QMC(SamplerSpec):
    """Quasi-Monte Carlo search, Optuna's ``QMCSampler``."""

    name: Literal["qmc"] = "qmc"
    qmc_type: Literal["sobol", "halton"] = "sobol"
    scramble: bool = True

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        from optuna.samplers import QMCSampler, RandomSampler

        first = RandomSampler(seed=seed)
        return QMCSampler(seed=common_seed, independent_sampler=first, warn_independent_sampling=False, **self.options)
