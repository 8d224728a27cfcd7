"""Who wins among finalists that were trained on the same fresh seeds, and whether that is more than chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
