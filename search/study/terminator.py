"""Stop a study when the expected improvement of the rest of its budget is small."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
import torch
from optuna.study import StudyDirection

from hpsearch.search.freeze_thaw.gaussian_process import Points, Posterior
from hpsearch.search.freeze_thaw.gp_dataset import (
    HYPERPARAMETERS_KEY,
    GPDataset,
    fit_posterior,
    get_observed_trials,
    merge_distributions,
)
from hpsearch.search.freeze_thaw.observations import Observations, get_loss_bound, read_losses
from hpsearch.search.freeze_thaw.space import NEIGHBORS_PER_TRIAL, RANDOM_CANDIDATES, TOP_TRIALS, Space
from hpsearch.search.freeze_thaw.warm_start import WARM_START_KEY, WarmStartData
from hpsearch.search.samplers.suggest import derive_seed
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import EXPECTED_GAIN
from hpsearch.storage.trials.budget import EarlyStop, stop_early

FUNCTIONS = 500  # samples of the posterior
MOST_BEGUN, MOST_NEW = 50, 250  # limits of the evaluated trials: started ones, and promising new ones
_JITTER = 1e-6
_BEST = 4  # the slope from scores to values is fitted to the best quarter


@dataclass(frozen=True)
class RemainingBudget:
    """The remaining budget of a study.

    Attributes:
        trials: number of trials to start.
        epochs: epochs of a full trial.
    """

    trials: float
    epochs: int


def expected_gain(study: optuna.Study, left: RemainingBudget, *, seed: int, metric: str = "") -> float | None:
    """Return the expected gain of the remaining budget, in the metric's unit; None with too few observations.

    The result is deterministic, given study and seed.

    Args:
        study: the study as its sampler reads it; fitted hyperparameters are stored with it, as by the sampler.
        left: the remaining budget.
        seed: seed of the posterior samples.
        metric: name of the metric; the known bound of a metric limits its gain.
    """
    told, maximize = get_observed_trials(study), study.direction == StudyDirection.MAXIMIZE
    random = np.random.default_rng(seed)
    kept = study._storage.get_study_system_attrs(study._study_id)
    warm_start = WarmStartData.from_json(kept.get(WARM_START_KEY))
    if not (distributions := merge_distributions(told, warm_start)):
        return None
    dataset = GPDataset.from_trials(
        told, distributions, maximize=maximize, epochs=left.epochs, random=random, warm_start=warm_start
    )
    if (slope := _slope(dataset.observations)) is None:
        return None
    curves = [read_losses(t, maximize=maximize, epochs=left.epochs) for t in told]
    posterior = fit_posterior(study, kept.get(HYPERPARAMETERS_KEY, {}), dataset, len(told))
    best = float(dataset.observations.loss.min())
    most = best - get_loss_bound(metric, best, maximize=maximize)
    gain = max(slope * _in_scores(posterior, dataset.space, left.trials, random), _pace(curves, left.trials))
    gain = min(gain, most)
    return gain if math.isfinite(gain) else None


def _in_scores(posterior: Posterior, space: Space, trials: float, random: np.random.Generator) -> float:
    """Return the expected gain of new trials, in normal scores."""
    begun = Points.at_final_epoch(space.to_features(space.rows), np.arange(len(space.rows)))
    order = np.argsort(posterior.predict(begun)[0].numpy(), kind="stable")
    rows = np.concatenate(
        [
            space.sample(random, RANDOM_CANDIDATES),
            space.perturb(random, space.rows[order[:TOP_TRIALS]], 4 * NEIGHBORS_PER_TRIAL),
        ]
    )
    mean, deviation = posterior.predict(Points.at_final_epoch(space.to_features(rows)))
    hopeful = np.argsort((mean - 2 * deviation).numpy(), kind="stable")[:MOST_NEW]
    best = order[:MOST_BEGUN]
    numbers = np.concatenate([best, -2 - np.arange(len(hopeful))])  # each new one is a trial of its own
    features = space.to_features(np.concatenate([space.rows[best], rows[hopeful]]))
    center, factor = _jointly(posterior, Points.at_final_epoch(features, numbers))
    drawn = center + random.standard_normal((FUNCTIONS, len(numbers))) @ factor.T
    gains = np.maximum(drawn[:, : len(best)].min(1)[:, None] - drawn[:, len(best) :], 0.0)
    return float(min(gains.max(1).mean(), trials * gains.mean(0).max()))


def _pace(curves: Sequence[Mapping[int, float]], trials: float) -> float:
    """Return the gain of the later half of the trials, extrapolated per doubling of their number."""
    values = ([loss for loss in curve.values() if not math.isnan(loss)] for curve in curves)
    best = np.array([min(each, default=math.inf) for each in values])
    gained = float(best[: len(best) // 2].min() - best.min())
    return gained * math.log2(1 + trials / len(best))


def _jointly(posterior: Posterior, points: Points) -> tuple[np.ndarray, np.ndarray]:
    """Return the posterior mean at points [n], and the Cholesky factor of its covariance [n, n]."""
    cross = posterior.process.covariance(points, posterior.points)
    white = torch.linalg.solve_triangular(posterior.factor, cross.T, upper=False)
    covariance = posterior.process.covariance(points, points) - white.T @ white
    factor = torch.linalg.cholesky(covariance + _JITTER * torch.eye(len(points.s), dtype=torch.float64))
    return (cross @ posterior.weights).numpy(), factor.numpy()


def _slope(points: Observations) -> float | None:
    """Return the change of the value per normal score among the best trials; None with too few values."""
    finite = np.isfinite(points.loss)
    order = np.argsort(points.loss[finite], kind="stable")
    scores, values = points.scores[finite][order], points.loss[finite][order]
    last = max(len(values) // _BEST, TOP_TRIALS)
    if len(values) <= last:
        return None
    slope = float((values[last] - values[0]) / max(scores[last] - scores[0], 1e-9))
    return slope if math.isfinite(slope) else None


FIRST = 20  # ended trials before the first decision, as in Optuna's terminator
AGAIN = 1.1  # factor on the ended trials between two decisions


class Terminator:
    """Early termination of a study whose remaining budget has a small expected gain.

    Args:
        study: a study with `min_expected_gain`.
        sampled: the same study as its sampler reads it.
    """

    def __init__(self, study: StoredStudy, sampled: optuna.Study) -> None:
        self._study, self._sampled = study, sampled

    def stop_early(self) -> EarlyStop | None:
        """Give the rest up where it is expected to gain too little; return what was written, if it was now.

        If two workers decide at once, the first record counts.
        """
        threshold = self._study.spec.min_expected_gain
        attrs = self._study.attrs
        if threshold is None or EarlyStop.from_attrs(attrs) is not None:
            return None
        trials = self._study.trials()
        ended = sum(trial.state.is_finished() for trial in trials)
        judged = (attrs.get(EXPECTED_GAIN) or {}).get("ended", 0)
        if ended < max(FIRST, AGAIN * judged) or (left := self._left(len(trials))) < 1:
            return None
        seed = derive_seed(self._study.spec.seed, "rest", ended)
        self._sampled._thread_local.cached_all_trials = None  # else those of the last suggestion
        spec = self._study.spec
        gain = expected_gain(self._sampled, RemainingBudget(left, spec.epochs), seed=seed, metric=spec.metric)
        judged_now = {"gain": gain, "ended": ended}
        if gain is not None and gain < threshold:
            engine, study_id = self._study.engine, self._study.study_id
            if given_up := stop_early(engine, study_id, gain=gain, threshold=threshold, foreseen=judged_now):
                return given_up
        self._study.set_attr(EXPECTED_GAIN, judged_now)
        return None

    def _left(self, begun: int) -> float:
        """How many trials are yet to be begun, by the budget that is over first at the pace so far."""
        left = float(self._study.budget - begun)
        if (spending := self._study.spending) is not None and spending.share > 0:
            left = min(left, begun * (1 - spending.share) / spending.share)
        return left
