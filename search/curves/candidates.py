"""Where the next configuration is sought: at random, around the best trials, and around the best of those at random."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpsearch.search.curves.space import Space

DRAWN = 800  # configurations at random among which the best is sought
AROUND = 60  # configurations around each of the
TOPS = 5  # best trials, and of those at random


def best_candidate(
    judged: Callable[[np.ndarray], np.ndarray],
    space: Space,
    random: np.random.Generator,
    *,
    around: np.ndarray,
    had: np.ndarray,
) -> tuple[np.ndarray, int | None]:
    """The row that is judged best among some at random and around the best trials.

    None that a trial `had`, while there are others: where hardly anything is to be gained, the same corner of the
    space would be tried over and over.

    Args:
        judged: gives the gain [n] that is expected of rows [n, parameters].
        space: whose rows they are.
        random: draws them.
        around: rows of the best trials [n, parameters].
        had: rows of trials [n, parameters].

    Returns:
        The row, and the index of that which it was sought around; None where it came of one at random.
    """
    drawn = space.drawn(random, DRAWN)
    gains = judged(drawn)
    tops = np.concatenate([around, drawn[np.argsort(-gains, kind="stable")[:TOPS]]])
    near = space.near(random, tops, AROUND)
    tried, gains = np.concatenate([drawn, near]), np.concatenate([gains, judged(near)])
    chosen = int(np.argmax(np.where(_among(tried, had), -np.inf, gains)))
    top = (chosen - DRAWN) // AROUND  # below 0 for those at random
    return tried[chosen], top if 0 <= top < len(around) else None


def _among(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which rows [n, parameters] are among others, but for the rounding of a value to a number and back."""
    known = {row.tobytes() for row in np.round(others, 9) + 0.0}
    return np.array([row.tobytes() in known for row in np.round(rows, 9) + 0.0], dtype=bool)
