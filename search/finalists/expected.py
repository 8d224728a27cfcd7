"""What new data will show of a winner: a number, and an interval for the score on a test set of the study's size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from search.curves.bounds import least_loss

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
        mean: the score that is expected.
        low, high: between which the score on the test set lies with the probability `LEVEL`.
    """

    mean: float
    low: float
    high: float


def scored_of(value: float, record: Mapping[str, Any] | None) -> Scored | None:
    """Return what a trial's value rests on, from what is noted of it; None where nothing is."""
    return None if record is None else Scored(value, record["error"], *record["sizes"], divided=record["divided"])


def expect(runs: Mapping[int, Sequence[Scored]], winner: int, *, metric: str, maximize: bool) -> Expected:
    """What the winner's model, which the search trained, will score on a test set.

    The mean m of the winner's s runs is off by what differs between runs, and by the validation samples, which all
    come from the n + v samples that are not tested; the model is itself one run; and a test set of t samples is a draw.
    With w the variance of runs about their finalist's mean, pooled over finalists, b the standard error of a run by
    its v samples, and f = v / (n + v) the share of samples that two divisions have in common,

        run = max(w - (1 - f) b^2, 0),    variance = w / s + f b^2 + run + b^2 v / t

    and the interval is that of Student's t with the pooled degrees of freedom.

    Args:
        runs: of each finalist, by its number.
        winner: whose score is expected.
        metric: of the scores: it may have a bound.
        maximize: whether higher is better.
    """
    from scipy import stats

    own = runs[winner]
    mean = statistics.fmean(run.value for run in own)
    residuals = [run.value - statistics.fmean(r.value for r in row) for row in runs.values() for run in row]
    freedom = sum(len(row) - 1 for row in runs.values())
    within = math.fsum(residual**2 for residual in residuals) / freedom if freedom else 0.0
    errors = [run.error for row in runs.values() for run in row if run.error is not None]
    sampling = statistics.fmean(error**2 for error in errors) if errors else 0.0
    first = own[0]
    shared = first.validated / (first.trained + first.validated)
    run = max(within - (1 - shared) * sampling, 0.0)
    variance = within / len(own) + shared * sampling + run + sampling * first.validated / first.tested
    reach = float(stats.t.ppf((1 + LEVEL) / 2, max(freedom, 1))) * math.sqrt(variance)
    sign = -1.0 if maximize else 1.0
    least = least_loss(metric, min(sign * run.value for row in runs.values() for run in row), maximize=maximize)
    low, high = sorted((sign * max(sign * mean - reach, least), sign * (sign * mean + reach)))
    return Expected(mean, low, high)
