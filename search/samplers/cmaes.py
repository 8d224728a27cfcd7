"""Search by a normal distribution that adapts itself."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from hpsearch.search.samplers.base import SamplerSpec

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


class CMAES(SamplerSpec):
    """Covariance matrix adaptation (Hansen 2016), Optuna's ``CmaEsSampler``; categorical parameters are left to chance.

    So are all in the first `n_startup_trials`, and those that not every trial has. It learns from trials that have run
    to their end; from the last value of pruned ones too with `consider_pruned_trials`.
    """

    name: Literal["cmaes"] = "cmaes"
    knows_several: ClassVar[bool] = False
    n_startup_trials: int = Field(default=1, ge=0)
    popsize: int | None = Field(default=None, ge=4)
    consider_pruned_trials: bool = False
    use_separable_cma: bool = False
    with_margin: bool = False
    lr_adapt: bool = False

    @model_validator(mode="after")
    def _one_variant(self) -> Self:
        variants = [name for name in ("use_separable_cma", "with_margin", "lr_adapt") if getattr(self, name)]
        if len(variants) > 1:
            raise ValueError(f"{' and '.join(variants)} exclude each other: choose one")
        return self

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        return _sampler(seed, self.options)


def _sampler(seed: int, options: dict[str, Any]) -> BaseSampler:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import CmaEsSampler
    from optuna.study import Study, StudyDirection
    from optuna.trial import FrozenTrial, TrialState

    class Fitting(CmaEsSampler):
        """Optuna's, in a study whose trials wait at rungs, diverge, or are of somebody's own choice."""

        def sample_relative(
            self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
        ) -> dict[str, Any]:
            if "fixed_params" in trial.system_attrs:  # no sample of the distribution
                return {}
            return super().sample_relative(study, trial, search_space)

        def _get_trials(self, study: Study) -> list[FrozenTrial]:
            if not self._consider_pruned_trials:
                return super()._get_trials(study)
            worst = math.inf if study.direction == StudyDirection.MINIMIZE else -math.inf
            # Asked for by its state, a trial that waits at a rung is among the pruned.
            states = (TrialState.COMPLETE, TrialState.PRUNED)
            found = study._get_trials(deepcopy=False, states=states)
            return [_valued(trial, worst) for trial in found if trial.values or trial.intermediate_values]

    def _valued(trial: FrozenTrial, worst: float) -> FrozenTrial:
        if trial.state == TrialState.COMPLETE:
            return trial
        shown = copy.copy(trial)
        last = trial.intermediate_values[max(trial.intermediate_values)]
        shown.value = worst if math.isnan(last) else last
        return shown

    return Fitting(seed=seed, warn_independent_sampling=False, **options)
