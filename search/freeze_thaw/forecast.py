"""Forecast the final values of running and paused trials."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.freeze_thaw.forecast_text import Forecast, can_forecast
from hpsearch.search.freeze_thaw.gp_dataset import GPDataset, merge_distributions, select_observed
from hpsearch.search.freeze_thaw.metric_bounds import get_loss_bound
from hpsearch.search.freeze_thaw.observations import Observations, read_losses


def score_interval_to_metric(
    points: Observations, mean: float, deviation: float, *, maximize: bool
) -> tuple[float, float, float]:
    """Convert the mean of a predicted score, and the bounds of one deviation around the mean, to metric values.

    The conversion interpolates between the scores of observed values, so that no result exceeds the observed range.

    Args:
        points: observations with their losses and scores; at least one loss is finite.
        mean: mean of the predicted score.
        deviation: standard deviation of the predicted score.
        maximize: whether higher metric values are better, so that losses are negated metric values.

    Returns:
        The metric value of the mean, the lower bound and the upper bound.
    """
    middle, one, other = np.interp([mean, mean - deviation, mean + deviation], *build_score_table(points)).tolist()
    if maximize:
        middle, one, other = -middle, -other, -one
    return middle, one, other


def build_score_table(points: Observations) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores and losses of the observations with finite loss, the best observation first."""
    finite = np.isfinite(points.loss)
    order = np.argsort(points.loss[finite], kind="stable")
    return points.scores[finite][order], points.loss[finite][order]


def estimate_tail_slope(scores: np.ndarray, seen: np.ndarray) -> float:
    """Return the slope of loss over score among the best observations, which extrapolates to better scores.

    Args:
        scores: scores [n], the best first.
        seen: observed losses [n] in the same order.
    """
    tail = min(max(3, round(_TAIL_FRACTION * len(seen))), len(seen) - 1)
    apart = scores[tail] - scores[0]
    return float((seen[tail] - seen[0]) / apart) if apart > 0 else 0.0


# Maximum number of trials to forecast: running trials first, then by number of epochs, then by value.
MAX_FORECASTS = 40

# More points per trial than the sampler uses: without the early epochs of promoted trials, forecasts of paused trials
# are too good.
_POINTS_PER_TRIAL = 5

# The interval contains 90 % of a normal distribution. The posterior deviation does not include the uncertainty of the
# hyperparameters, which is large before some trials have ended: without the added uncertainty (in units of the score),
# the interval covered 66 to 85 % of the final values during `asha` searches, on five objectives and three families.
_INTERVAL_DEVIATIONS = 1.645
_HYPERPARAMETER_UNCERTAINTY = 0.7  # added standard deviation before any trial has ended, in units of the score

_TAIL_FRACTION = 0.3  # fraction of the observations, the best ones, whose slope extrapolates to better values


def forecast_final_values(
    trials: Sequence[FrozenTrial], *, epochs: int, maximize: bool, metric: str = "", of: Container[int] | None = None
) -> dict[int, Forecast]:
    """Forecast the final values of at most `MAX_FORECASTS` running and waiting trials.

    The result is bitwise identical for the same trials. The Gaussian process uses at most 600 points, and its
    hyperparameters are fitted on at most 200 of these points. This takes at most about a second.

    Args:
        trials: all trials of the study.
        epochs: number of epochs of a full trial.
        maximize: whether higher values are better.
        metric: name of the metric, which determines the bounds of its values.
        of: numbers of the trials to forecast; None for all unfinished trials.

    Returns:
        The forecasts by trial number; empty before enough trials have reported values. Trials without a finite value
        are omitted.
    """
    if not can_forecast(trials, epochs):
        return {}
    observed = [t for t in select_observed(trials) if t.state != TrialState.FAIL]
    unfinished = _select_unfinished(observed, epochs=epochs, maximize=maximize, of=of)
    distributions = merge_distributions(observed)
    if not unfinished or not distributions:
        return {}
    dataset = GPDataset.from_trials(
        observed,
        distributions,
        maximize=maximize,
        epochs=epochs,
        random=np.random.default_rng(0),
        points_per_trial=_POINTS_PER_TRIAL,
        always=unfinished,
    )
    process = dataset.fit(dataset.prior_process)
    posterior = process.posterior(dataset.points, dataset.scores)
    means, deviations = (found.numpy() for found in posterior.predict(dataset.final_epoch_points.select([*unfinished])))
    noise, ended = process.theta[5].exp().item(), sum(len(t.intermediate_values) >= epochs for t in observed)
    half = _INTERVAL_DEVIATIONS * np.sqrt(deviations**2 + noise + _HYPERPARAMETER_UNCERTAINTY**2 / (1 + ended))
    bound = _get_lower_bound(dataset.observations, metric, maximize=maximize)
    ends = [_scores_to_losses(dataset.observations, scores, bound) for scores in (means, means - half, means + half)]
    found = {}
    for (index, loss), values in zip(unfinished.items(), np.column_stack(ends), strict=True):
        # The final value is never worse than the best value so far.
        value, one, other = (-v if maximize else v for v in np.minimum(values, loss).tolist())
        found[observed[index].number] = Forecast(value, min(one, other), max(one, other))
    return found


def _select_unfinished(
    observed: Sequence[FrozenTrial], *, epochs: int, maximize: bool, of: Container[int] | None
) -> dict[int, float]:
    """Return the best loss so far of each trial to forecast, by the trial's index in `observed`."""
    found = []
    for index, trial in enumerate(observed):
        asked = of is None or trial.number in of
        if asked and not trial.state.is_finished() and max(trial.intermediate_values) + 1 < epochs:
            loss = float(np.nanmin([*read_losses(trial, maximize=maximize, epochs=epochs).values(), np.inf]))
            order = (trial.state != TrialState.RUNNING, -len(trial.intermediate_values), loss, index)
            found += [order] if np.isfinite(loss) else []
    return {index: loss for *_, loss, index in sorted(found)[:MAX_FORECASTS]}


def _scores_to_losses(points: Observations, scores: np.ndarray, least: float) -> np.ndarray:
    """Convert scores [n] to losses [n]; scores better than all observed scores are extrapolated by the tail slope."""
    of_seen, seen = build_score_table(points)
    beyond = estimate_tail_slope(of_seen, seen) * np.minimum(scores - of_seen[0], 0.0)
    found: np.ndarray = np.interp(scores, of_seen, seen) + beyond
    return found.clip(min=least)


def _get_lower_bound(points: Observations, metric: str, *, maximize: bool) -> float:
    """Return a lower bound of the metric's loss, by the metric's name or the observed losses.

    The bound is 0 if no loss is negative, as for most losses. It is -1 if all losses are between -1 and 0, as for an
    accuracy, which is maximized.
    """
    _, seen = build_score_table(points)
    alike = 0.0 if seen[0] >= 0 else -1.0 if seen[0] >= -1 and seen[-1] <= 0 else -np.inf
    return max(alike, get_loss_bound(metric, float(seen[0]), maximize=maximize))
