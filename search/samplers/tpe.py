"""Search by the densities of good and of bad trials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpsearch.search.samplers.base import SamplerSpec

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


class TPE(SamplerSpec):
    """Tree-structured Parzen estimator (Bergstra et al. 2011), Optuna's ``TPESampler``.

    Where several metrics are optimised and trials were pruned it is as in BOHB (Falkner et al. 2018): three trials of
    ten are drawn at random, and once ten came to their end only those tell good from bad.
    """

    name: Literal["tpe"] = "tpe"
    n_startup_trials: int = Field(default=10, ge=0)
    n_ei_candidates: int = Field(default=24, ge=1)
    multivariate: bool = True
    group: bool = True
    constant_liar: bool = True

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        from hpsearch.search.bohb import BOHBSampler

        return BOHBSampler(seed=seed, **self.options)
