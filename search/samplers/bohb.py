"""TPE sampler for multi-objective studies with pruned trials, based on BOHB (Falkner et al. 2018)."""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.freeze_thaw.multi_objective import get_max_violation
from hpsearch.search.freeze_thaw.space import SearchSpace
from hpsearch.search.samplers.known_trials import States
from hpsearch.storage.attributes import INFEASIBLE

RANDOM_FRACTION = 0.3  # fraction of random trials
MIN_COMPLETE = 10  # number of COMPLETE trials from which pruned trials are ignored


class BOHBSampler(TPESampler):
    """Optuna's TPE sampler, with changes for multi-objective studies in which trials were pruned.

    TPE ranks trials that trained longer as better, so it would not suggest configurations that learn slowly at first.
    In simulated searches, the result was worse than random search. Therefore a fraction of the trials is random. Once
    enough trials are COMPLETE, the sampler ignores pruned trials, except infeasible trials.
    """

    def __init__(self, *, seed: int, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self._is_random = np.random.default_rng(seed).random() < RANDOM_FRACTION

    def _sample(self, study: optuna.Study, trial: FrozenTrial, search_space: SearchSpace) -> dict[str, Any]:
        if len(study.directions) == 1 or not study._get_trials(False, states=(TrialState.PRUNED,), use_cache=True):
            return super()._sample(study, trial, search_space)
        if self._is_random:
            draw = self._random_sampler.sample_independent
            return {name: draw(study, trial, name, values) for name, values in search_space.items()}
        filtered: Any = _CompleteTrials(study)
        return super()._sample(filtered, trial, search_space)


class _CompleteTrials:
    """View of a study that, once enough trials are COMPLETE, omits pruned trials, except infeasible trials."""

    def __init__(self, study: optuna.Study) -> None:
        self._study = study

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    def _get_trials(self, deepcopy: bool = True, states: States = None, use_cache: bool = False) -> list[FrozenTrial]:
        trials = self._study._get_trials(deepcopy, states, use_cache)
        if sum(t.state == TrialState.COMPLETE for t in trials) < MIN_COMPLETE:
            return trials
        return [t for t in trials if t.state != TrialState.PRUNED or _is_infeasible(t)]


def _is_infeasible(trial: FrozenTrial) -> bool:
    return INFEASIBLE in trial.user_attrs or get_max_violation(trial) > 0
