"""Stop a study when the expected improvement of the rest of its budget is small."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
import torch
from optuna.study import StudyDirection

from hpsearch.search.curves.earlier import EARLIER, Earlier
from hpsearch.search.curves.learning import FITTED, Lesson, parameters, posterior_of, told_trials
from hpsearch.search.curves.points import Seen, least_loss, losses
from hpsearch.search.curves.process import Points, Posterior
from hpsearch.search.curves.space import AROUND, DRAWN, TOPS, Space
from hpsearch.search.samplers.suggest import derive_seed
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import FORESEEN
from hpsearch.storage.trials.budget import GivenUp, give_up

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


FIRST = 20  # trials that have ended, before which nothing is judged; as many as Optuna's terminator waits for
AGAIN = 1.1  # times as many as when it was judged last, from which on it is judged again


class Rest:
    """What a worker knows of the rest of its study's budget.

    Args:
        study: has a `stop_when`.
        sampled: the same as its sampler sees it.
    """

    def __init__(self, study: StoredStudy, sampled: optuna.Study) -> None:
        self._study, self._sampled = study, sampled

    def given_up(self) -> GivenUp | None:
        """Give the rest up where it is expected to gain too little; return what was written, if it was now.

        It is judged by one worker or by another, and by two at once at worst: the first to write has it.
        """
        threshold = self._study.spec.stop_when
        attrs = self._study.attrs
        if threshold is None or GivenUp.of(attrs) is not None:
            return None
        trials = self._study.trials()
        ended = sum(trial.state.is_finished() for trial in trials)
        judged = (attrs.get(FORESEEN) or {}).get("ended", 0)
        if ended < max(FIRST, AGAIN * judged) or (left := self._left(len(trials))) < 1:
            return None
        seed = derive_seed(self._study.spec.seed, "rest", ended)
        self._sampled._thread_local.cached_all_trials = None  # else those of the last suggestion
        spec = self._study.spec
        gain = expected_gain(self._sampled, Left(left, spec.epochs), seed=seed, metric=spec.metric)
        judged_now = {"gain": gain, "ended": ended}
        if gain is not None and gain < threshold:
            engine, study_id = self._study.engine, self._study.study_id
            if given_up := give_up(engine, study_id, gain=gain, threshold=threshold, foreseen=judged_now):
                return given_up
        self._study.set_attr(FORESEEN, judged_now)
        return None

    def _left(self, begun: int) -> float:
        """How many trials are yet to be begun, by the budget that is over first at the pace so far."""
        left = float(self._study.budget - begun)
        if (spending := self._study.spending) is not None and spending.share > 0:
            left = min(left, begun * (1 - spending.share) / spending.share)
        return left
