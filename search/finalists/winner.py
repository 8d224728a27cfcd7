"""Selection of the winner among the finalists, and estimation of the winner's score on new data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpsearch.search.freeze_thaw.observations import PROPORTION_METRICS, get_loss_bound
from hpsearch.search.study.ranking import sort_best_first


@dataclass(frozen=True)
class WinnerSelection:
    """Result of comparing finalists on new seeds.

    Attributes:
        winner: number of the finalist with the best mean; None if no finalist is complete.
        tie: numbers of the finalists within one standard error of the winner, best mean first.
        standard_error: standard error of the difference of two means; None if unknown.
    """

    winner: int | None
    tie: tuple[int, ...]
    standard_error: float | None


def select_winner(values: Mapping[int, Sequence[float]], *, maximize: bool) -> WinnerSelection:
    """Select the finalist with the best mean; among equal means, the finalist with the lowest number.

    Two finalists are tied if their means differ by at most one standard error of the difference (the one-standard-error
    rule of Breiman et al., *Classification and Regression Trees*, 1984, section 3.4.3). Finalists and seeds form a
    randomised block design with the seeds as blocks (Box, Hunter and Hunter, *Statistics for Experimenters*, 2nd
    edition, 2005, chapter 4). This design removes the common effect of a seed. The variance is pooled over all
    finalists, because two seeds give a pair of finalists only one degree of freedom. There are k finalists and s seeds,
    and r_ij is the residual of finalist i on seed j after subtraction of the finalist effect and the seed effect:

        variance = sum r_ij^2 / ((k - 1) (s - 1)),    error = sqrt(2 variance / s)

    For k = 2, this is the standard error of the paired t-test. With one seed, the error is unknown, and only equal
    values are tied.

    Args:
        values: per finalist number, one value for each seed, in the same order.
        maximize: whether higher is better.
    """
    means = {finalist: statistics.fmean(row) for finalist, row in values.items()}
    ranked = sort_best_first(means, maximize=maximize)
    if not ranked:
        return WinnerSelection(None, (), None)
    error, best = _get_difference_error(list(values.values())), means[ranked[0]]
    near = math.ulp(best) if error is None else error
    tie = tuple(finalist for finalist in ranked[1:] if abs(means[finalist] - best) <= near)
    return WinnerSelection(ranked[0], tie, error)


def _get_difference_error(table: Sequence[Sequence[float]]) -> float | None:
    """Return the standard error of the difference of two row means, with the columns as blocks."""
    rows, columns = len(table), len(table[0])
    if rows < 2 or columns < 2:
        return None
    of_row = [statistics.fmean(row) for row in table]
    of_column = [statistics.fmean(column) for column in zip(*table, strict=True)]
    mean = statistics.fmean(of_row)
    residuals = [value - of_row[i] - of_column[j] + mean for i, row in enumerate(table) for j, value in enumerate(row)]
    variance = math.fsum(residual**2 for residual in residuals) / ((rows - 1) * (columns - 1))
    return math.sqrt(2 * variance / columns)


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
    """Return the score of a run from its stored record; None if `record` is None."""
    if record is None:
        return None
    train, val, test = record["sizes"]
    return RunScore(value, record["error"], train, val, test, record["divided"])


def estimate_test_score(
    runs: Mapping[int, Sequence[RunScore]], choice: WinnerSelection, *, metric: str, maximize: bool
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
    - w: variance of the runs about their mean, pooled over finalists,
    - b: standard error of a run from its v validation samples,
    - f = v / n: share of samples that two new validation splits have in common, where n is the number of training
      samples, from which new validation splits are drawn; 1 if `data()` fixes the split,
    - t: number of test samples,

    the variance of the prediction is

        run = max(w - (1 - f) b^2, 0),    variance = w / s + f b^2 + run + b^2 v / t

    The interval has the quantiles of Student's t distribution. The degrees of freedom are those of w, corrected for the
    share of w in the variance (Satterthwaite 1946, *Biometrics Bulletin* 2).

    Args:
        runs: per finalist number, the scores of its runs; all finalists have the same number of runs.
        choice: the winner, and the standard error of the difference of two means.
        metric: name of the metric, which determines the bounds of the interval.
        maximize: whether higher is better.

    Returns:
        The expected score; None if the error from the validation samples is unknown, because the interval would be too
        narrow without this error.
    """
    from scipy import stats

    known = [_get_run_error(run, metric, maximize=maximize) for row in runs.values() for run in row]
    errors = [error for error in known if error is not None]
    if choice.winner is None or not errors:
        return None
    own, seeds = runs[choice.winner], len(runs[choice.winner])
    means = {number: statistics.fmean(run.value for run in row) for number, row in runs.items()}
    mean = _shrink_mean(list(means.values()), means[choice.winner], choice.standard_error)
    freedom, sampling = len(runs) * (seeds - 1), statistics.fmean(error**2 for error in errors)
    squares = math.fsum((run.value - means[number]) ** 2 for number, row in runs.items() for run in row)
    within = squares / freedom if freedom else 0.0
    shared = min(own[0].val_size / own[0].train_size, 1.0) if own[0].has_new_split else 1.0
    run = max(within - (1 - shared) * sampling, 0.0)
    variance = within / seeds + shared * sampling + run + sampling * own[0].val_size / own[0].test_size
    uncertain = within / seeds + (within if run else 0.0)
    quantile = stats.norm.ppf((1 + COVERAGE) / 2)
    if uncertain:
        quantile = stats.t.ppf((1 + COVERAGE) / 2, freedom * (variance / uncertain) ** 2)
    reach, sign = float(quantile) * math.sqrt(variance), -1.0 if maximize else 1.0
    least = get_loss_bound(metric, min(sign * value for value in means.values()), maximize=maximize)
    low, high = sorted((sign * max(sign * mean - reach, least), sign * (sign * mean + reach)))
    return ExpectedScore(mean, max(low, 0.0) if metric in PROPORTION_METRICS else low, high)


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
