"""Training data of the learning-curve Gaussian process, and the fit of its hyperparameters."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
import torch
from optuna.distributions import BaseDistribution
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
from hpsearch.search.freeze_thaw.space import Space
from hpsearch.search.freeze_thaw.warm_start import WarmStartData

MAX_FIT_POINTS = 200  # for the fit of the hyperparameters


def select_observed(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """Return the trials that reported a value, or ended before they could."""
    return [t for t in trials if t.params and (t.intermediate_values or t.state.is_finished())]


def merge_distributions(
    trials: Iterable[FrozenTrial], warm_start: WarmStartData | None = None
) -> dict[str, BaseDistribution]:
    """Return the latest distribution of each parameter of the trials and earlier studies, without single-value ones."""
    found = {} if warm_start is None else {name: d for name, d in warm_start.distributions.items() if not d.single()}
    return found | {name: d for trial in trials for name, d in trial.distributions.items() if not d.single()}


@dataclass(frozen=True)
class GPDataset:
    """Training data of a Gaussian process: points in a search space, and their scores.

    Attributes:
        space: search space of the trials' parameters, with one row per trial.
        observations: observations of the trials, by trial index.
        rows: encoded trials of the study, then of earlier studies [trials, parameters].
        points: points of the study's trials, then of earlier studies.
        scores: normal scores of the points [n].
        is_epoch_invariant: whether the scores depend on the configuration alone, not on trial and epoch.
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
        distributions: dict[str, BaseDistribution],
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
            warm_start: trials of earlier studies.
            curves: per trial, losses by epoch, from 1, used as they are; None for the reported values, of which
                the best so far counts.
            is_epoch_invariant: whether all points are at the last epoch and depend on the configuration alone.
        """
        warm_start = warm_start or WarmStartData()
        space = Space(distributions, [t.params for t in trials], warm_start.sampled)
        so_far = curves is None
        curves = [read_losses(t, maximize=maximize, epochs=epochs) for t in trials] if curves is None else curves
        found = select_observations(
            curves, epochs, random, points_per_trial=points_per_trial, always=always, so_far=so_far
        )
        theirs = np.array([space.to_row(t.params) for t in warm_start.trials]).reshape(-1, len(space.names))
        rows = np.concatenate([space.rows, theirs])
        # Earlier studies fill the remaining room, most informative trials first.
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
        """The points of all trials at the last epoch; trials of earlier studies count as trials of this one."""
        own = len(self.space.rows)
        numbers = np.concatenate([np.arange(own), np.full(len(self.rows) - own, -1)])
        return Points.at_final_epoch(self.space.to_features(self.rows), numbers)

    @property
    def prior_process(self) -> GaussianProcess:
        """The Gaussian process with the prior means of its hyperparameters."""
        return GaussianProcess.from_prior(
            self.space.feature_owner,
            multi_study=bool(self.points.study.any()),
            is_epoch_invariant=self.is_epoch_invariant,
        )

    def fit(self, process: GaussianProcess) -> GaussianProcess:
        """Fit the hyperparameters on a subset of the points, starting from those of `process`."""
        part = _select_fit_points(len(self.observations.log_epoch), len(self.scores))
        return process.fit(self.points.select(part), self.scores[part])


def _select_fit_points(own: int, every: int) -> Tensor:
    """Return the indices to fit on; a quarter is reserved for earlier studies if they have as many points."""
    first = min(own, MAX_FIT_POINTS - min(MAX_FIT_POINTS // 4, every - own))
    second = min(every - own, MAX_FIT_POINTS - first)
    spread = [np.linspace(0, own - 1, first, dtype=np.int64), np.linspace(own, every - 1, second, dtype=np.int64)]
    return torch.from_numpy(np.concatenate(spread))


HYPERPARAMETERS_KEY = "curves:process"  # study system attribute with the fitted hyperparameters
REFIT_GROWTH = 1.15  # relative growth in trials after which hyperparameters are refitted

_STATES = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)


def get_observed_trials(study: optuna.Study, *, exclude: int | None = None) -> list[FrozenTrial]:
    """Return the trials of a study that reported a value, or ended before they could, except number `exclude`."""
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
    """Return the posterior with the stored hyperparameters; refit and store them if they are outdated.

    Args:
        study: study that stores the hyperparameters.
        kept: stored hyperparameters under `name`; empty if there are none.
        dataset: the training data.
        trials: current number of trials.
        name: system attribute of the hyperparameters; one per metric.
    """
    names, process = dataset.space.names, dataset.prior_process
    if kept.get("names") == names and len(kept["theta"]) == len(process.theta):
        process = GaussianProcess(
            process.feature_owner, torch.tensor(kept["theta"], dtype=torch.float64), process.is_epoch_invariant
        )
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
    """Condition the posterior on running trials, as if they had ended with their predicted mean.

    Args:
        posterior: posterior of the observations.
        space: search space of the rows.
        rows: running trials with observations [n, parameters].
        numbers: index of these trials in the dataset [n]; -1 if they have no points.
        unreported: running trials without observations [m, parameters].
    """
    if not len(rows) and not len(unreported):
        return posterior
    apart = [*numbers.tolist(), *range(-2, -2 - len(unreported), -1)]
    return posterior.fantasize(Points.at_final_epoch(space.to_features(np.concatenate([rows, unreported])), apart))
