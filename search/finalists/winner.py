"""The winner among the finalists, and its expected score on new data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpsearch.search.freeze_thaw.observations import PROPORTION_METRICS, get_loss_bound
from hpsearch.search.study.ranking import best_first


@dataclass(frozen=True)
class WinnerSelection:
    """Result of comparing finalists on new seeds.

    Attributes:
        winner: number of the finalist with the best mean; None if there is none.
        tie: finalists within one standard error of the winner, better mean first.
        error: standard error of the difference of two means; None if unknown.
    """

    winner: int | None
    tie: tuple[int, ...]
    error: float | None


def select_winner(values: Mapping[int, Sequence[float]], *, maximize: bool) -> WinnerSelection:
    """Select the finalist with the best mean; among equal means, the one with the lowest number.

    A tie is a difference of means of at most one standard error of that difference (the one-standard-error rule of
    Breiman et al., *Classification and Regression Trees*, 1984, section 3.4.3). Finalists and seeds form a randomised
    block design with the seeds as blocks (Box, Hunter and Hunter, *Statistics for Experimenters*, 2nd edition, 2005,
    chapter 4): the common effect of a seed is removed, and the variance is pooled over all finalists, because two seeds
    give a pair only one degree of freedom. With r_ij the residual of finalist i of k and seed j of s after its row's
    and its column's mean,

        variance = sum r_ij^2 / ((k - 1) (s - 1)),    error = sqrt(2 variance / s)

    which for k = 2 is the error of the paired t-test. With one seed the error is unknown, and only equal values tie.

    Args:
        values: per finalist number, one value for each seed, in the same order.
        maximize: whether higher is better.
    """
    means = {finalist: statistics.fmean(row) for finalist, row in values.items()}
    ranked = best_first(means, maximize=maximize)
    if not ranked:
        return WinnerSelection(None, (), None)
    error, best = _get_difference_error(list(values.values())), means[ranked[0]]
    near = math.ulp(best) if error is None else error
    tie = tuple(finalist for finalist in ranked[1:] if abs(means[finalist] - best) <= near)
    return WinnerSelection(ranked[0], tie, error)


def _get_difference_error(table: Sequence[Sequence[float]]) -> float | None:
    """Return the standard error of the difference of two rows' means, with columns as blocks."""
    rows, columns = len(table), len(table[0])
    if rows < 2 or columns < 2:
        return None
    of_row = [statistics.fmean(row) for row in table]
    of_column = [statistics.fmean(column) for column in zip(*table, strict=True)]
    mean = statistics.fmean(of_row)
    residuals = [value - of_row[i] - of_column[j] + mean for i, row in enumerate(table) for j, value in enumerate(row)]
    variance = math.fsum(residual**2 for residual in residuals) / ((rows - 1) * (columns - 1))
    return math.sqrt(2 * variance / columns)


LEVEL = 0.9  # of the interval


@dataclass(frozen=True)
class RunScore:
    """Score of a finalist's run.

    Attributes:
        value: value of the metric.
        error: standard error of the value from the validation samples; None if unknown.
        trained, validated, tested: numbers of training, validation and test samples.
        divided: whether the run had a new train/validation split.
    """

    value: float
    error: float | None
    trained: int
    validated: int
    tested: int
    divided: bool = True


@dataclass(frozen=True)
class ExpectedScore:
    """Expected score on new data.

    Attributes:
        mean: expected score: the winner's mean, corrected for selection bias.
        low, high: prediction interval of the test score, with probability `LEVEL`.
    """

    mean: float
    low: float
    high: float


def read_run_score(value: float, record: Mapping[str, Any] | None) -> RunScore | None:
    """Return the score of a run from its stored record; None without a record."""
    if record is None:
        return None
    trained, validated, tested = record["sizes"]
    return RunScore(value, record["error"], trained, validated, tested, record["divided"])


