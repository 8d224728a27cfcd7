"""Training data of the Gaussian process over learning curves, and the fit of the hyperparameters."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optuna
import torch
from optuna.trial import FrozenTrial, TrialState
from torch import Tensor

from hpsearch.search.freeze_thaw.gaussian_process import GaussianProcess, Points, Posterior
from hpsearch.search.freeze_thaw.observations import (
    MAX_POINTS,
    POINTS_PER_TRIAL,
    Observations,
    read_losses,
    select_observations,
)
from hpsearch.search.freeze_thaw.space import SearchSpace, Space
from hpsearch.search.freeze_thaw.warm_start import WarmStartData

MAX_FIT_POINTS = 200  # maximum number of points on which the hyperparameters are fitted


def select_observed(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """Return the trials that have reported a value, or have ended without one."""
    return [t for t in trials if t.params and (t.intermediate_values or t.state.is_finished())]


def merge_distributions(trials: Iterable[FrozenTrial], warm_start: WarmStartData | None = None) -> SearchSpace:
    """Return the latest distribution of each parameter of the trials and of earlier studies.

    Distributions with a single value are omitted.
    """
    found = {} if warm_start is None else {name: d for name, d in warm_start.distributions.items() if not d.single()}
    return found | {name: d for trial in trials for name, d in trial.distributions.items() if not d.single()}


@dataclass(frozen=True)
class GPDataset:
    """Training data of a Gaussian process: points in a search space, and their scores.

    Attributes:
        space: search space, with the configurations of the study's trials as rows.
        observations: observations of the study's trials.
        rows: encoded configurations of the study's trials, then of trials of earlier studies [trials, parameters].
        points: points of the study's trials, then of trials of earlier studies.
        scores: normal scores of the points [n].
        is_epoch_invariant: whether the scores depend only on the configuration, not on trial and epoch.
    """

    space: Space
    observations: Observations
    rows: np.ndarray
    points: Points
    scores: Tensor
    is_epoch_invariant: bool = False

    @classmethod
    def from_trials(  # noqa: PLR0913 the inputs of a dataset
        cls,
        trials: Sequence[FrozenTrial],
        distributions: SearchSpace,
        *,
        maximize: bool,
        epochs: int,
        random: np.random.Generator,
        points_per_trial: int = POINTS_PER_TRIAL,
        always: Container[int] = (),
        warm_start: WarmStartData | None = None,
        curves: Sequence[Mapping[int, float]] | None = None,
        is_epoch_invariant: bool = False,
    ) -> GPDataset:
        """Build the dataset of trials that `select_observed` returned.

        Args:
            trials: trials of the study.
            distributions: non-empty result of `merge_distributions`.
            maximize: whether higher values are better.
            epochs: number of epochs of a full trial.
            random: random generator for subsampling the points.
            points_per_trial: see `select_observations`.
            always: see `select_observations`.
            warm_start: trials of earlier studies; None for no earlier studies.
            curves: per trial, losses by epoch, from 1, which are used unchanged; None to use, at each epoch, the best
                reported value so far.
            is_epoch_invariant: whether all points are at the last epoch and depend only on the configuration.
        """
        warm_start = warm_start or WarmStartData()
        space = Space(distributions, [t.params for t in trials], warm_start.sampled_configurations)
        so_far = curves is None
        curves = [read_losses(t, maximize=maximize, epochs=epochs) for t in trials] if curves is None else curves
        found = select_observations(
            curves, epochs, random, points_per_trial=points_per_trial, always=always, so_far=so_far
        )
        theirs = np.array([space.to_row(t.params) for t in warm_start.trials]).reshape(-1, len(space.names))
        rows = np.concatenate([space.rows, theirs])
        # Points of earlier studies are added up to the maximum, those of the most informative trials first.
        others = [(i, s, score, t.study) for i, t in enumerate(warm_start.trials, len(trials)) for s, score in t.points]
        others = others[: MAX_POINTS - len(found.log_epoch)]
        trial, s, their_scores, study = np.array(others, dtype=np.float64).reshape(len(others), 4).T
        trial = np.concatenate([found.trial, trial.astype(np.int64)])
        study = np.concatenate([np.zeros_like(found.trial), study.astype(np.int64)])
        columns = (space.to_features(rows)[trial], np.concatenate([found.log_epoch, s]), trial, study)
        scores = torch.from_numpy(np.concatenate([found.scores, their_scores]))
        return cls(space, found, rows, Points(*map(torch.from_numpy, columns)), scores, is_epoch_invariant)

    @property
    def final_epoch_points(self) -> Points:
        """The points of all trials at the last epoch; trials of earlier studies count as new trials of this study."""
        own = len(self.space.rows)
        numbers = np.concatenate([np.arange(own), np.full(len(self.rows) - own, -1)])
        return Points.at_final_epoch(self.space.to_features(self.rows), numbers)

    @property
    def prior_process(self) -> GaussianProcess:
        """The Gaussian process with the prior means of its hyperparameters."""
        owner, several = self.space.param_by_feature, bool(self.points.study.any())
        return GaussianProcess.from_prior(owner, multi_study=several, is_epoch_invariant=self.is_epoch_invariant)

    def fit(self, process: GaussianProcess) -> GaussianProcess:
        """Fit the hyperparameters on a subset of the points, with those of `process` as initial values."""
        part = _select_fit_points(len(self.observations.log_epoch), len(self.scores))
        return process.fit(self.points.select(part), self.scores[part])


def _select_fit_points(own: int, every: int) -> Tensor:
    """Return the indices of the points on which hyperparameters are fitted.

    Up to a quarter of these points is reserved for earlier studies.

    Args:
        own: number of points of this study, which come first.
        every: number of points of all studies.
    """
    first = min(own, MAX_FIT_POINTS - min(MAX_FIT_POINTS // 4, every - own))
    second = min(every - own, MAX_FIT_POINTS - first)
    spread = [np.linspace(0, own - 1, first, dtype=np.int64), np.linspace(own, every - 1, second, dtype=np.int64)]
    return torch.from_numpy(np.concatenate(spread))


HYPERPARAMETERS_KEY = "curves:process"  # study system attribute with the fitted hyperparameters
REFIT_GROWTH = 1.15  # relative growth in trials after which hyperparameters are refitted

_STATES = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)


def get_observed_trials(study: optuna.Study, *, exclude: int | None = None) -> list[FrozenTrial]:
    """Return the trials that have reported a value, or have ended without one, except the trial number `exclude`."""
    trials = study._get_trials(deepcopy=False, states=_STATES, use_cache=True)
    return [t for t in select_observed(trials) if t.number != exclude]


def get_unreported_rows(study: optuna.Study, space: Space, *, exclude: int) -> np.ndarray:
    """Return the configurations [n, parameters] of running trials that have not reported a value yet."""
    trials = study._get_trials(deepcopy=False, states=(TrialState.RUNNING,), use_cache=True)
    unreported = [t for t in trials if t.params and t.number != exclude and not t.intermediate_values]
    return np.array([space.to_row(t.params) for t in unreported]).reshape(-1, len(space.names))


def fit_posterior(
    study: optuna.Study, kept: Mapping[str, Any], dataset: GPDataset, trials: int, *, name: str = HYPERPARAMETERS_KEY
) -> Posterior:
    """Return the posterior with the stored hyperparameters; outdated hyperparameters are fitted again and stored.

    Args:
        study: study that stores the hyperparameters.
        kept: value of the system attribute `name`, with the stored hyperparameters; empty if none are stored.
        dataset: the training data.
        trials: current number of trials, which determines whether the hyperparameters are outdated.
        name: name of the study system attribute with the hyperparameters; each metric has its own.
    """
    names, process = dataset.space.names, dataset.prior_process
    if kept.get("names") == names and len(kept["theta"]) == len(process.theta):
        process = replace(process, theta=torch.tensor(kept["theta"], dtype=torch.float64))
    else:
        kept = {}
    if trials >= REFIT_GROWTH * kept.get("trials", 0):
        process = dataset.fit(process)
        fitted: Any = {"names": names, "trials": trials, "theta": process.theta.tolist()}
        study._storage.set_study_system_attr(study._study_id, name, fitted)
    return process.posterior(dataset.points, dataset.scores)


def fantasize_running(
    posterior: Posterior, space: Space, rows: np.ndarray, numbers: np.ndarray, unreported: np.ndarray
) -> Posterior:
    """Return a posterior that treats running trials as if they had ended with their predicted mean.

    Args:
        posterior: posterior of the observations.
        space: search space of the rows.
        rows: configurations of the running trials with observations [n, parameters].
        numbers: index of each of these trials in the dataset [n]; -1 for a trial without points.
        unreported: configurations of the running trials without observations [m, parameters].
    """
    if not len(rows) and not len(unreported):
        return posterior
    apart = [*numbers.tolist(), *range(-2, -2 - len(unreported), -1)]
    return posterior.fantasize(Points.at_final_epoch(space.to_features(np.concatenate([rows, unreported])), apart))
