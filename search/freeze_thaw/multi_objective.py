"""The `freeze_thaw` sampler with several objectives: expected hypervolume improvement."""

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

from hpsearch.objectives.model_metrics import MODEL_METRICS
from hpsearch.search.freeze_thaw.forecast import (
    SUGGESTION_REASON_KEY,
    build_score_table,
    estimate_tail_slope,
    score_interval_to_metric,
)
from hpsearch.search.freeze_thaw.gaussian_process import Points, Posterior
from hpsearch.search.freeze_thaw.gp_dataset import (
    HYPERPARAMETERS_KEY,
    GPDataset,
    fantasize_running,
    get_observed_trials,
    get_unreported_rows,
    load_or_fit_posterior,
)
from hpsearch.search.freeze_thaw.observations import Observations, read_losses
from hpsearch.search.freeze_thaw.space import TOP_TRIALS, Space, maximize_acquisition
from hpsearch.storage.attributes import INFEASIBLE, RANK_CONSTRAINT, VALUES
from hpsearch.storage.rungs.fronts import find_front, sort_by_front, to_losses


def read_values_by_epoch(trial: FrozenTrial, metrics: int) -> dict[int, list[float]]:
    """All values of a trial by epoch, from 1; NaN where only those of the first metric are known."""
    every: Mapping[str, Sequence[float]] = trial.system_attrs.get(VALUES, {})
    found = {step + 1: [first, *[np.nan] * (metrics - 1)] for step, first in trial.intermediate_values.items()}
    return dict(sorted((found | {int(step) + 1: list(values) for step, values in every.items()}).items()))


def track_incumbent(values: Mapping[int, Sequence[float]], maximize: Sequence[bool]) -> dict[int, np.ndarray]:
    """What a trial was worth after each epoch, as losses [metrics]; infinite where no first value was a number.

    Args:
        values: of all metrics, by epoch in ascending order.
        maximize: of each metric, whether higher values are better.
    """
    found: dict[int, np.ndarray] = {}
    best = np.full(len(maximize), np.inf)
    losses = to_losses(list(values.values()), maximize)
    for epoch, vector in zip(values, losses, strict=True):
        best = vector if vector[0] < best[0] else best
        found[epoch] = best
    return found


def get_objective_vector(trial: FrozenTrial, maximize: Sequence[bool]) -> np.ndarray:
    """What a trial is worth by now, as losses [metrics]; of one that has diverged, or reported nothing, infinite ones.

    Args:
        trial: as samplers are shown it.
        maximize: of each metric, whether higher values are better.
    """
    values = read_values_by_epoch(trial, len(maximize))
    if trial.user_attrs.get(INFEASIBLE) or not values:
        return np.full(len(maximize), np.inf)
    return track_incumbent(values, maximize)[max(values)]


SAMPLED_VECTORS = 256  # that no trial dominates, by which is told what is gained
_REFERENCE_MARGIN = 0.1  # of the front's width, by which the worst that counts is worse than its end
_EXTRAPOLATED_SCORES = 4.0  # scores beyond the best one, up to which better values are told by the slope
_OPTIMISM_DEVIATIONS = 2.0  # deviations by which a configuration may turn out better than is foreseen
_STEADY_RATIO = 0.1  # of a metric's deviation between trials, up to which that within one is noise


@dataclass(frozen=True)
class MetricModel:
    """What is known of a metric.

    Attributes:
        dataset: what its process learns from.
        rows: index of each trial among the dataset's; -1 for one of which it does not know this metric.
        posterior: of the process.
    """

    dataset: GPDataset
    rows: np.ndarray
    posterior: Posterior

    def predict_final_epoch(self, space: Space) -> np.ndarray:
        """What is foreseen of the trials, in scores [trials]."""
        mean, _ = self.posterior.predict(Points.at_final_epoch(space.to_features(space.rows), self.rows))
        return mean.numpy()