def estimate_test_score(
    runs: Mapping[int, Sequence[RunScore]], choice: WinnerSelection, *, metric: str, maximize: bool
) -> ExpectedScore | None:
    """Estimate the test score of the winner's model, which the search trained.

    The winner's mean is the best of several and therefore biased. It is shrunk towards the mean of all finalists by the
    best linear unbiased prediction (Henderson 1975, *Biometrics* 31), with E the squared error of a mean and B the
    variance of the means, by the factor

        max(0, 1 - E / B)

    The prediction error has three sources: the variation between runs, the validation samples, which all come from the
    n samples that the study trains on, and a test set of t samples. The model is itself one run. s is the number of
    runs of a finalist, w the variance of the runs about their mean, pooled over finalists, b the standard error of a
    run from its v samples, and f = v / n the share of samples that two splits have in common (1 if `data()` fixes the
    split):

        run = max(w - (1 - f) b^2, 0),    variance = w / s + f b^2 + run + b^2 v / t

    The interval is that of Student's t, with the degrees of freedom of w for its share of the variance
    (Satterthwaite 1946, *Biometrics Bulletin* 2).

    Args:
        runs: per finalist number, the scores of its runs; the same number for each.
        choice: the winner, and the error of the difference of two means.
        metric: name of the metric, which determines its bounds.
        maximize: whether higher is better.

    Returns:
        None if the error from the validation samples is unknown: an interval without it would be too narrow.
    """
    from scipy import stats

    errors = [
        e for row in runs.values() for run in row if (e := _get_run_error(run, metric, maximize=maximize)) is not None
    ]
    if choice.winner is None or not errors:
        return None
    own, seeds = runs[choice.winner], len(runs[choice.winner])
    means = {number: statistics.fmean(run.value for run in row) for number, row in runs.items()}
    mean = _shrink_mean(list(means.values()), means[choice.winner], choice.error)
    freedom = len(runs) * (seeds - 1)
    squares = math.fsum((run.value - means[number]) ** 2 for number, row in runs.items() for run in row)
    within = squares / freedom if freedom else 0.0
    sampling = statistics.fmean(error**2 for error in errors)
    shared = min(own[0].validated / own[0].trained, 1.0) if own[0].divided else 1.0
    run = max(within - (1 - shared) * sampling, 0.0)
    variance = within / seeds + shared * sampling + run + sampling * own[0].validated / own[0].tested
    uncertain = within / seeds + (within if run else 0.0)
    quantile = stats.norm.ppf((1 + LEVEL) / 2)
    if uncertain:
        quantile = stats.t.ppf((1 + LEVEL) / 2, freedom * (variance / uncertain) ** 2)
    reach, sign = float(quantile) * math.sqrt(variance), -1.0 if maximize else 1.0
    least = get_loss_bound(metric, min(sign * value for value in means.values()), maximize=maximize)
    low, high = sorted((sign * max(sign * mean - reach, least), sign * (sign * mean + reach)))
    return ExpectedScore(mean, max(low, 0.0) if metric in PROPORTION_METRICS else low, high)


def _get_run_error(run: RunScore, metric: str, *, maximize: bool) -> float | None:
    """Return the error of a run from its samples, which is positive even if all resamples are equal.

    In that case a proportion p of n samples has the error of (n p + 1) / (n + 2) (Laplace's rule of succession), and
    the error of other metrics is unknown.
    """
    if run.error is None or run.error > 0:
        return run.error
    if metric not in PROPORTION_METRICS or not maximize or not 0 <= run.value <= 1:
        return None
    share = (run.value * run.validated + 1) / (run.validated + 2)
    return math.sqrt(share * (1 - share) / run.validated)


def _shrink_mean(means: Sequence[float], best: float, error: float | None) -> float:
    """Return the best mean, shrunk towards the mean of all finalists to correct its selection bias."""
    if error is None or not (variance := statistics.variance(means)):
        return best
    factor = max(0.0, 1 - (error**2 / 2) / variance)
    center = statistics.fmean(means)
    return center + factor * (best - center)
