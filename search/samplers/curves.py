"""Search by a Gaussian process over configurations and epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from hpsearch.search.samplers.base import SamplerSpec
from hpsearch.search.spec.kinds import Number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.study import StudyDirection
    from optuna.trial import FrozenTrial


class Curves(SamplerSpec):
    """Learn from every epoch, of trials that run or wait too, what a configuration ends with.

    A Gaussian process over configurations and epochs (after Swersky et al. 2014), and the expected improvement at the
    last epoch on the best that is foreseen. It takes --warm-start: the same configuration in an earlier study tells as
    much as the studies turn out to be alike (after Bonilla et al. 2007 and Swersky et al. 2013). A `random_fraction` of
    the trials is drawn at random (after Falkner et al. 2018): the process alone can dwell on what it believes in.
    """

    name: Literal["curves"] = "curves"
    n_startup_trials: int = Field(default=10, ge=1)
    random_fraction: Number = Field(default=0.3, ge=0, le=1)

    warm_starts: ClassVar[bool] = True
    repeats: ClassVar[bool] = True  # two workers at once, at the ends of ranges

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        from hpsearch.search.curves.sampler import CurvesSampler

        return CurvesSampler(seed=seed, epochs=epochs, **self.options)

    def earlier(
        self,
        studies: Mapping[str, Sequence[FrozenTrial]],
        *,
        distributions: Mapping[str, BaseDistribution],
        drawn: Sequence[Mapping[str, Any]],
        direction: StudyDirection,
        epochs: int,
        seed: int,
    ) -> dict[str, Any]:
        import numpy as np

        from hpsearch.search.curves.earlier import EARLIER, Earlier

        told = Earlier.of(
            studies,
            distributions=distributions,
            drawn=drawn,
            direction=direction,
            epochs=epochs,
            random=np.random.default_rng(seed),
        )
        return {EARLIER: told.to_json()}
