"""What the rest of a search can be expected to gain: the larger of what the process foresees, and what the pace says.

The process: ends of new trials, and of those that were begun, are drawn together; what is gained is the difference of
the best ones, if the search finds the best configuration, and no more than so many trials as are left gain each at
most. A process that has seen few trials is too sure of itself; hence the pace: a search that gained so much while the
number of its trials doubled is not over when they double again. Optuna's terminator (after Makarova et al. 2022) bounds
the regret by complete trials, and by parameters that all of them have: where most are pruned, and parameters depend on
others, it has little to go by; and it is deprecated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
import torch
from optuna.study import StudyDirection

from hpsearch.search.curves.bounds import least_loss
from hpsearch.search.curves.candidates import AROUND, DRAWN, TOPS
from hpsearch.search.curves.earlier import EARLIER, Earlier
from hpsearch.search.curves.fitting import FITTED, posterior_of, told_trials
from hpsearch.search.curves.learning import Lesson, parameters
from hpsearch.search.curves.points import Seen, losses
from hpsearch.search.curves.process import Points, Posterior
from hpsearch.search.curves.space import Space

FUNCTIONS = 500  # drawn from the process
MOST_BEGUN, MOST_NEW = 50, 250  # trials that they are looked at: the best that were begun, and hopeful new ones
_JITTER = 1e-6
_BEST = 4  # the slope from scores to values is that of the best one in so many


@dataclass(frozen=True)
class Left:
    """What a study has left.

    Attributes:
        trials: to be begun.
        epochs: of a full trial.
    """

    trials: float
    epochs: int


def expected_gain(study: optuna.Study, left: Left, *, seed: int, metric: str = "") -> float | None:
    """What the rest is expected to gain, in the metric's unit; None where too little is known.

    The same study and seed give the same.

    Args:
        study: as its sampler sees it; the process's hyperparameters are kept with it, as the sampler's are.
        left: of its budget.
        seed: of what is drawn.
        metric: its name; of some it is known how good they can be, and no more than that is gained.
    """
    told, maximize = told_trials(study), study.direction == StudyDirection.MAXIMIZE
    random = np.random.default_rng(seed)
    kept = study._storage.get_study_system_attrs(study._study_id)
    earlier = Earlier.read(kept.get(EARLIER))
    if not (distributions := parameters(told, earlier)):
        return None
    lesson = Lesson.of(told, distributions, maximize=maximize, epochs=left.epochs, random=random, earlier=earlier)
    if (slope := _slope(lesson.seen)) is None:
        return None
    curves = [losses(t, maximize=maximize, epochs=left.epochs) for t in told]
    posterior = posterior_of(study, kept.get(FITTED, {}), lesson, len(told))
    best = float(lesson.seen.loss.min())
    most = best - least_loss(metric, best, maximize=maximize)
    gain = max(slope * _in_scores(posterior, lesson.space, left.trials, random), _pace(curves, left.trials))
    gain = min(gain, most)
    return gain if math.isfinite(gain) else None


def _in_scores(posterior: Posterior, space: Space, trials: float, random: np.random.Generator) -> float:
    """What is foreseen, in normal scores."""
    begun = Points.at_the_end(space.features(space.rows), np.arange(len(space.rows)))
    order = np.argsort(posterior.at(begun)[0].numpy(), kind="stable")
    rows = np.concatenate([space.drawn(random, DRAWN), space.near(random, space.rows[order[:TOPS]], 4 * AROUND)])
    mean, deviation = posterior.at(Points.at_the_end(space.features(rows)))
    hopeful = np.argsort((mean - 2 * deviation).numpy(), kind="stable")[:MOST_NEW]
    best = order[:MOST_BEGUN]
    numbers = np.concatenate([best, -2 - np.arange(len(hopeful))])  # each new one is a trial of its own
    features = space.features(np.concatenate([space.rows[best], rows[hopeful]]))
    center, factor = _jointly(posterior, Points.at_the_end(features, numbers))
    drawn = center + random.standard_normal((FUNCTIONS, len(numbers))) @ factor.T
    gains = np.maximum(drawn[:, : len(best)].min(1)[:, None] - drawn[:, len(best) :], 0.0)
    return float(min(gains.max(1).mean(), trials * gains.mean(0).max()))


def _pace(curves: Sequence[Mapping[int, float]], trials: float) -> float:
    """What the later half of the trials gained, for as often as their number is yet to double."""
    values = ([loss for loss in curve.values() if not math.isnan(loss)] for curve in curves)
    best = np.array([min(each, default=math.inf) for each in values])
    gained = float(best[: len(best) // 2].min() - best.min())
    return gained * math.log2(1 + trials / len(best))


def _jointly(posterior: Posterior, points: Points) -> tuple[np.ndarray, np.ndarray]:
    """The mean of what is true at points [n], and a factor of its covariance [n, n]."""
    cross = posterior.process.covariance(points, posterior.points)
    white = torch.linalg.solve_triangular(posterior.factor, cross.T, upper=False)
    covariance = posterior.process.covariance(points, points) - white.T @ white
    factor = torch.linalg.cholesky(covariance + _JITTER * torch.eye(len(points.s), dtype=torch.float64))
    return (cross @ posterior.weights).numpy(), factor.numpy()


def _slope(points: Seen) -> float | None:
    """By how much values change with the score among the best; None where there are too few values."""
    finite = np.isfinite(points.loss)
    order = np.argsort(points.loss[finite], kind="stable")
    scores, values = points.scores[finite][order], points.loss[finite][order]
    last = max(len(values) // _BEST, TOPS)
    if len(values) <= last:
        return None
    slope = float((values[last] - values[0]) / max(scores[last] - scores[0], 1e-9))
    return slope if math.isfinite(slope) else None
