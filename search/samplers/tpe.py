"""Search by the densities of good and of bad trials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from search.samplers.base import SamplerSpec

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


class TPE(SamplerSpec):
    """Tree-structured Parzen estimator (Bergstra et al. 2011), Optuna's ``TPESampler``."""

    name: Literal["tpe"] = "tpe"
    n_startup_trials: int = Field(default=10, ge=0)
    n_ei_candidates: int = Field(default=24, ge=1)
    multivariate: bool = True
    group: bool = True
    constant_liar: bool = True

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        from optuna.samplers import TPESampler

        return TPESampler(seed=seed, **self.options)
