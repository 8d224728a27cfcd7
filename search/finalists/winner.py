"""The winner among the finalists, and its expected score on new data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpsearch.search.curves.points import SHARES, least_loss
from hpsearch.search.study.ranking import best_first


@dataclass(frozen=True)
class Choice:
    """What the fresh seeds say.

    Attributes:
        winner: the finalist of the best mean; None without any.
        tie: the others that cannot be told from it, the better mean first.
        error: standard error of the difference of two means; None where nothing can be said of it.
    """

    winner: int | None
    tie: tuple[int, ...]
    error: float | None


def choose(values: Mapping[int, Sequence[float]], *, maximize: bool) -> Choice:
    """Choose the finalist of the best mean; of equal means the one of the lower number.

    A tie is a difference of means of at most one standard error of that difference (the one-standard-error rule of
    Breiman et al., *Classification and Regression Trees*, 1984, section 3.4.3). Finalists and seeds make a randomised
    block design, the seeds being the blocks (Box, Hunter and Hunter, *Statistics for Experimenters*, 2nd edition,
    2005, chapter 4): what a seed does to all finalists alike is taken out, and the rest is pooled over all of them,
    for two seeds alone would give each pair one degree of freedom. With r_ij the residual of finalist i of k and seed
    j of s after its row's and its column's mean,

        variance = sum r_ij^2 / ((k - 1) (s - 1)),    error = sqrt(2 variance / s)

    which for k = 2 is the error of the paired t-test. One seed says nothing of the spread: then only equal values tie.

    Args:
        values: of each finalist, by its number: one for each seed, in the same order.
        maximize: whether higher is better.
    """
    means = {finalist: statistics.fmean(row) for finalist, row in values.items()}
    ranked = best_first(means, maximize=maximize)
    if not ranked:
        return Choice(None, (), None)
    error, best = _error(list(values.values())), means[ranked[0]]
    near = math.ulp(best) if error is None else error
    tie = tuple(finalist for finalist in ranked[1:] if abs(means[finalist] - best) <= near)
    return Choice(ranked[0], tie, error)


def _error(table: Sequence[Sequence[float]]) -> float | None:
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
class Scored:
    """The score of a finalist's run.

    Attributes:
        value: of the metric.
        error: its standard error by the validation samples; None where nothing is known of it.
        trained, validated, tested: how many samples were trained on, validated on, and are in the test split.
        divided: whether train and validation were divided anew for it.
    """

    value: float
    error: float | None
    trained: int
    validated: int
    tested: int
    divided: bool = True


@dataclass(frozen=True)
class Expected:
    """What new data will show.

    Attributes:
        mean: the score that is expected: of the winner's mean what its choice does not flatter.
        low, high: between which the score on the test set lies with the probability `LEVEL`.
    """

    mean: float
    low: float
    high: float


def scored_of(value: float, record: Mapping[str, Any] | None) -> Scored | None:
    """Return what a trial's value rests on, from what is noted of it; None where nothing is."""
    if record is None:
        return None
    trained, validated, tested = record["sizes"]
    return Scored(value, record["error"], trained, validated, tested, record["divided"])


def expect(runs: Mapping[int, Sequence[Scored]], choice: Choice, *, metric: str, maximize: bool) -> Expected | None:
    """What the winner's model, which the search trained, will score on a test set.

    The winner's mean is the best of several, and too good by that. It is drawn towards the mean of all finalists as the
    best linear unbiased prediction draws it (Henderson 1975, *Biometrics* 31), with E the squared error of a mean and
    B the variance of the means, by the factor

        max(0, 1 - E / B)

    What is expected is off by what differs between runs, and by the validation samples, which all come from the n that
    the study trains on; the model is itself one run; and a test set of t samples is a draw. With s runs of a finalist,
    w their variance about its mean, pooled over finalists, b the standard error of a run by its v samples, and
    f = v / n the share of samples that two divisions have in common (1 where `data()` fixes the parts),

        run = max(w - (1 - f) b^2, 0),    variance = w / s + f b^2 + run + b^2 v / t

    and the interval is that of Student's t, with the degrees of freedom of w for the share that rests on it
    (Satterthwaite 1946, *Biometrics Bulletin* 2).

    Args:
        runs: of each finalist, by its number: as many for each.
        choice: the winner, whose score is expected, and the error of the difference of two means.
        metric: of the scores: it may have a bound.
        maximize: whether higher is better.

    Returns:
        None where nothing is known of the error by the validation samples: an interval without it would be too narrow.
    """
    from scipy import stats

    errors = [e for row in runs.values() for run in row if (e := _error_of(run, metric, maximize=maximize)) is not None]
    if choice.winner is None or not errors:
        return None
    own, seeds = runs[choice.winner], len(runs[choice.winner])
    means = {number: statistics.fmean(run.value for run in row) for number, row in runs.items()}
    mean = _drawn_in(list(means.values()), means[choice.winner], choice.error)
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
    least = least_loss(metric, min(sign * value for value in means.values()), maximize=maximize)
    low, high = sorted((sign * max(sign * mean - reach, least), sign * (sign * mean + reach)))
    return Expected(mean, max(low, 0.0) if metric in SHARES else low, high)


def _error_of(run: Scored, metric: str, *, maximize: bool) -> float | None:
    """Return the error of a run by its samples; where no resample differs, as when all are right, it is not zero.

    A share p of n samples then has that of (n p + 1) / (n + 2) (Laplace's rule of succession); of others it is unknown.
    """
    if run.error is None or run.error > 0:
        return run.error
    if metric not in SHARES or not maximize or not 0 <= run.value <= 1:
        return None
    share = (run.value * run.validated + 1) / (run.validated + 2)
    return math.sqrt(share * (1 - share) / run.validated)


def _drawn_in(means: Sequence[float], best: float, error: float | None) -> float:
    """Return the best mean, drawn towards the mean of all by what its choice flatters it."""
    if error is None or not (variance := statistics.variance(means)):
        return best
    factor = max(0.0, 1 - (error**2 / 2) / variance)
    centre = statistics.fmean(means)
    return centre + factor * (best - centre)