class MultiObjectiveSuggester:
    """Suggests configurations of a study of several metrics."""

    def __init__(self, epochs: int, random: np.random.Generator) -> None:
        self._epochs, self._random = epochs, random

    def suggest(
        self, study: optuna.Study, trial: FrozenTrial, distributions: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The configuration of a trial, noted why it was chosen; none while nothing is known of a metric."""
        observed = get_observed_trials(study, exclude=trial.number)
        maximize = [direction == StudyDirection.MAXIMIZE for direction in study.directions]
        metrics = self._metrics(study, observed, distributions, maximize)
        if not metrics:
            return {}
        space = metrics[0].dataset.space
        foreseen = np.column_stack([metric.predict_final_epoch(space) for metric in metrics])
        broken = np.array([get_max_violation(t) for t in observed])
        good = np.array([np.isfinite(get_objective_vector(t, maximize)[0]) for t in observed]) & ~(broken > 0)
        best = foreseen[good][find_front(foreseen[good])]
        unreported = get_unreported_rows(study, space, exclude=trial.number)
        running = np.array([i for i, t in enumerate(observed) if t.state == TrialState.RUNNING], dtype=np.int64)
        beliefs = [
            fantasize_running(m.posterior, space, space.rows[running], m.rows[running], unreported) for m in metrics
        ]
        feasible = self._feasibility(study, observed, distributions, broken)
        # Those that were chosen would draw the worst that counts after them, to one end of the front.
        unchosen = [i for i, t in enumerate(observed) if SUGGESTION_REASON_KEY not in t.system_attrs]
        worst = foreseen[unchosen or slice(None)].max(0)
        probes: list[torch.Tensor] = []

        def acquisition(rows: np.ndarray) -> np.ndarray:
            at = Points.at_final_epoch(space.to_features(rows))
            expected = [belief.predict(at) for belief in beliefs]
            if not probes:  # of those at random, which come first
                hoped = [(mean - _OPTIMISM_DEVIATIONS * deviation).min().item() for mean, deviation in expected]
                lowest = np.minimum(np.array(hoped), best.min(0, initial=np.inf))
                probes.extend(map(torch.from_numpy, self._undominated(metrics, best, worst, lowest)))
            gain = log_expected_hypervolume_improvement(expected, *probes)
            if feasible is not None:
                mean, deviation = feasible[0].predict(at)
                gain = gain + torch.special.log_ndtr((feasible[1] - mean) / deviation)
            return gain.numpy()

        tops = self._tops(foreseen, good)
        had = np.concatenate([space.rows, unreported])
        row, top = maximize_acquisition(acquisition, space, self._random, around=space.rows[tops], had=had)
        given = any(not d.single() for d in trial.distributions.values()) or "fixed_params" in trial.system_attrs
        if not given:
            at = Points.at_final_epoch(space.to_features(row[None]))
            bands = [
                score_interval_to_metric(
                    m.dataset.observations, *(found.item() for found in m.posterior.predict(at)), maximize=higher
                )
                for m, higher in zip(metrics, maximize, strict=True)
            ]
            near = None if top is None else observed[tops[top]].number
            note: Any = {"foreseen": [b[0] for b in bands], "band": [[*b[1:]] for b in bands], "near": near}
            study._storage.set_trial_system_attr(trial._trial_id, SUGGESTION_REASON_KEY, note)
        return space.to_params(row)

    def _metrics(
        self,
        study: optuna.Study,
        observed: Sequence[FrozenTrial],
        distributions: dict[str, BaseDistribution],
        maximize: Sequence[bool],
    ) -> list[MetricModel]:
        """Each with the hyperparameters that are kept by its own name; none where of one nothing is known."""
        kept = study._storage.get_study_system_attrs(study._study_id)
        first = [read_losses(t, maximize=maximize[0], epochs=self._epochs) for t in observed]
        others = build_secondary_curves(observed, maximize, self._epochs)
        if not all(any(np.isfinite([*curve.values()]).any() for curve in curves) for curves in (first, *others)):
            return []
        learnt = partial(self._learnt, study, kept, observed, distributions)
        found = [learnt(HYPERPARAMETERS_KEY, None, maximize=maximize[0])]
        return found + [learnt(f"{HYPERPARAMETERS_KEY}:{index}", curves) for index, curves in enumerate(others, 1)]

    def _learnt(
        self,
        study: optuna.Study,
        kept: Mapping[str, Any],
        observed: Sequence[FrozenTrial],
        distributions: dict[str, BaseDistribution],
        name: str,
        curves: Sequence[Mapping[int, float]] | None,
        *,
        maximize: bool = False,
    ) -> MetricModel:
        """Return what trials tell of a metric.

        Args:
            study: of the trials.
            kept: the study's system attributes.
            observed: the trials.
            distributions: of their parameters.
            name: of the system attribute with the hyperparameters.
            curves: of each trial, the losses by epoch, empty if unknown; None for the reported values.
            maximize: whether higher reported values are better.
        """
        known = [i for i in range(len(observed)) if curves is None or curves[i]]
        some = None if curves is None else [curves[i] for i in known]
        dataset = GPDataset.from_trials(
            [observed[i] for i in known],
            distributions,
            maximize=maximize,
            epochs=self._epochs,
            random=self._random,
            curves=some,
            steady=some is not None and all(set(curve) == {self._epochs} for curve in some),
        )
        rows = np.full(len(observed), -1, dtype=np.int64)
        rows[known] = np.arange(len(known))
        return MetricModel(
            dataset, rows, load_or_fit_posterior(study, kept.get(name, {}), dataset, len(observed), name=name)
        )

    def _feasibility(
        self,
        study: optuna.Study,
        observed: Sequence[FrozenTrial],
        distributions: dict[str, BaseDistribution],
        broken: np.ndarray,
    ) -> tuple[Posterior, float] | None:
        """What is known of how much constraints are broken, and the score up to which none is; None where none was."""
        if not (broken > 0).any():
            return None
        kept = study._storage.get_study_system_attrs(study._study_id)
        curves: list[dict[int, float]] = [{} if np.isnan(by) else {self._epochs: float(by)} for by in broken]
        learnt = self._learnt(study, kept, observed, distributions, f"{HYPERPARAMETERS_KEY}:feasible", curves)
        posterior = learnt.posterior
        scores, seen = build_score_table(learnt.dataset.observations)
        kept_to = scores[seen <= 0]
        if len(kept_to) == len(scores):  # none of the few that break one is among the points, or all do so infinitely
            return None
        if not len(kept_to):
            return posterior, float(scores[0]) - 1.0
        return posterior, float((kept_to[-1] + scores[len(kept_to)]) / 2)

    def _undominated(
        self, metrics: Sequence[MetricModel], best: np.ndarray, worst: np.ndarray, lowest: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Vectors of scores [n, metrics] that the front does not dominate, and the logarithm of what each stands for.

        Args:
            metrics: whose units the volume is in.
            best: the front [k, metrics].
            worst: that counts in each metric, and beyond the front's ends.
            lowest: that may be hoped for in each metric.
        """
        if len(best):
            worst = np.maximum(worst, best.max(0) + _REFERENCE_MARGIN * np.ptp(best, axis=0))
        scales = [_extrapolate_score_table(metric.dataset.observations) for metric in metrics]

        def in_units(rows: np.ndarray) -> np.ndarray:
            columns = zip(rows.T, scales, strict=True)
            return np.column_stack([np.interp(column, scores, seen) for column, (scores, seen) in columns])

        low, high = in_units(lowest[None])[0], in_units(worst[None])[0]
        drawn, weights = sample_non_dominated(self._random, in_units(best), low, high, SAMPLED_VECTORS)
        columns = zip(drawn.T, scales, strict=True)
        return np.column_stack([np.interp(column, seen, scores) for column, (scores, seen) in columns]), weights

    def _tops(self, foreseen: np.ndarray, good: np.ndarray) -> list[int]:
        """Some of the trials in the front, whichever; where they are few the next best too."""
        places = np.flatnonzero(good)
        ordered = [int(places[place]) for place in sort_by_front(foreseen[good])]
        within = len(find_front(foreseen[good]))
        if within <= TOP_TRIALS:
            return ordered[:TOP_TRIALS]
        return [ordered[int(place)] for place in self._random.permutation(within)[:TOP_TRIALS]]


def _extrapolate_score_table(points: Observations) -> tuple[np.ndarray, np.ndarray]:
    """Scores and the losses that they stand for, the best first; of what is better yet, by the slope of the best."""
    scores, seen = build_score_table(points)
    better = seen[0] - _EXTRAPOLATED_SCORES * estimate_tail_slope(scores, seen)
    return np.concatenate([[scores[0] - _EXTRAPOLATED_SCORES], scores]), np.concatenate([[better], seen])


def sample_non_dominated(
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
        some[:, axis] = low[axis] + _get_non_dominated_fraction(best, some, axis, low, high) * (
            some[:, axis] - low[axis]
        )
    left = np.column_stack([_get_non_dominated_fraction(best, drawn, axis, low, high) for axis in range(len(low))])
    found = (left > 0).all(axis=1)
    if not found.any():
        return low[None], np.zeros(1)
    return drawn[found], -np.log((1 / left[found]).mean(axis=1))


def _get_non_dominated_fraction(
    best: np.ndarray, drawn: np.ndarray, axis: int, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
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


def log_expected_hypervolume_improvement(
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


def build_secondary_curves(
    trials: Sequence[FrozenTrial], maximize: Sequence[bool], epochs: int
) -> list[list[dict[int, float]]]:
    """Losses of each trial in each metric but the first, by epoch; none where it is not known.

    They are those of the epoch that the first metric found best up to there. Of a metric that is steady they are one
    number, known of the last epoch as soon as of the first.
    """
    every = [read_values_by_epoch(t, len(maximize)) for t in trials]
    found = []
    for index in range(1, len(maximize)):
        flat = [to_losses(list(v.values()), maximize)[:, index] if v else np.empty(0) for v in every]
        flat = [each[np.isfinite(each)] for each in flat]
        if _is_steady(flat):
            found.append([{epochs: float(np.median(each))} if len(each) else {} for each in flat])
            continue
        paths = [track_incumbent(v, maximize) for v in every]
        found.append([{e: float(x[index]) for e, x in each.items() if np.isfinite(x[index])} for each in paths])
    return found


def _is_steady(curves: Sequence[np.ndarray]) -> bool:
    """Whether a metric hardly changes within a trial, beside how much it does from one to another."""
    several = [each for each in curves if len(each) > 1]
    if not several:
        return True
    within = float(np.median([each.std() for each in several]))
    return within <= _STEADY_RATIO * float(np.std([np.median(each) for each in curves if len(each)]))


def get_max_violation(trial: FrozenTrial) -> float:
    """By how much a trial breaks the constraint that it breaks most; NaN where none is known.

    Of one that was not trained to its end what training may change is not known: a bound that it breaks it may come
    to keep.
    """
    ended = trial.state == TrialState.COMPLETE
    place = RANK_CONSTRAINT.partition(":")[2]
    known = {name for name, metric in MODEL_METRICS.items() if metric.is_constant}
    broken = (value for name, value in trial.constraints.items() if name != place and (ended or name in known))
    return max(broken, default=np.nan)
