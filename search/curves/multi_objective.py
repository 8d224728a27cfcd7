"""The `curves` sampler with several objectives: expected hypervolume improvement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import optuna
import torch
from optuna.distributions import BaseDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpsearch.objectives.measured import MEASURED
from hpsearch.search.curves.forecast import CHOSEN, band, scale, slope
from hpsearch.search.curves.learning import FITTED, Lesson, believing, posterior_of, silent_rows, told_trials
from hpsearch.search.curves.points import Seen, losses
from hpsearch.search.curves.process import Points, Posterior
from hpsearch.search.curves.space import TOPS, Space, best_candidate
from hpsearch.storage.attributes import INFEASIBLE, PLACE, VALUES
from hpsearch.storage.rungs.fronts import front, losses_of, order


def values_by_epoch(trial: FrozenTrial, metrics: int) -> dict[int, list[float]]:
    """All values of a trial by epoch, from 1; NaN where only those of the first metric are known."""
    every: Mapping[str, Sequence[float]] = trial.system_attrs.get(VALUES, {})
    found = {step + 1: [first, *[np.nan] * (metrics - 1)] for step, first in trial.intermediate_values.items()}
    return dict(sorted((found | {int(step) + 1: list(values) for step, values in every.items()}).items()))


def path(values: Mapping[int, Sequence[float]], maximize: Sequence[bool]) -> dict[int, np.ndarray]:
    """What a trial was worth after each epoch, as losses [metrics]; infinite where no first value was a number.

    Args:
        values: of all metrics, by epoch in ascending order.
        maximize: of each metric, whether higher values are better.
    """
    found: dict[int, np.ndarray] = {}
    best = np.full(len(maximize), np.inf)
    losses = losses_of(list(values.values()), maximize)
    for epoch, vector in zip(values, losses, strict=True):
        best = vector if vector[0] < best[0] else best
        found[epoch] = best
    return found


def worth(trial: FrozenTrial, maximize: Sequence[bool]) -> np.ndarray:
    """What a trial is worth by now, as losses [metrics]; of one that has diverged, or reported nothing, infinite ones.

    Args:
        trial: as samplers are shown it.
        maximize: of each metric, whether higher values are better.
    """
    values = values_by_epoch(trial, len(maximize))
    if trial.user_attrs.get(INFEASIBLE) or not values:
        return np.full(len(maximize), np.inf)
    return path(values, maximize)[max(values)]


VECTORS = 256  # that no trial dominates, by which is told what is gained
_BEYOND = 0.1  # of the front's width, by which the worst that counts is worse than its end
_FAR = 4.0  # scores beyond the best one, up to which better values are told by the slope
_HOPE = 2.0  # deviations by which a configuration may turn out better than is foreseen
_STEADY = 0.1  # of a metric's deviation between trials, up to which that within one is noise


@dataclass(frozen=True)
class Metric:
    """What is known of a metric.

    Attributes:
        lesson: what its process learns from.
        rows: index of each trial among the lesson's; -1 for one of which it does not know this metric.
        posterior: of the process.
    """

    lesson: Lesson
    rows: np.ndarray
    posterior: Posterior

    def at_the_end(self, space: Space) -> np.ndarray:
        """What is foreseen of the trials, in scores [trials]."""
        mean, _ = self.posterior.at(Points.at_the_end(space.features(space.rows), self.rows))
        return mean.numpy()


class Several:
    """Suggests configurations of a study of several metrics."""

    def __init__(self, epochs: int, random: np.random.Generator) -> None:
        self._epochs, self._random = epochs, random

    def suggested(
        self, study: optuna.Study, trial: FrozenTrial, distributions: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The configuration of a trial, noted why it was chosen; none while nothing is known of a metric."""
        told = told_trials(study, but=trial.number)
        maximize = [direction == StudyDirection.MAXIMIZE for direction in study.directions]
        metrics = self._metrics(study, told, distributions, maximize)
        if not metrics:
            return {}
        space = metrics[0].lesson.space
        foreseen = np.column_stack([metric.at_the_end(space) for metric in metrics])
        broken = np.array([violation(t) for t in told])
        good = np.array([np.isfinite(worth(t, maximize)[0]) for t in told]) & ~(broken > 0)
        best = foreseen[good][front(foreseen[good])]
        silent = silent_rows(study, space, but=trial.number)
        running = np.array([i for i, t in enumerate(told) if t.state == TrialState.RUNNING], dtype=np.int64)
        beliefs = [believing(m.posterior, space, space.rows[running], m.rows[running], silent) for m in metrics]
        feasible = self._feasibility(study, told, distributions, broken)
        # Those that were chosen would draw the worst that counts after them, to one end of the front.
        unchosen = [i for i, t in enumerate(told) if CHOSEN not in t.system_attrs]
        worst = foreseen[unchosen or slice(None)].max(0)
        probes: list[torch.Tensor] = []

        def judged(rows: np.ndarray) -> np.ndarray:
            at = Points.at_the_end(space.features(rows))
            expected = [belief.at(at) for belief in beliefs]
            if not probes:  # of those at random, which come first
                hoped = [(mean - _HOPE * deviation).min().item() for mean, deviation in expected]
                lowest = np.minimum(np.array(hoped), best.min(0, initial=np.inf))
                probes.extend(map(torch.from_numpy, self._undominated(metrics, best, worst, lowest)))
            gain = log_improvement(expected, *probes)
            if feasible is not None:
                mean, deviation = feasible[0].at(at)
                gain = gain + torch.special.log_ndtr((feasible[1] - mean) / deviation)
            return gain.numpy()

        tops = self._tops(foreseen, good)
        had = np.concatenate([space.rows, silent])
        row, top = best_candidate(judged, space, self._random, around=space.rows[tops], had=had)
        given = any(not d.single() for d in trial.distributions.values()) or "fixed_params" in trial.system_attrs
        if not given:
            at = Points.at_the_end(space.features(row[None]))
            bands = [
                band(m.lesson.seen, *(found.item() for found in m.posterior.at(at)), maximize=higher)
                for m, higher in zip(metrics, maximize, strict=True)
            ]
            near = None if top is None else told[tops[top]].number
            note: Any = {"foreseen": [b[0] for b in bands], "band": [[*b[1:]] for b in bands], "near": near}
            study._storage.set_trial_system_attr(trial._trial_id, CHOSEN, note)
        return space.params(row)

    def _metrics(
        self,
        study: optuna.Study,
        told: Sequence[FrozenTrial],
        distributions: dict[str, BaseDistribution],
        maximize: Sequence[bool],
    ) -> list[Metric]:
        """Each with the hyperparameters that are kept by its own name; none where of one nothing is known."""
        kept = study._storage.get_study_system_attrs(study._study_id)
        first = [losses(t, maximize=maximize[0], epochs=self._epochs) for t in told]
        others = others_by_epoch(told, maximize, self._epochs)
        if not all(any(np.isfinite([*curve.values()]).any() for curve in curves) for curves in (first, *others)):
            return []
        learnt = partial(self._learnt, study, kept, told, distributions)
        found = [learnt(FITTED, None, maximize=maximize[0])]
        return found + [learnt(f"{FITTED}:{index}", curves) for index, curves in enumerate(others, 1)]

    def _learnt(
        self,
        study: optuna.Study,
        kept: Mapping[str, Any],
        told: Sequence[FrozenTrial],
        distributions: dict[str, BaseDistribution],
        name: str,
        curves: Sequence[Mapping[int, float]] | None,
        *,
        maximize: bool = False,
    ) -> Metric:
        """Return what trials tell of a metric.

        Args:
            study: of the trials.
            kept: the study's system attributes.
            told: the trials.
            distributions: of their parameters.
            name: of the system attribute with the hyperparameters.
            curves: of each trial, the losses by epoch, empty if unknown; None for the reported values.
            maximize: whether higher reported values are better.
        """
        known = [i for i in range(len(told)) if curves is None or curves[i]]
        some = None if curves is None else [curves[i] for i in known]
        lesson = Lesson.of(
            [told[i] for i in known],
            distributions,
            maximize=maximize,
            epochs=self._epochs,
            random=self._random,
            curves=some,
            steady=some is not None and all(set(curve) == {self._epochs} for curve in some),
        )
        rows = np.full(len(told), -1, dtype=np.int64)
        rows[known] = np.arange(len(known))
        return Metric(lesson, rows, posterior_of(study, kept.get(name, {}), lesson, len(told), name=name))

    def _feasibility(
        self,
        study: optuna.Study,
        told: Sequence[FrozenTrial],
        distributions: dict[str, BaseDistribution],
        broken: np.ndarray,
    ) -> tuple[Posterior, float] | None:
        """What is known of how much constraints are broken, and the score up to which none is; None where none was."""
        if not (broken > 0).any():
            return None
        kept = study._storage.get_study_system_attrs(study._study_id)
        curves: list[dict[int, float]] = [{} if np.isnan(by) else {self._epochs: float(by)} for by in broken]
        learnt = self._learnt(study, kept, told, distributions, f"{FITTED}:feasible", curves)
        posterior = learnt.posterior
        scores, seen = scale(learnt.lesson.seen)
        kept_to = scores[seen <= 0]
        if len(kept_to) == len(scores):  # none of the few that break one is among the points, or all do so infinitely
            return None
        if not len(kept_to):
            return posterior, float(scores[0]) - 1.0
        return posterior, float((kept_to[-1] + scores[len(kept_to)]) / 2)

    def _undominated(
        self, metrics: Sequence[Metric], best: np.ndarray, worst: np.ndarray, lowest: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Vectors of scores [n, metrics] that the front does not dominate, and the logarithm of what each stands for.

        Args:
            metrics: whose units the volume is in.
            best: the front [k, metrics].
            worst: that counts in each metric, and beyond the front's ends.
            lowest: that may be hoped for in each metric.
        """
        if len(best):
            worst = np.maximum(worst, best.max(0) + _BEYOND * np.ptp(best, axis=0))
        scales = [_beyond(metric.lesson.seen) for metric in metrics]

        def in_units(rows: np.ndarray) -> np.ndarray:
            columns = zip(rows.T, scales, strict=True)
            return np.column_stack([np.interp(column, scores, seen) for column, (scores, seen) in columns])

        low, high = in_units(lowest[None])[0], in_units(worst[None])[0]
        drawn, weights = undominated(self._random, in_units(best), low, high, VECTORS)
        columns = zip(drawn.T, scales, strict=True)
        return np.column_stack([np.interp(column, seen, scores) for column, (scores, seen) in columns]), weights

    def _tops(self, foreseen: np.ndarray, good: np.ndarray) -> list[int]:
        """Some of the trials in the front, whichever; where they are few the next best too."""
        places = np.flatnonzero(good)
        ordered = [int(places[place]) for place in order(foreseen[good])]
        within = len(front(foreseen[good]))
        if within <= TOPS:
            return ordered[:TOPS]
        return [ordered[int(place)] for place in self._random.permutation(within)[:TOPS]]


def _beyond(points: Seen) -> tuple[np.ndarray, np.ndarray]:
    """Scores and the losses that they stand for, the best first; of what is better yet, by the slope of the best."""
    scores, seen = scale(points)
    better = seen[0] - _FAR * slope(scores, seen)
    return np.concatenate([[scores[0] - _FAR], scores]), np.concatenate([[better], seen])


def undominated(
    random: np.random.Generator, best: np.ndarray, low: np.ndarray, high: np.ndarray, number: int
) -> tuple[np.ndarray, np.ndarray]:
    """Vectors [n, metrics] between `low` and `high` that a front does not dominate, and log-weights [n] by volume.

    All but one of a vector's values are drawn evenly, and that one evenly from what the front leaves of it: of vectors
    that are drawn evenly from the whole box fewer are left as the front gets better, and in the end none. Each weighs
    as it is rare among all that are drawn so (the balance heuristic of Veach and Guibas 1995).

    Args:
        random: draws them.
        best: the front [k, metrics], lower is better.
        low, high: ends of the box [metrics].
        number: of vectors, a share of them along each metric.
    """
    width = np.maximum(high - low, 0.0)
    drawn = low + width * random.random((number, len(low)))
    for axis in range(len(low)):
        some = drawn[axis :: len(low)]
        some[:, axis] = low[axis] + _left(best, some, axis, low, high) * (some[:, axis] - low[axis])
    left = np.column_stack([_left(best, drawn, axis, low, high) for axis in range(len(low))])
    found = (left > 0).all(axis=1)
    if not found.any():
        return low[None], np.zeros(1)
    return drawn[found], -np.log((1 / left[found]).mean(axis=1))


def _left(best: np.ndarray, drawn: np.ndarray, axis: int, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The share [n] of a metric's range that the front does not dominate, beside the other values of vectors.

    Of a range without width, all or nothing.
    """
    others = np.arange(len(low)) != axis
    dominating = (best[:, others] <= drawn[:, None, others]).all(axis=2)
    bound = np.where(dominating, best[:, axis], np.inf).min(axis=1, initial=np.inf)
    if high[axis] <= low[axis]:
        return np.where(bound > low[axis], 1.0, 0.0)
    share: np.ndarray = (bound.clip(low[axis], high[axis]) - low[axis]) / (high[axis] - low[axis])
    return share


def log_improvement(
    expected: Sequence[tuple[torch.Tensor, torch.Tensor]], vectors: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The logarithm of how much of what vectors stand for is dominated, in expectation [n].

    Args:
        expected: means and deviations [n] of each metric, lower is better.
        vectors: that are to be dominated [k, metrics].
        weights: logarithms of what they stand for [k].
    """
    found = weights
    for (mean, deviation), bound in zip(expected, vectors.T, strict=True):
        found = found + torch.special.log_ndtr((bound - mean[:, None]) / deviation[:, None])
    return found.logsumexp(1)


def others_by_epoch(
    trials: Sequence[FrozenTrial], maximize: Sequence[bool], epochs: int
) -> list[list[dict[int, float]]]:
    """Losses of each trial in each metric but the first, by epoch; none where it is not known.

    They are those of the epoch that the first metric found best up to there. Of a metric that is steady they are one
    number, known of the last epoch as soon as of the first.
    """
    every = [values_by_epoch(t, len(maximize)) for t in trials]
    found = []
    for index in range(1, len(maximize)):
        flat = [losses_of(list(v.values()), maximize)[:, index] if v else np.empty(0) for v in every]
        flat = [each[np.isfinite(each)] for each in flat]
        if _is_steady(flat):
            found.append([{epochs: float(np.median(each))} if len(each) else {} for each in flat])
            continue
        paths = [path(v, maximize) for v in every]
        found.append([{e: float(x[index]) for e, x in each.items() if np.isfinite(x[index])} for each in paths])
    return found


def _is_steady(curves: Sequence[np.ndarray]) -> bool:
    """Whether a metric hardly changes within a trial, beside how much it does from one to another."""
    several = [each for each in curves if len(each) > 1]
    if not several:
        return True
    within = float(np.median([each.std() for each in several]))
    return within <= _STEADY * float(np.std([np.median(each) for each in curves if len(each)]))


def violation(trial: FrozenTrial) -> float:
    """By how much a trial breaks the constraint that it breaks most; NaN where none is known.

    Of one that was not trained to its end what training may change is not known: a bound that it breaks it may come
    to keep.
    """
    ended = trial.state == TrialState.COMPLETE
    place = PLACE.partition(":")[2]
    known = {name for name, measured in MEASURED.items() if measured.settled}
    broken = (value for name, value in trial.constraints.items() if name != place and (ended or name in known))
    return max(broken, default=np.nan)
