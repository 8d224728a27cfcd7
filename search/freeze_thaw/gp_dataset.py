"""Fit the hyperparameters of the learning-curve model."""

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

MAX_FIT_POINTS = 200  # points that hyperparameters are fitted on, at most


def select_observed(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """The trials that have reported something, or ended before they could."""
    return [t for t in trials if t.params and (t.intermediate_values or t.state.is_finished())]


def merge_distributions(
    trials: Iterable[FrozenTrial], warm_start: WarmStartData | None = None
) -> dict[str, BaseDistribution]:
    """All parameters of trials, as the last had it, and of earlier studies; those of one value alone are none."""
    found = {} if warm_start is None else {name: d for name, d in warm_start.distributions.items() if not d.single()}
    return found | {name: d for trial in trials for name, d in trial.distributions.items() if not d.single()}


@dataclass(frozen=True)
class GPDataset:
    """What a process learns from: points of a space, and their scores.

    Attributes:
        space: of the trials' parameters; a row for each trial.
        observations: the points of the trials, by index of the trial.
        rows: of the trials, then of those of earlier studies [trials, parameters].
        points: of the trials, then of those of earlier studies, with the features of their configurations.
        scores: of the points [n].
        steady: whether they are taken for those of configurations, whatever the trial and the epoch.
    """

    space: Space
    observations: Observations
    rows: np.ndarray
    points: Points
    scores: Tensor
    steady: bool = False

    @classmethod
    def from_trials(  # noqa: PLR0913 what a dataset depends on
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
        steady: bool = False,
    ) -> GPDataset:
        """Of trials that are `known`.

        Args:
            trials: of the study.
            distributions: of the parameters that matter, see `parameters`; some.
            maximize: whether higher values are better.
            epochs: of a full trial.
            random: chooses where there are too many points.
            points_per_trial, always: see `seen`.
            warm_start: trials of earlier studies.
            curves: of each trial, the losses by epoch, from 1, that are learnt as they are; None for those that the
                trials have reported, of which the best so far counts.
            steady: whether they are points at the last epoch that depend on the configuration alone.
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
        # Of earlier studies those of the most telling trials, as many as there is room for.
        others = [(i, s, score, t.study) for i, t in enumerate(warm_start.trials, len(trials)) for s, score in t.points]
        others = others[: MAX_POINTS - len(found.s)]
        trial, s, their_scores, study = np.array(others, dtype=np.float64).reshape(len(others), 4).T
        trial = np.concatenate([found.trial, trial.astype(np.int64)])
        study = np.concatenate([np.zeros_like(found.trial), study.astype(np.int64)])
        columns = (space.to_features(rows)[trial], np.concatenate([found.s, s]), trial, study)
        scores = torch.from_numpy(np.concatenate([found.scores, their_scores]))
        return cls(space, found, rows, Points(*map(torch.from_numpy, columns)), scores, steady)

    @property
    def final_epoch_points(self) -> Points:
        """The trials after their last epoch; those of earlier studies as if they were run in this one."""
        own = len(self.space.rows)
        numbers = np.concatenate([np.arange(own), np.full(len(self.rows) - own, -1)])
        return Points.at_final_epoch(self.space.to_features(self.rows), numbers)

    @property
    def prior_process(self) -> GaussianProcess:
        """What is expected before anything is seen."""
        return GaussianProcess.from_prior(
            self.space.feature_to_parameter, several=bool(self.points.study.any()), steady=self.steady
        )

    def fit(self, process: GaussianProcess) -> GaussianProcess:
        """A process fitted to some of the points, sought from its hyperparameters on."""
        part = _select_fit_points(len(self.observations.s), len(self.scores))
        return process.fit(self.points.select(part), self.scores[part])


def _select_fit_points(own: int, every: int) -> Tensor:
    """The points that are fitted on: own ones, but for a quarter where earlier studies have as many."""
    first = min(own, MAX_FIT_POINTS - min(MAX_FIT_POINTS // 4, every - own))
    second = min(every - own, MAX_FIT_POINTS - first)
    spread = [np.linspace(0, own - 1, first, dtype=np.int64), np.linspace(own, every - 1, second, dtype=np.int64)]
    return torch.from_numpy(np.concatenate(spread))


HYPERPARAMETERS_KEY = "curves:process"  # the study's system attribute with the hyperparameters that were fitted last
REFIT_GROWTH = 1.15  # times the trials of the last fit, from which on they are old

_STATES = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)


def get_observed_trials(study: optuna.Study, *, exclude: int | None = None) -> list[FrozenTrial]:
    """The trials that have reported something, or ended before they could."""
    trials = study._get_trials(deepcopy=False, states=_STATES, use_cache=True)
    return [t for t in select_observed(trials) if t.number != exclude]


def get_unreported_rows(study: optuna.Study, space: Space, *, exclude: int) -> np.ndarray:
    """The configurations [n, parameters] of trials that run and have reported nothing yet."""
    trials = study._get_trials(deepcopy=False, states=(TrialState.RUNNING,), use_cache=True)
    unreported = [t for t in trials if t.params and t.number != exclude and not t.intermediate_values]
    return np.array([space.to_row(t.params) for t in unreported]).reshape(-1, len(space.names))


def load_or_fit_posterior(
    study: optuna.Study, kept: Mapping[str, Any], dataset: GPDataset, trials: int, *, name: str = HYPERPARAMETERS_KEY
) -> Posterior:
    """What the points show, by hyperparameters of the study's; fitted here when those are old.

    Args:
        study: where they are kept.
        kept: what was kept last, by the same name.
        dataset: the points.
        trials: how many there are by now.
        name: of the system attribute; each metric has its own.
    """
    names, process = dataset.space.names, dataset.prior_process
    if kept.get("names") == names and len(kept["theta"]) == len(process.theta):
        process = GaussianProcess(
            process.feature_to_parameter, torch.tensor(kept["theta"], dtype=torch.float64), process.steady
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
    """As if trials that run had ended as is foreseen.

    Args:
        posterior: what is known.
        space: whose rows follow.
        rows: of trials that have reported something [n, parameters].
        numbers: of these trials among the points [n]; -1 for one that has none.
        unreported: rows of others [m, parameters].
    """
    if not len(rows) and not len(unreported):
        return posterior
    apart = [*numbers.tolist(), *range(-2, -2 - len(unreported), -1)]
    return posterior.fantasize(Points.at_final_epoch(space.to_features(np.concatenate([rows, unreported])), apart))
