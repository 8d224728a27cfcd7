"""The sampler `freeze_thaw`, and Optuna's samplers with their options: random, TPE, GP, QMC, NSGA-II, CMA-ES."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from hpsearch.search.samplers.base import SamplerSpec
from hpsearch.search.samplers.cmaes_state import load_state
from hpsearch.search.spec.kinds import Number

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

    from hpsearch.search.freeze_thaw.space import SearchSpace


class Random(SamplerSpec):
    """Random search, Optuna's ``RandomSampler``."""

    name: Literal["random"] = "random"

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        from optuna.samplers import RandomSampler

        return RandomSampler(seed=seed)


class TPE(SamplerSpec):
    """Tree-structured Parzen estimator (Bergstra et al. 2011), Optuna's ``TPESampler``.

    With pruned or paused trials, it follows BOHB (Falkner et al. 2018): it compares values up to the last epoch that
    at least ten trials have reached. In multi-objective studies, 30 % of the trials are random then.
    """

    name: Literal["tpe"] = "tpe"
    n_startup_trials: int = Field(default=10, ge=0)
    n_ei_candidates: int = Field(default=24, ge=1, le=100_000)
    multivariate: bool = True
    group: bool = True
    constant_liar: bool = True

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        from hpsearch.search.samplers.bohb import EqualEpochsTPESampler

        return EqualEpochsTPESampler(seed=seed, **self.options)


class GP(SamplerSpec):
    """Gaussian-process Bayesian optimisation, Optuna's ``GPSampler``.

    With pruned or paused trials, it compares values up to the last epoch that at least ten trials, and at least
    `n_startup_trials`, have reached.
    """

    name: Literal["gp"] = "gp"
    n_startup_trials: int = Field(default=10, ge=0)
    deterministic_objective: bool = False

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        from hpsearch.search.samplers.bohb import EqualEpochsGPSampler

        return EqualEpochsGPSampler(seed=seed, warn_independent_sampling=False, **self.options)


class QMC(SamplerSpec):
    """Quasi-Monte Carlo search, Optuna's ``QMCSampler``."""

    name: Literal["qmc"] = "qmc"
    qmc_type: Literal["sobol", "halton"] = "sobol"
    scramble: bool = True

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        from optuna.samplers import QMCSampler, RandomSampler

        first = RandomSampler(seed=seed)
        return QMCSampler(seed=common_seed, independent_sampler=first, warn_independent_sampling=False, **self.options)


class _Genetic(SamplerSpec):
    """Options of the genetic samplers `nsga2` and `nsga3`."""

    population_size: int = Field(default=50, ge=2)
    mutation_prob: Number | None = Field(default=None, ge=0, le=1)
    crossover_prob: Number = Field(default=0.9, ge=0, le=1)
    swapping_prob: Number = Field(default=0.5, ge=0, le=1)

    can_use_paused_trials: ClassVar[bool] = False
    can_repeat: ClassVar[bool] = True  # a child may inherit all parameters from one parent

    def check_n_trials(self, n_trials: int) -> None:
        if self.population_size >= n_trials:
            raise ValueError(
                f"sampler.population_size {self.population_size} is not below the budget of {n_trials} trials, so all "
                "trials would be in the first generation, which is random; lower the option, or raise --trials"
            )


class NSGA2(_Genetic):
    """Genetic algorithm with non-dominated sorting (Deb et al. 2002), Optuna's ``NSGAIISampler``.

    A generation consists of `population_size` COMPLETE trials. Pruned trials are never parents.
    """

    name: Literal["nsga2"] = "nsga2"

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        from optuna.samplers import NSGAIISampler

        return NSGAIISampler(seed=seed, **self.options)


class NSGA3(_Genetic):
    """Genetic algorithm with selection by reference points (Deb and Jain 2014), Optuna's ``NSGAIIISampler``."""

    name: Literal["nsga3"] = "nsga3"
    dividing_parameter: int = Field(default=3, ge=1, le=100)

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        from optuna.samplers import NSGAIIISampler

        return NSGAIIISampler(seed=seed, **self.options)


