"""Search by a Gaussian process over configurations and epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from search.samplers.base import SamplerSpec

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


class Curves(SamplerSpec):
    """Learn from every epoch, of trials that run or wait too, what a configuration ends with.

    A Gaussian process over configurations and epochs (after Swersky et al. 2014), and the expected improvement at the
    last epoch on the best that is foreseen.
    """

    name: Literal["curves"] = "curves"
    n_startup_trials: int = Field(default=10, ge=1)

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        from search.curves.sampler import CurvesSampler

        return CurvesSampler(seed=seed, epochs=epochs, **self.options)
