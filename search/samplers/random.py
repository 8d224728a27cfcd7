"""Search at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hpsearch.search.samplers.base import SamplerSpec

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


class Random(SamplerSpec):
    """Independent random search, Optuna's ``RandomSampler``."""

    name: Literal["random"] = "random"

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        from optuna.samplers import RandomSampler

        return RandomSampler(seed=seed)
