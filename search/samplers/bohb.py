"""TPE and GP samplers that compare trials after equal numbers of epochs, based on BOHB (Falkner et al. 2018)."""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
from optuna.samplers import GPSampler, TPESampler
from optuna.trial import FrozenTrial

from hpsearch.search.freeze_thaw.space import SearchSpace
from hpsearch.search.samplers.equal_epochs import MIN_COMPARED, EqualEpochsView, has_pruned_trials

RANDOM_FRACTION = 0.3  # fraction of random trials in multi-objective studies


class EqualEpochsTPESampler(TPESampler):
    """Optuna's TPE sampler, with changes for studies with pruned trials.

    Optuna ranks pruned trials by their numbers of epochs, so it would not suggest configurations that learn slowly at
    first. This sampler compares values after the same epoch (`EqualEpochsView`). In multi-objective studies, a fraction
    of the trials is random, because the result of simulated searches was worse than random search without it.
    """

    def __init__(self, *, seed: int, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self._is_random = np.random.default_rng(seed).random() < RANDOM_FRACTION

    def _sample(self, study: optuna.Study, trial: FrozenTrial, search_space: SearchSpace) -> dict[str, Any]:
        if not has_pruned_trials(study):
            return super()._sample(study, trial, search_space)
        if self._is_random and len(study.directions) > 1:
            draw = self._random_sampler.sample_independent
            return {name: draw(study, trial, name, values) for name, values in search_space.items()}
        view: Any = EqualEpochsView(study)
        return super()._sample(view, trial, search_space)


class EqualEpochsGPSampler(GPSampler):
    """Optuna's GP sampler, with values after the same epoch in studies with pruned trials (`EqualEpochsView`).

    Optuna's sampler ignores pruned trials. So in many searches it would suggest random configurations only. Trials that
    did not reach the epoch are visible too: otherwise the sampler would suggest the same configuration again.
    """

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> SearchSpace:
        """Return the parameters that all compared trials have."""
        return super().infer_relative_search_space(self._compare(study), trial)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: SearchSpace) -> dict[str, Any]:
        """Return the suggested values of the parameters that all compared trials have."""
        return super().sample_relative(self._compare(study), trial, search_space)

    def _compare(self, study: optuna.Study) -> Any:
        least = max(MIN_COMPARED, self._n_startup_trials)
        return EqualEpochsView(study, least, has_short_trials=True) if has_pruned_trials(study) else study
