"""Early termination: stop a study when the expected gain of its remaining budget is small."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
import torch
from optuna.study import StudyDirection

from hpsearch.search.freeze_thaw.forecast import build_score_table
from hpsearch.search.freeze_thaw.gaussian_process import Points, Posterior
from hpsearch.search.freeze_thaw.gp_dataset import (
    HYPERPARAMETERS_KEY,
    GPDataset,
    fit_posterior,
    get_observed_trials,
    merge_distributions,
)
from hpsearch.search.freeze_thaw.metric_bounds import get_loss_bound
from hpsearch.search.freeze_thaw.observations import Observations, read_losses
from hpsearch.search.freeze_thaw.space import NEIGHBORS_PER_TRIAL, RANDOM_CANDIDATES, TOP_TRIALS, Space
from hpsearch.search.freeze_thaw.warm_start import WARM_START_KEY, WarmStartData
from hpsearch.search.samplers.suggest import derive_seed
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import EXPECTED_GAIN
from hpsearch.storage.trials.early_stop import EarlyStop, stop_early

POSTERIOR_SAMPLES = 500
MAX_STARTED, MAX_NEW = 50, 250  # maximum numbers of evaluated trials: started trials, and promising new trials
_JITTER = 1e-6
_BEST_SHARE = 4  # the slope from scores to values is fitted to the best quarter of the trials


@dataclass(frozen=True)
class RemainingBudget:
    """The remaining budget of a study.

    Attributes:
        trials: number of trials that can still start.
        epochs: number of epochs of a complete trial.
    """

    trials: float
    epochs: int


def compute_expected_gain(study: optuna.Study, left: RemainingBudget, *, seed: int, metric: str = "") -> float | None:
    """Return the expected gain of the remaining budget, in the metric's unit; None if there are too few observations.

    The expected gain is the expected improvement of the best value. The result is deterministic for given study and
    seed.

    Args:
        study: Optuna's study object. The fitted hyperparameters of the Gaussian process are stored in the study, as the
            sampler does.
        left: the remaining budget.
        seed: seed of the posterior samples.
        metric: name of the metric. If the metric has a known bound, such as accuracy, the bound limits the gain.
    """
    trials, maximize = get_observed_trials(study), study.direction == StudyDirection.MAXIMIZE
    random = np.random.default_rng(seed)
    attrs = study._storage.get_study_system_attrs(study._study_id)
    warm_start = WarmStartData.from_json(attrs.get(WARM_START_KEY))
    if not (distributions := merge_distributions(trials, warm_start)):
        return None
    dataset = GPDataset.from_trials(
        trials, distributions, maximize=maximize, epochs=left.epochs, random=random, warm_start=warm_start
    )
    if (slope := _fit_slope(dataset.observations)) is None:
        return None
    curves = [read_losses(t, maximize=maximize, epochs=left.epochs) for t in trials]
    posterior = fit_posterior(study, attrs.get(HYPERPARAMETERS_KEY, {}), dataset, len(trials))
    best = float(dataset.observations.loss.min())
    limit = best - get_loss_bound(metric, best, maximize=maximize)
    predicted = slope * _predict_gain_in_scores(posterior, dataset.space, left.trials, random)
    gain = min(max(predicted, _extrapolate_gain(curves, left.trials)), limit)
    return gain if math.isfinite(gain) else None


def _predict_gain_in_scores(posterior: Posterior, space: Space, trials: float, random: np.random.Generator) -> float:
    """Return the expected gain of new trials, in the normal scores to which the Gaussian process is fitted."""
    started = Points.at_final_epoch(space.to_features(space.rows), np.arange(len(space.rows)))
    order = np.argsort(posterior.predict(started)[0].numpy(), kind="stable")
    drawn = space.sample(random, RANDOM_CANDIDATES)
    near = space.perturb(random, space.rows[order[:TOP_TRIALS]], 4 * NEIGHBORS_PER_TRIAL)
    rows = np.concatenate([drawn, near])
    mean, deviation = posterior.predict(Points.at_final_epoch(space.to_features(rows)))
    promising = np.argsort((mean - 2 * deviation).numpy(), kind="stable")[:MAX_NEW]
    best = order[:MAX_STARTED]
    numbers = np.concatenate([best, -2 - np.arange(len(promising))])  # a separate trial number for each new trial
    features = space.to_features(np.concatenate([space.rows[best], rows[promising]]))
    center, factor = _compute_joint_posterior(posterior, Points.at_final_epoch(features, numbers))
    samples = center + random.standard_normal((POSTERIOR_SAMPLES, len(numbers))) @ factor.T
    gains = np.maximum(samples[:, : len(best)].min(1)[:, None] - samples[:, len(best) :], 0.0)
    return float(min(gains.max(1).mean(), trials * gains.mean(0).max()))


def _extrapolate_gain(curves: Sequence[Mapping[int, float]], trials: float) -> float:
    """Extrapolate the gain of new trials from the gain of the second half of the trials, per doubling of the number."""
    values = ([loss for loss in curve.values() if not math.isnan(loss)] for curve in curves)
    best = np.array([min(each, default=math.inf) for each in values])
    gained = float(best[: len(best) // 2].min() - best.min())
    return gained * math.log2(1 + trials / len(best))


def _compute_joint_posterior(posterior: Posterior, points: Points) -> tuple[np.ndarray, np.ndarray]:
    """Return the posterior mean at n points [n], and the Cholesky factor of the posterior covariance [n, n]."""
    cross = posterior.process.covariance(points, posterior.points)
    white = torch.linalg.solve_triangular(posterior.cholesky_factor, cross.T, upper=False)
    covariance = posterior.process.covariance(points, points) - white.T @ white
    factor = torch.linalg.cholesky(covariance + _JITTER * torch.eye(len(points.log_epoch), dtype=torch.float64))
    return (cross @ posterior.weights).numpy(), factor.numpy()


def _fit_slope(points: Observations) -> float | None:
    """Return the change of the value per normal score among the best trials; None if there are too few values."""
    scores, values = build_score_table(points)
    last = max(len(values) // _BEST_SHARE, TOP_TRIALS)
    if len(values) <= last:
        return None
    slope = float((values[last] - values[0]) / max(scores[last] - scores[0], 1e-9))
    return slope if math.isfinite(slope) else None


MIN_ENDED_TRIALS = 20  # number of ended trials before the first decision, as in Optuna's terminator
DECISION_FACTOR = 1.1  # factor by which the number of ended trials grows between two decisions


class Terminator:
    """Early termination of a study whose remaining budget has a small expected gain.

    Args:
        study: a study with `min_expected_gain`.
        sampled: Optuna's study object of the same study, as the sampler reads it.
    """

    def __init__(self, study: StoredStudy, sampled: optuna.Study) -> None:
        self._study, self._sampled = study, sampled

    def stop_early(self) -> EarlyStop | None:
        """Stop the study if the expected gain is below its threshold; return the record if this call stopped the study.

        If two workers stop the study at the same time, only the first record is stored.
        """
        threshold = self._study.spec.min_expected_gain
        if threshold is None or EarlyStop.from_attrs(attrs := self._study.attrs) is not None:
            return None
        trials = self._study.trials()
        ended = sum(trial.state.is_finished() for trial in trials)
        judged = (attrs.get(EXPECTED_GAIN) or {}).get("ended", 0)
        if ended < max(MIN_ENDED_TRIALS, DECISION_FACTOR * judged) or (left := self._estimate_left(len(trials))) < 1:
            return None
        seed = derive_seed(self._study.spec.seed, "rest", ended)
        self._sampled._thread_local.cached_all_trials = None  # the cache has the trials of the last suggestion
        spec = self._study.spec
        gain = compute_expected_gain(self._sampled, RemainingBudget(left, spec.epochs), seed=seed, metric=spec.metric)
        judged_now = {"gain": gain, "ended": ended}
        if gain is not None and gain < threshold:
            engine, study_id = self._study.engine, self._study.study_id
            if early_stop := stop_early(engine, study_id, gain=gain, threshold=threshold, estimate=judged_now):
                return early_stop
        self._study.set_attr(EXPECTED_GAIN, judged_now)
        return None

    def _estimate_left(self, started: int) -> float:
        """Return the number of trials that can still start, given the budget that will be spent first."""
        left = float(self._study.budget - started)
        if (spending := self._study.spending) is not None and spending.spent_fraction > 0:
            left = min(left, started * (1 - spending.spent_fraction) / spending.spent_fraction)
        return left