class CMAES(SamplerSpec):
    """Covariance matrix adaptation evolution strategy (Hansen 2016), Optuna's ``CmaEsSampler``.

    Categorical and conditional parameters are sampled randomly, and so are all parameters of the first
    `n_startup_trials` trials. The sampler uses COMPLETE trials and, with `consider_pruned_trials`, the last values of
    pruned trials.
    """

    name: Literal["cmaes"] = "cmaes"
    can_be_multi_objective: ClassVar[bool] = False
    can_use_paused_trials: ClassVar[bool] = False
    n_startup_trials: int = Field(default=1, ge=0)
    popsize: int | None = Field(default=None, ge=4, le=100_000)
    consider_pruned_trials: bool = False
    use_separable_cma: bool = False
    with_margin: bool = False
    lr_adapt: bool = False

    @model_validator(mode="after")
    def _check_variant(self) -> Self:
        variants = [name for name in ("use_separable_cma", "with_margin", "lr_adapt") if getattr(self, name)]
        if len(variants) > 1:
            raise ValueError(f"{' and '.join(variants)} exclude each other; choose one of them")
        return self

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        return _make_cmaes_sampler(seed, self.options)


def _make_cmaes_sampler(seed: int, options: dict[str, Any]) -> BaseSampler:
    from optuna.samplers import CmaEsSampler
    from optuna.study import Study, StudyDirection
    from optuna.trial import TrialState

    class StudyCmaEsSampler(CmaEsSampler):
        """Optuna's sampler, adapted to studies with paused, diverged and enqueued trials."""

        def sample_relative(self, study: Study, trial: FrozenTrial, search_space: SearchSpace) -> dict[str, Any]:
            if "fixed_params" in trial.system_attrs:  # an enqueued trial is not a sample of CMA-ES's distribution
                return {}
            return super().sample_relative(study, trial, search_space)

        def _restore_optimizer(self, completed_trials: list[FrozenTrial]) -> Any:
            for trial in reversed(completed_trials):
                parts = {
                    key: part for key, part in trial.system_attrs.items() if key.startswith(self._attr_key_optimizer)
                }
                if parts:
                    return load_state(self._concat_optimizer_attrs(parts), trial.number)
            return None

        def _get_trials(self, study: Study) -> list[FrozenTrial]:
            if not self._consider_pruned_trials:
                return super()._get_trials(study)
            worst = math.inf if study.direction == StudyDirection.MINIMIZE else -math.inf
            # With explicit states, `SamplerStudyView` includes paused trials as pruned.
            states = (TrialState.COMPLETE, TrialState.PRUNED)
            found = study._get_trials(deepcopy=False, states=states)
            return [_with_last_value(trial, worst) for trial in found if trial.values or trial.intermediate_values]

    def _with_last_value(trial: FrozenTrial, worst: float) -> FrozenTrial:
        if trial.state == TrialState.COMPLETE:
            return trial
        copied = copy.copy(trial)
        last = trial.intermediate_values[max(trial.intermediate_values)]
        copied.value = worst if math.isnan(last) else last
        return copied

    return StudyCmaEsSampler(seed=seed, warn_independent_sampling=False, **options)


class FreezeThaw(SamplerSpec):
    """Freeze-thaw Bayesian optimization, which uses every epoch of every trial, including running and paused trials.

    A Gaussian process over configurations and epochs predicts values at the last epoch (based on Swersky et al. 2014).
    The sampler suggests the configuration with the highest expected improvement of this value. With --warm-start,
    trials of earlier studies are used too, weighted by the estimated similarity of the studies (based on Bonilla et al.
    2007 and Swersky et al. 2013). A fraction `random_fraction` of the trials is random (as in Falkner et al. 2018),
    because otherwise the sampler may repeatedly follow a wrong prediction. A fraction `near_default_fraction` of these
    is sampled near the objective's `defaults` (as in Mallik et al. 2023).
    """

    name: Literal["freeze_thaw"] = "freeze_thaw"
    n_startup_trials: int = Field(default=10, ge=1)
    random_fraction: Number = Field(default=0.3, ge=0, le=1)
    near_default_fraction: Number = Field(default=0.5, ge=0, le=1)

    can_warm_start: ClassVar[bool] = True
    can_repeat: ClassVar[bool] = True  # two concurrent workers may suggest the same end of a range

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        from hpsearch.search.freeze_thaw.sampler import FreezeThawSampler

        return FreezeThawSampler(seed=seed, epochs=epochs, **self.options)
