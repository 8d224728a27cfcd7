"""The `freeze_thaw` sampler with several objectives: expected hypervolume improvement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import optuna
import torch
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpsearch.objectives.model_metric_names import MODEL_METRICS
from hpsearch.search.freeze_thaw.forecast import build_score_table, estimate_tail_slope, score_interval_to_metric
from hpsearch.search.freeze_thaw.forecast_text import SUGGESTION_REASON_KEY
from hpsearch.search.freeze_thaw.gaussian_process import Points, Posterior
from hpsearch.search.freeze_thaw.gp_dataset import (
    HYPERPARAMETERS_KEY,
    GPDataset,
    fantasize_running,
    fit_posterior,
    get_observed_trials,
    get_unreported_rows,
)
from hpsearch.search.freeze_thaw.observations import Observations, read_losses
from hpsearch.search.freeze_thaw.space import TOP_TRIALS, SearchSpace, Space, maximize_acquisition
from hpsearch.storage.attributes import INFEASIBLE, VALUES
from hpsearch.storage.rungs.fronts import find_front, sort_by_front, to_losses


def read_values_by_epoch(trial: FrozenTrial, metrics: int) -> dict[int, list[float]]:
    """Return the values of all metrics of a trial by epoch, from 1; a value that is not stored is NaN."""
    every: Mapping[str, Sequence[float]] = trial.system_attrs.get(VALUES, {})
    found = {step + 1: [first, *[np.nan] * (metrics - 1)] for step, first in trial.intermediate_values.items()}
    return dict(sorted((found | {int(step) + 1: list(values) for step, values in every.items()}).items()))


def track_incumbent(values: Mapping[int, Sequence[float]], maximize: Sequence[bool]) -> dict[int, np.ndarray]:
    """Return, for each epoch, the losses [metrics] at the best epoch so far by the first metric.

    The losses are infinite before the first finite value of the first metric.

    Args:
        values: values of all metrics, by epoch in ascending order.
        maximize: per metric, whether higher values are better.
    """
    found: dict[int, np.ndarray] = {}
    best = np.full(len(maximize), np.inf)
    losses = to_losses(list(values.values()), maximize)
    for epoch, vector in zip(values, losses, strict=True):
        best = vector if vector[0] < best[0] else best
        found[epoch] = best
    return found


def get_objective_vector(trial: FrozenTrial, maximize: Sequence[bool]) -> np.ndarray:
    """Return the losses [metrics] of a trial's best epoch; infinite if the trial diverged or has reported no value.

    Args:
        trial: the trial, from a `SamplerStudyView`.
        maximize: per metric, whether higher values are better.
    """
    values = read_values_by_epoch(trial, len(maximize))
    if trial.user_attrs.get(INFEASIBLE) or not values:
        return np.full(len(maximize), np.inf)
    return track_incumbent(values, maximize)[max(values)]


POSTERIOR_SAMPLES = 256  # number of samples for the Monte Carlo estimate of the hypervolume improvement
_REFERENCE_MARGIN = 0.1  # distance of the reference point from the end of the front, relative to the front's width
_EXTRAPOLATED_SCORES = 4.0  # range of scores beyond the best score for which losses are extrapolated
_OPTIMISM_DEVIATIONS = 2.0  # number of deviations below the predicted mean of an optimistic bound
_STEADY_RATIO = 0.1  # deviation within trials, relative to that between trials, up to which a metric counts as constant


@dataclass(frozen=True)
class MetricModel:
    """Gaussian process of one metric.

    Attributes:
        dataset: the training data.
        row_by_trial: index of each trial in the dataset [trials]; -1 for a trial without a value of this metric.
        posterior: posterior of the Gaussian process.
    """

    dataset: GPDataset
    row_by_trial: np.ndarray
    posterior: Posterior

    def predict_final_epoch(self, space: Space) -> np.ndarray:
        """Return the predicted score of each trial after the last epoch [trials]."""
        mean, _ = self.posterior.predict(Points.at_final_epoch(space.to_features(space.rows), self.row_by_trial))
        return mean.numpy()

    def predict_value(self, at: Points, *, maximize: bool) -> tuple[float, float, float]:
        """Return the predicted value of a single point, and its values one deviation below and above."""
        mean, deviation = self.posterior.predict(at)
        return score_interval_to_metric(self.dataset.observations, mean.item(), deviation.item(), maximize=maximize)


class MultiObjectiveSuggester:
    """Suggestions for multi-objective studies by expected hypervolume improvement.

    Args:
        epochs: number of epochs of a full trial.
        random: random generator.
    """

    def __init__(self, epochs: int, random: np.random.Generator) -> None:
        self._epochs, self._random = epochs, random

    def suggest(self, study: optuna.Study, trial: FrozenTrial, distributions: SearchSpace) -> dict[str, Any]:
        """Return a configuration, and store the reason of the suggestion as an attribute of the trial.

        The configuration is empty while a metric has no observations.
        """
        observed = get_observed_trials(study, exclude=trial.number)
        maximize = [direction == StudyDirection.MAXIMIZE for direction in study.directions]
        metrics = self._fit_models(study, observed, distributions, maximize)
        if not metrics:
            return {}
        space = metrics[0].dataset.space
        predicted = np.column_stack([metric.predict_final_epoch(space) for metric in metrics])
        broken = np.array([get_max_violation(t) for t in observed])
        good = np.array([np.isfinite(get_objective_vector(t, maximize)[0]) for t in observed]) & ~(broken > 0)
        best = predicted[good][find_front(predicted[good])]
        unreported = get_unreported_rows(study, space, exclude=trial.number)
        running = np.array([i for i, t in enumerate(observed) if t.state == TrialState.RUNNING], dtype=np.int64)
        beliefs = [
            fantasize_running(m.posterior, space, space.rows[running], m.row_by_trial[running], unreported)
            for m in metrics
        ]
        feasible = self._fit_feasibility(study, observed, distributions, broken)
        # Trials that this sampler suggested are excluded: they would move the reference point to one end of the front.
        unchosen = [i for i, t in enumerate(observed) if SUGGESTION_REASON_KEY not in t.system_attrs]
        worst = predicted[unchosen or slice(None)].max(0)
        probes: list[torch.Tensor] = []

        def compute_acquisition(rows: np.ndarray) -> np.ndarray:
            at = Points.at_final_epoch(space.to_features(rows))
            expected = [belief.predict(at) for belief in beliefs]
            if not probes:  # the first call evaluates the random candidates, whose predictions determine the bounds
                hoped = [(mean - _OPTIMISM_DEVIATIONS * deviation).min().item() for mean, deviation in expected]
                lowest = np.minimum(np.array(hoped), best.min(0, initial=np.inf))
                probes.extend(map(torch.from_numpy, self._sample_probes(metrics, best, worst, lowest)))
            gain = log_expected_hypervolume_improvement(expected, *probes)
            if feasible is not None:
                mean, deviation = feasible[0].predict(at)
                gain = gain + torch.special.log_ndtr((feasible[1] - mean) / deviation)
            return gain.numpy()

        tops = self._select_tops(predicted, good)
        had = np.concatenate([space.rows, unreported])
        row, top = maximize_acquisition(compute_acquisition, space, self._random, around=space.rows[tops], had=had)
        given = any(not d.single() for d in trial.distributions.values()) or "fixed_params" in trial.system_attrs
        if not given:
            at = Points.at_final_epoch(space.to_features(row[None]))
            bands = [metric.predict_value(at, maximize=each) for metric, each in zip(metrics, maximize, strict=True)]
            near = None if top is None else observed[tops[top]].number
            note: Any = {"foreseen": [b[0] for b in bands], "band": [[*b[1:]] for b in bands], "near": near}
            study._storage.set_trial_system_attr(trial._trial_id, SUGGESTION_REASON_KEY, note)
        return space.to_params(row)

    def _fit_models(
        self, study: optuna.Study, observed: Sequence[FrozenTrial], distributions: SearchSpace, maximize: Sequence[bool]
    ) -> list[MetricModel]:
        """Return the model of each metric; an empty list if a metric has no observations."""
        kept = study._storage.get_study_system_attrs(study._study_id)
        first = [read_losses(t, maximize=maximize[0], epochs=self._epochs) for t in observed]
        others = build_secondary_curves(observed, maximize, self._epochs)
        if not all(any(np.isfinite([*curve.values()]).any() for curve in curves) for curves in (first, *others)):
            return []
        fit = partial(self._fit_model, study, kept, observed, distributions)
        found = [fit(HYPERPARAMETERS_KEY, None, maximize=maximize[0])]
        return found + [fit(f"{HYPERPARAMETERS_KEY}:{index}", curves) for index, curves in enumerate(others, 1)]

    def _fit_model(
        self,
        study: optuna.Study,
        kept: Mapping[str, Any],
        observed: Sequence[FrozenTrial],
        distributions: SearchSpace,
        name: str,
        curves: Sequence[Mapping[int, float]] | None,
        *,
        maximize: bool = False,
    ) -> MetricModel:
        """Return the model of a metric.

        Args:
            study: study of the trials.
            kept: system attributes of the study.
            observed: the observed trials of the study.
            distributions: distributions of the parameters.
            name: name of the study system attribute with the hyperparameters.
            curves: per trial, losses by epoch, empty if unknown; None to use the reported values of the first metric.
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
            is_epoch_invariant=some is not None and all(set(curve) == {self._epochs} for curve in some),
        )
        rows = np.full(len(observed), -1, dtype=np.int64)
        rows[known] = np.arange(len(known))
        return MetricModel(dataset, rows, fit_posterior(study, kept.get(name, {}), dataset, len(observed), name=name))

    def _fit_feasibility(
        self, study: optuna.Study, observed: Sequence[FrozenTrial], distributions: SearchSpace, broken: np.ndarray
    ) -> tuple[Posterior, float] | None:
        """Return the posterior of the largest constraint violation, and the score of a violation of 0.

        None if no trial violates a constraint.
        """
        if not (broken > 0).any():
            return None
        kept = study._storage.get_study_system_attrs(study._study_id)
        curves: list[dict[int, float]] = [{} if np.isnan(by) else {self._epochs: float(by)} for by in broken]
        model = self._fit_model(study, kept, observed, distributions, f"{HYPERPARAMETERS_KEY}:feasible", curves)
        posterior = model.posterior
        scores, seen = build_score_table(model.dataset.observations)
        kept_to = scores[seen <= 0]
        if len(kept_to) == len(scores):  # no finite violation is among the points
            return None
        if not len(kept_to):
            return posterior, float(scores[0]) - 1.0
        return posterior, float((kept_to[-1] + scores[len(kept_to)]) / 2)

    def _sample_probes(
        self, metrics: Sequence[MetricModel], best: np.ndarray, worst: np.ndarray, lowest: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sample score vectors [n, metrics] that the front does not dominate, and their log-weights [n].

        The samples estimate the hypervolume improvement, which is measured in units of the metrics, not in scores.

        Args:
            metrics: model of each metric, which converts scores to units of the metric.
            best: scores on the Pareto front [k, metrics].
            worst: scores of the reference point [metrics]. A score that is not worse than the worst end of the front
                by a margin is replaced by one that is.
            lowest: optimistic lower bound of the score of each metric [metrics].
        """
        if len(best):
            worst = np.maximum(worst, best.max(0) + _REFERENCE_MARGIN * np.ptp(best, axis=0))
        scales = [_extrapolate_score_table(metric.dataset.observations) for metric in metrics]

        def normalize(rows: np.ndarray) -> np.ndarray:
            columns = zip(rows.T, scales, strict=True)
            return np.column_stack([np.interp(column, scores, seen) for column, (scores, seen) in columns])

        low, high = normalize(lowest[None])[0], normalize(worst[None])[0]
        drawn, weights = sample_non_dominated(self._random, normalize(best), low, high, POSTERIOR_SAMPLES)
        columns = zip(drawn.T, scales, strict=True)
        return np.column_stack([np.interp(column, seen, scores) for column, (scores, seen) in columns]), weights

    def _select_tops(self, predicted: np.ndarray, good: np.ndarray) -> list[int]:
        """Return the indices of random trials on the Pareto front; if these are few, also of the next best trials."""
        places = np.flatnonzero(good)
        ordered = [int(places[place]) for place in sort_by_front(predicted[good])]
        within = len(find_front(predicted[good]))
        if within <= TOP_TRIALS:
            return ordered[:TOP_TRIALS]
        return [ordered[int(place)] for place in self._random.permutation(within)[:TOP_TRIALS]]


def _extrapolate_score_table(points: Observations) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and losses, best first; the first entry extrapolates beyond the best score by the tail slope."""
    scores, seen = build_score_table(points)
    better = seen[0] - _EXTRAPOLATED_SCORES * estimate_tail_slope(scores, seen)
    return np.concatenate([[scores[0] - _EXTRAPOLATED_SCORES], scores]), np.concatenate([[better], seen])


def sample_non_dominated(
    random: np.random.Generator, best: np.ndarray, low: np.ndarray, high: np.ndarray, number: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sample vectors [n, metrics] in a box that the front does not dominate, with log-weights [n] by volume.

    All coordinates except one are sampled uniformly, and this one uniformly in the range that the front does not
    dominate. If all coordinates were uniform in the box, more and more samples would be rejected as the front improves.
    The weights correct for the sampling density (balance heuristic, Veach and Guibas 1995).

    Args:
        random: random generator.
        best: the Pareto front [k, metrics]; lower is better.
        low: lower corner of the box [metrics].
        high: upper corner of the box [metrics].
        number: number of samples, of which dominated ones are rejected; each metric is the special coordinate of an
            equal share.
    """
    width = np.maximum(high - low, 0.0)
    drawn = low + width * random.random((number, len(low)))
    for axis in range(len(low)):
        some = drawn[axis :: len(low)]
        some[:, axis] = low[axis] + _front_fraction(best, some, axis, low, high) * (some[:, axis] - low[axis])
    left = np.column_stack([_front_fraction(best, drawn, axis, low, high) for axis in range(len(low))])
    found = (left > 0).all(axis=1)
    if not found.any():
        return low[None], np.zeros(1)
    return drawn[found], -np.log((1 / left[found]).mean(axis=1))


def _front_fraction(best: np.ndarray, drawn: np.ndarray, axis: int, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the fraction of a metric's range in which the front does not dominate a vector, for each vector [n].

    Args:
        best: the Pareto front [k, metrics].
        drawn: vectors [n, metrics]; the coordinate `axis` is not used.
        axis: index of the metric.
        low: lower corner of the box [metrics].
        high: upper corner of the box [metrics]; if the range of the metric is empty, the fraction is 0 or 1.
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
    """Return the logarithm of the expected hypervolume improvement of each candidate [n].

    The improvement is estimated by the total weight of the sampled vectors that a candidate dominates.

    Args:
        expected: per metric, predicted means and deviations of the candidates [n]; lower is better.
        vectors: sampled vectors that the front does not dominate [k, metrics].
        weights: log-weights of the sampled vectors [k].
    """
    found = weights
    for (mean, deviation), bound in zip(expected, vectors.T, strict=True):
        found = found + torch.special.log_ndtr((bound - mean[:, None]) / deviation[:, None])
    return found.logsumexp(1)


def build_secondary_curves(
    trials: Sequence[FrozenTrial], maximize: Sequence[bool], epochs: int
) -> list[list[dict[int, float]]]:
    """Return, for each metric except the first, the losses of each trial by epoch; empty if no value is known.

    The loss at an epoch is the loss at the best epoch so far by the first metric. A metric that does not change during
    training has only one loss per trial, at the last epoch.
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
    """Return whether a metric varies little within a trial, compared with its variation between trials."""
    several = [each for each in curves if len(each) > 1]
    if not several:
        return True
    within = float(np.median([each.std() for each in several]))
    return within <= _STEADY_RATIO * float(np.std([np.median(each) for each in curves if len(each)]))


def get_max_violation(trial: FrozenTrial) -> float:
    """Return the largest constraint violation of a trial; NaN if no violation is known.

    Unless the trial is COMPLETE, only constraints on metrics that training cannot change are used.
    """
    ended = trial.state == TrialState.COMPLETE
    known = {name for name, metric in MODEL_METRICS.items() if metric.is_constant}
    broken = (value for name, value in trial.constraints.items() if ended or name in known)
    return max(broken, default=np.nan)
