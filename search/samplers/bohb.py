"""TPE of several metrics where trials are pruned, after BOHB (Falkner et al. 2018)."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.freeze_thaw.multi_objective import get_max_violation
from hpsearch.storage.attributes import INFEASIBLE

RANDOM = 0.3  # of the trials
ENOUGH = 10  # trials that came to their end


class BOHBSampler(TPESampler):
    """Optuna's TPE, but of a study of several metrics in which trials were pruned.

    To take whoever came further for better shuts out for good what learns slowly at first, for no such trial comes far:
    in simulated searches that did worse than drawing at random. So a share of the trials is drawn at random, and once
    enough came to their end good and bad ones are told apart among these alone.
    """

    def __init__(self, *, seed: int, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self._at_random = np.random.default_rng(seed).random() < RANDOM

    def _sample(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if len(study.directions) == 1 or not study._get_trials(False, states=(TrialState.PRUNED,), use_cache=True):
            return super()._sample(study, trial, search_space)
        if self._at_random:
            draw = self._random_sampler.sample_independent
            return {name: draw(study, trial, name, values) for name, values in search_space.items()}
        ended_ones: Any = _Ended(study)
        return super()._sample(ended_ones, trial, search_space)


class _Ended:
    """A study without pruned trials, but for those that are bad for certain, once enough others came to their end."""

    def __init__(self, study: optuna.Study) -> None:
        self._study = study

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    def _get_trials(
        self, deepcopy: bool = True, states: Container[TrialState] | None = None, use_cache: bool = False
    ) -> list[FrozenTrial]:
        trials = self._study._get_trials(deepcopy, states, use_cache)
        if sum(t.state == TrialState.COMPLETE for t in trials) < ENOUGH:
            return trials
        return [t for t in trials if t.state != TrialState.PRUNED or _is_bad(t)]


def _is_bad(trial: FrozenTrial) -> bool:
    return INFEASIBLE in trial.user_attrs or get_max_violation(trial) > 0
