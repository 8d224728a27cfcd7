"""Sampler that uses every epoch of every trial, including running and paused trials."""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.freeze_thaw.forecast import score_interval_to_metric
from hpsearch.search.freeze_thaw.forecast_text import SUGGESTION_REASON_KEY
from hpsearch.search.freeze_thaw.gaussian_process import Points, log_expected_improvement
from hpsearch.search.freeze_thaw.gp_dataset import (
    HYPERPARAMETERS_KEY,
    GPDataset,
    fantasize_running,
    fit_posterior,
    get_observed_trials,
    get_unreported_rows,
    merge_distributions,
)
from hpsearch.search.freeze_thaw.multi_objective import MultiObjectiveSuggester
from hpsearch.search.freeze_thaw.space import TOP_TRIALS, SearchSpace, contains_value, maximize_acquisition, sample_near
from hpsearch.search.freeze_thaw.warm_start import WARM_START_KEY, WarmStartData
from hpsearch.storage.attributes import ORIGIN


class FreezeThawSampler(BaseSampler):
    """Freeze-thaw Bayesian optimization (Swersky et al. 2014): maximizes the expected improvement of the final value.

    In multi-objective studies, it maximizes the expected hypervolume improvement (`multi_objective`).

    The sampler has no state: observations and hyperparameters are stored in the study. A process that finds outdated
    hyperparameters fits them again. For the same study and seed, every process makes the same suggestion.

    Args:
        seed: seed of this suggestion.
        epochs: number of epochs of a full trial.
        n_startup_trials: number of random trials before the first suggestion; trials of earlier studies are counted.
        random_fraction: fraction of random trials among the later trials.
        near_default_fraction: fraction of the random trials that are sampled near the objective's default
            configuration, if the study has one.
    """

    def __init__(
        self,
        *,
        seed: int,
        epochs: int,
        n_startup_trials: int = 10,
        random_fraction: float = 0.3,
        near_default_fraction: float = 0.5,
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._independent = RandomSampler(seed)
        self._epochs = epochs
        self._n_startup_trials = n_startup_trials
        self._is_random = self._random.random() < random_fraction
        self._near_random = np.random.default_rng([seed, 1])
        self._is_near_default = self._near_random.random() < near_default_fraction
        self._default: dict[str, Any] = {}

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> SearchSpace:
        """Return the distributions of all observed parameters; an empty dict if this trial is random."""
        trials = get_observed_trials(study, exclude=trial.number)
        self._default = _find_default(study) if self._is_near_default else {}
        self._kept = study._storage.get_study_system_attrs(study._study_id)
        self._warm_start = WarmStartData.from_json(self._kept.get(WARM_START_KEY))
        if self._is_random or len(trials) + len(self._warm_start.trials) < self._n_startup_trials:
            return {}
        return merge_distributions(trials, self._warm_start)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: SearchSpace) -> dict[str, Any]:
        """Return the suggested configuration; conditional parameters whose condition does not hold are omitted."""
        if not search_space:
            return {}
        if len(study.directions) > 1:
            return MultiObjectiveSuggester(self._epochs, self._random).suggest(study, trial, search_space)
        observed = get_observed_trials(study, exclude=trial.number)
        maximize = study.direction == StudyDirection.MAXIMIZE
        dataset = GPDataset.from_trials(
            observed,
            search_space,
            maximize=maximize,
            epochs=self._epochs,
            random=self._random,
            warm_start=self._warm_start,
        )
        space, points = dataset.space, dataset.observations
        began = self._n_startup_trials if self._warm_start.trials else 0
        posterior = fit_posterior(study, self._kept.get(HYPERPARAMETERS_KEY, {}), dataset, began + len(observed))
        predicted = posterior.predict(dataset.final_epoch_points)[0].numpy()
        incumbent = float(predicted[: len(observed)].min() if observed else predicted.min())
        running = np.array([i for i, t in enumerate(observed) if t.state == TrialState.RUNNING], dtype=np.int64)
        unreported = get_unreported_rows(study, space, exclude=trial.number)
        posterior = fantasize_running(posterior, space, space.rows[running], running, unreported)

        def compute_acquisition(rows: np.ndarray) -> np.ndarray:
            at = Points.at_final_epoch(space.to_features(rows))
            return log_expected_improvement(*posterior.predict(at), incumbent).numpy()

        best = np.argsort(predicted, kind="stable")[:TOP_TRIALS]
        had = np.concatenate([space.rows, unreported])
        row, top = maximize_acquisition(compute_acquisition, space, self._random, around=dataset.rows[best], had=had)
        given = any(not d.single() for d in trial.distributions.values())  # an earlier attempt has sampled parameters
        if not given and "fixed_params" not in trial.system_attrs and np.isfinite(points.loss).any():
            mean, deviation = posterior.predict(Points.at_final_epoch(space.to_features(row[None])))
            middle, low, high = score_interval_to_metric(points, mean.item(), deviation.item(), maximize=maximize)
            then, _, _ = score_interval_to_metric(points, incumbent, 0.0, maximize=maximize)
            near = self._near(observed, None if top is None else int(best[top]))
            note: Any = {"foreseen": middle, "band": [low, high], "best": then, **near}
            study._storage.set_trial_system_attr(trial._trial_id, SUGGESTION_REASON_KEY, note)
        return space.to_params(row)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a random value; for random trials, and for parameters that no trial has."""
        value = self._default.get(param_name)
        if param_name in self._default and contains_value(param_distribution, value):
            return sample_near(param_distribution, value, self._near_random)
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def _near(self, observed: list[FrozenTrial], top: int | None) -> dict[str, Any]:
        """Return the number of the trial near a suggestion, and the name of its study if it is an earlier study."""
        if top is None or top < len(observed):
            return {"near": None if top is None else observed[top].number}
        there = self._warm_start.trials[top - len(observed)]
        return {"near": there.number, "of": self._warm_start.studies[there.study - 1]}


def _find_default(study: optuna.Study) -> dict[str, Any]:
    """Return the objective's default configuration if the study has a trial of it, else an empty dict."""
    trials = study._get_trials(deepcopy=False, use_cache=True)
    found = next((t for t in trials if t.user_attrs.get(ORIGIN) == "default"), None)
    return {} if found is None else found.system_attrs.get("fixed_params", {})
