"""Smallest and largest values of metrics, by the names of the metrics."""

from __future__ import annotations

import math

PROPORTION_METRICS = frozenset({"accuracy", "macro_f1", "auroc", "average_precision"})  # metrics between 0 and 1
_AT_MOST_1 = PROPORTION_METRICS | {"r2"}
_AT_LEAST_0 = frozenset({"loss", "rmse", "mae"})


def get_metric_bounds(metric: str) -> tuple[float, float]:
    """Return the smallest and the largest value of a metric by its name; infinite if no bound is known."""
    return (
        0.0 if metric in PROPORTION_METRICS | _AT_LEAST_0 else -math.inf,
        1.0 if metric in _AT_MOST_1 else math.inf,
    )


def get_loss_bound(metric: str, best: float, *, maximize: bool) -> float:
    """Return the smallest possible loss of a metric by the metric's name; minus infinity if no bound is known.

    A user's metric may have a known name and another range, such as an accuracy in percent. Therefore no bound is used
    if the best loss so far is better than the bound.

    Args:
        metric: name of the metric.
        best: best loss so far.
        maximize: whether higher values are better, so that losses are negated values.
    """
    if metric in _AT_MOST_1 and maximize:
        bound = -1.0
    elif metric in _AT_LEAST_0 and not maximize:
        bound = 0.0
    else:
        return -math.inf
    return bound if best >= bound else -math.inf
