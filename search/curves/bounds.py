"""How good a metric can be at all: nothing beyond is foreseen, or expected to be gained."""

from __future__ import annotations

import math

SHARES = frozenset({"accuracy", "macro_f1", "auroc", "average_precision"})  # between 0 and 1
_AT_MOST_1 = SHARES | {"r2"}
_AT_LEAST_0 = frozenset({"loss", "rmse", "mae"})


def least_loss(metric: str, best: float, *, maximize: bool) -> float:
    """The best that a metric can be, as a loss: values with the other sign where higher ones are better.

    A metric is known by its name, and somebody's own of that name may be another, such as an accuracy in per cent:
    one that was better than its bound has none.

    Args:
        metric: its name.
        best: the best loss that was seen.
        maximize: whether higher values are better.

    Returns:
        Minus infinity of a metric that is not known.
    """
    if metric in _AT_MOST_1 and maximize:
        bound = -1.0
    elif metric in _AT_LEAST_0 and not maximize:
        bound = 0.0
    else:
        return -math.inf
    return bound if best >= bound else -math.inf
