"""What is foreseen of a trial in the metric's own unit, and what is noted of a configuration when it is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from search.curves.points import Seen

CHOSEN = "curves:chosen"  # a trial's system attribute: why it has its configuration


def band(points: Seen, mean: float, deviation: float, *, maximize: bool) -> tuple[float, float, float]:
    """An expected score as a value: the mean, and the lower and upper end of one deviation around it.

    Scores are turned back by interpolation between those of the values seen, so that none is beyond what was seen.

    Args:
        points: whose losses and scores say which is which; some loss is finite.
        mean: of the score.
        deviation: of the score.
        maximize: whether losses are values with the other sign.
    """
    finite = np.isfinite(points.loss)
    order = np.argsort(points.loss[finite], kind="stable")
    scores, losses = points.scores[finite][order], points.loss[finite][order]
    middle, one, other = np.interp([mean, mean - deviation, mean + deviation], scores, losses).tolist()
    if maximize:
        middle, one, other = -middle, -other, -one
    return middle, one, other


def chosen_line(note: Mapping[str, Any]) -> str:
    """A note of why a configuration was chosen, for a person."""
    low, high = note["band"]
    origin = "drawn at random" if note["near"] is None else f"near trial {note['near']}"
    origin += f" of {note['of']}" if "of" in note else ""
    return f"foreseen {note['foreseen']:.4g} ({low:.4g} to {high:.4g}), best then {note['best']:.4g}; {origin}"
