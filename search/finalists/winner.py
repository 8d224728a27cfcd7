"""Selection of the winner among the finalists, and estimation of the winner's score on new data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpsearch.search.freeze_thaw.metric_bounds import PROPORTION_METRICS, get_metric_bounds
from hpsearch.search.study.ranking import sort_best_first


@dataclass(frozen=True)
class WinnerSelection:
    """Result of comparing finalists on new seeds.

    Attributes:
        winner: number of the finalist with the best mean; None if no finalist is complete.
        tie: numbers of the finalists whose difference to the winner may be chance, best mean first.
        standard_error: standard error of the difference of two means; None if unknown.
        tie_margin: largest difference of two means that is a tie; None if any difference may be chance.
    """

    winner: int | None
    tie: tuple[int, ...]
    standard_error: float | None
    tie_margin: float | None = None


TIE_LEVEL = 0.1  # maximum probability that one of several equal finalists has no tie


def select_winner(values: Mapping[int, Sequence[float]], *, maximize: bool) -> WinnerSelection:
    """Select the finalist with the best mean; among equal means, the finalist with the lowest number.

    Two finalists are tied if a paired t-test does not reject the equality of their means at `TIE_LEVEL`. Finalists and
    seeds form a randomised block design with the seeds as blocks (Box, Hunter and Hunter, *Statistics for
    Experimenters*, 2nd edition, 2005, chapter 4). This design removes the common effect of a seed. The variance is
    pooled over all finalists, because two seeds give a pair of finalists only one degree of freedom. For k finalists
    and s seeds, the degrees of freedom are d = (k - 1) (s - 1), and with the residual variance of `_analyze_variance`,

        error = sqrt(2 residual / s),    margin = error * t(1 - TIE_LEVEL / 2, d)

    With two equal finalists, the better one has no tie with the probability `TIE_LEVEL`. With more finalists, this
    probability is smaller, because the difference of the two best means is smaller than that of an arbitrary pair. With
    one seed, all finalists are tied.

    Args:
        values: per finalist number, one value for each seed, in the same order.
        maximize: whether higher is better.
    """
    from scipy import special

    means = {finalist: statistics.fmean(row) for finalist, row in values.items()}
    ranked = sort_best_first(means, maximize=maximize)
    if not ranked:
        return WinnerSelection(None, (), None)
    seeds = len(values[ranked[0]])
    if len(ranked) < 2 or seeds < 2:
        return WinnerSelection(ranked[0], tuple(ranked[1:]), None)
    found, best = _analyze_variance(list(values.values())), means[ranked[0]]
    error = math.sqrt(2 * found.residual / seeds)
    margin = error * float(special.stdtrit(found.residual_freedom, 1 - TIE_LEVEL / 2))
    tie = tuple(finalist for finalist in ranked[1:] if abs(means[finalist] - best) <= max(margin, math.ulp(best)))
    return WinnerSelection(ranked[0], tie, error, margin)


@dataclass(frozen=True)
class _Variances:
    """Analysis of variance of a table with one row per finalist and one column per seed.

    Attributes:
        residual: variance that is neither an effect of the finalist nor of the seed; 0 with one finalist.
        column: variance of the column means, multiplied by the number of rows.
        residual_freedom, column_freedom: degrees of freedom.
    """

    residual: float
    column: float
    residual_freedom: int
    column_freedom: int


def _analyze_variance(table: Sequence[Sequence[float]]) -> _Variances:
    """Return the variances of a table with at least two columns.

    With k rows and s columns, where r_ij is the residual after subtraction of the row effect and the column effect, and
    c_j is the column effect,

        residual = sum r_ij^2 / ((k - 1) (s - 1)),    column = k sum c_j^2 / (s - 1)
    """
    rows, columns = len(table), len(table[0])
    row_means = [statistics.fmean(row) for row in table]
    mean = statistics.fmean(row_means)
    effects = [statistics.fmean(column) - mean for column in zip(*table, strict=True)]
    residuals = [value - row_means[i] - effects[j] for i, row in enumerate(table) for j, value in enumerate(row)]
    freedom = (rows - 1) * (columns - 1)
    return _Variances(
        residual=math.fsum(residual**2 for residual in residuals) / freedom if freedom else 0.0,
        column=rows * math.fsum(effect**2 for effect in effects) / (columns - 1),
        residual_freedom=freedom,
        column_freedom=columns - 1,
    )


COVERAGE = 0.9  # probability that the prediction interval contains the test score


@dataclass(frozen=True)
class RunScore:
    """Score of one run of a finalist.

    Attributes:
        value: value of the metric.
        standard_error: standard error of the value from the validation samples; None if unknown.
        train_size, val_size, test_size: numbers of training, validation and test samples.
        has_new_split: whether the run had its own, new train/validation split.
    """

    value: float
    standard_error: float | None
    train_size: int
    val_size: int
    test_size: int
    has_new_split: bool = True


@dataclass(frozen=True)
class ExpectedScore:
    """Expected score on new data.

    Attributes:
        mean: expected score, which is the winner's mean corrected for selection bias.
        low, high: bounds of the prediction interval, which contains the test score with probability `COVERAGE`.
    """

    mean: float
    low: float
    high: float


def read_run_score(value: float, record: Mapping[str, Any] | None) -> RunScore | None:
    """Return the score of a run from its stored record; None if `record` is None or damaged."""
    if record is None:
        return None
    try:
        train, val, test = map(int, record["sizes"])
        error = None if record["error"] is None else float(record["error"])
        if min(train, val, test) < 1 or not (error is None or 0 <= error < math.inf):
            return None
        return RunScore(value, error, train, val, test, bool(record["divided"]))
    except (KeyError, TypeError, ValueError, OverflowError):  # every worker's database role can write the record
        return None


def estimate_test_score(
    runs: Mapping[int, Sequence[RunScore]],
    choice: WinnerSelection,
    *,
    metric: str,
    maximize: bool,
    bounds: tuple[float, float] | None = None,
) -> ExpectedScore | None:
    """Estimate the test score of the model that the search trained for the winner.

    The winner's mean is the best of several means and therefore biased. The best linear unbiased prediction (Henderson
    1975, *Biometrics* 31) shrinks this mean towards the mean of all finalists. With E the squared error of a mean, and
    B the variance of the means of all finalists, the distance of the winner's mean from the mean of all finalists is
    multiplied by

        max(0, 1 - E / B)

    The prediction error has three sources: the variation between runs, the finite number of validation samples, and the
    finite test set. The model itself is one run. With

    - s: number of runs of a finalist,
    - w: variance of the winner's runs. All finalists have the same splits, so w has a part that is common to all k
      finalists. With the variances of `_analyze_variance`, w = column / k + residual (k - 1) / k. Deviations of other
      finalists are first multiplied by the ratio of the winner's noise to theirs, see `_get_noise_scales`,
    - b: standard error of a run from its v validation samples; b^2 is the mean over all runs of all finalists, after
      the same multiplication,
    - f = v / n: share of samples that two new validation splits have in common, where n is the number of training
      samples, from which new validation splits are drawn; 1 if `data()` fixes the split. The formula assumes that a
      shared sample has the same effect on all runs, which gives an upper bound of the variance,
    - t: number of test samples; v, n and t are those of the winner's first run,

    the variance of the prediction is

        run = max(w - (1 - f) b^2, 0),    variance = w / s + f b^2 + run + b^2 v / t

    The interval has the quantiles of Student's t distribution. Its degrees of freedom are those of both parts of w,
    weighted by their shares of the variance (Satterthwaite 1946, *Biometrics Bulletin* 2). A part contributes 1 / s of
    itself, and 1 more if run is positive.

    If the metric has two bounds, the interval has the quantiles of the beta distribution between these bounds with this
    mean, and a variance that gives intervals of the same width in the middle of the range. A single bound cuts the
    interval.

    Args:
        runs: per finalist number, the scores of its runs; all finalists have the same number of runs.
        choice: the winner, and the standard error of the difference of two means.
        metric: name of the metric.
        maximize: whether higher is better.
        bounds: smallest and largest value of the metric; None uses the known bounds of the metric with this name. These
            are ignored if a mean is outside of them, because a user's metric may have another range.

    Returns:
        The expected score; None with one run per finalist, or if the error from the validation samples is unknown,
        because the interval would be too narrow.
    """
    from scipy import special

    if choice.winner is None or len(runs[choice.winner]) < 2:
        return None
    own, seeds = runs[choice.winner], len(runs[choice.winner])
    means = {number: statistics.fmean(run.value for run in row) for number, row in runs.items()}
    least, most = bounds or get_metric_bounds(metric)
    if bounds is None and not all(least <= value <= most for value in means.values()):
        least, most = -math.inf, math.inf
    errors = {
        number: [error for run in row if (error := _get_run_error(run, metric, maximize=maximize)) is not None]
        for number, row in runs.items()
    }
    if not any(errors.values()):
        return None
    mean = _shrink_mean(list(means.values()), means[choice.winner], choice.standard_error)
    scales = _get_noise_scales(
        {**means, choice.winner: mean}, errors, (least, most), own[0].val_size, maximize=maximize
    )
    ratios = {number: scales[choice.winner] / scale for number, scale in scales.items()}
    sampling = statistics.fmean((error * ratios[number]) ** 2 for number, row in errors.items() for error in row)
    found = _analyze_variance([[run.value * ratios[number] for run in row] for number, row in runs.items()])
    column, residual = found.column / len(runs), found.residual * (len(runs) - 1) / len(runs)
    within = column + residual
    shared = min(own[0].val_size / own[0].train_size, 1.0) if own[0].has_new_split else 1.0
    run = max(within - (1 - shared) * sampling, 0.0)
    variance = within / seeds + shared * sampling + run + sampling * own[0].val_size / own[0].test_size
    weight = 1 / seeds + (1 if run else 0)
    uncertainty = (weight * column) ** 2 / found.column_freedom
    if residual:
        uncertainty += (weight * residual) ** 2 / found.residual_freedom
    probability = (1 + COVERAGE) / 2
    normal = float(special.ndtri(probability))
    quantile = float(special.stdtrit(variance**2 / uncertainty, probability)) if uncertainty else normal
    reach = quantile * math.sqrt(variance)
    if math.isfinite(most - least):
        scale = most - least
        low, high = _make_proportion_interval((mean - least) / scale, reach / normal / scale, own)
        return ExpectedScore(mean, min(least + scale * low, mean), max(least + scale * high, mean))
    return ExpectedScore(mean, max(mean - reach, least), min(mean + reach, most))


def _make_proportion_interval(mean: float, deviation: float, runs: Sequence[RunScore]) -> tuple[float, float]:
    """Return the quantiles of the beta distribution with this mean and standard deviation.

    The mean is at most (v + 1) / (v + 2) for v validation samples, and correspondingly for 0 (Laplace's rule of
    succession), because a beta distribution has no mean of 0 or 1.
    """
    from scipy import special

    least = 1 / (runs[0].val_size + 2)
    center = min(max(mean, least), 1 - least)
    largest = center * (1 - center)  # of the variance of a distribution between 0 and 1
    total = largest / min(deviation**2, 0.999 * largest) - 1
    low, high = special.betaincinv(center * total, (1 - center) * total, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return round(float(low), 9), round(float(high), 9)  # 5e-104 is shown as 0


def _get_noise_scales(
    means: Mapping[int, float],
    errors: Mapping[int, Sequence[float]],
    bounds: tuple[float, float],
    val_size: int,
    *,
    maximize: bool,
) -> dict[int, float]:
    """Return per finalist a number that is proportional to the standard deviation of its runs.

    The closer a score is to its best possible value, the less it varies. The number is

    - for a metric between two bounds: the standard deviation of a proportion, sqrt(p (1 - p)). As in
      `_make_proportion_interval`, p is not closer to a bound than 1 / (val_size + 2).
    - for a metric that is bounded at the best possible value only, such as R2 or a squared error: the distance to this
      bound, but at least the root mean square of the standard errors
    - for other metrics: 1
    """
    low, high = bounds
    best = high if maximize else low
    if math.isfinite(high - low):
        least = 1 / (val_size + 2)
        shares = {number: min(max((mean - low) / (high - low), least), 1 - least) for number, mean in means.items()}
        return {number: math.sqrt(share * (1 - share)) for number, share in shares.items()}
    if math.isfinite(best):
        least = math.sqrt(statistics.fmean(error**2 for row in errors.values() for error in row))
        return {number: max(abs(best - mean), least) for number, mean in means.items()}
    return dict.fromkeys(means, 1.0)


def _get_run_error(run: RunScore, metric: str, *, maximize: bool) -> float | None:
    """Return the standard error of a run from its validation samples; it is positive even if all resamples are equal.

    If all resamples are equal, the stored error is 0. Then a metric that is a proportion p of n samples gets the error
    of the proportion (n p + 1) / (n + 2) (Laplace's rule of succession), and the error of any other metric is unknown.
    """
    if run.standard_error is None or run.standard_error > 0:
        return run.standard_error
    if metric not in PROPORTION_METRICS or not maximize or not 0 <= run.value <= 1:
        return None
    share = (run.value * run.val_size + 1) / (run.val_size + 2)
    return math.sqrt(share * (1 - share) / run.val_size)


def _shrink_mean(means: Sequence[float], best: float, error: float | None) -> float:
    """Return the best mean, corrected for its selection bias: it is shrunk towards the mean of all finalists."""
    if error is None or not (variance := statistics.variance(means)):
        return best
    factor, center = max(0.0, 1 - (error**2 / 2) / variance), statistics.fmean(means)
    return center + factor * (best - center)
