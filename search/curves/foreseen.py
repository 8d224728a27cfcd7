"""What is foreseen of a trial in the metric's own unit, and what is noted of a configuration when it is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial

from hpsearch.search.curves.points import Seen

CHOSEN = "curves:chosen"  # a trial's system attribute: why it has its configuration
ENOUGH = 8  # trials that have reported, before which no trial's end is foreseen
_DIGITS, _MOST_DIGITS = 4, 8  # of a value that is told


@dataclass(frozen=True)
class Forecast:
    """What a trial will end with, in the metric's unit.

    Attributes:
        value: its best value after the last epoch, as it is expected.
        low, high: about nine of ten such values lie between them.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        value, between = told(None, self)[1:]
        return f"{value} ({between})"


def told(best: float | None, found: Forecast) -> tuple[str, str, str]:
    """The best value so far, the one that is foreseen and its band, with as many digits as tell them apart."""
    values = [found.value if best is None else best, found.value, found.low, found.high]
    digits = next((d for d in range(_DIGITS, _MOST_DIGITS) if _apart(values, d)), _DIGITS)
    now, value, low, high = (f"{v:.{digits}g}" for v in values)
    return now, value, f"{low} to {high}" if low != high else f"all at {low}"


def _apart(values: Sequence[float], digits: int) -> bool:
    return len({f"{v:.{digits}g}" for v in values}) == len(set(values))


def foreseeable(trials: Sequence[FrozenTrial], epochs: int) -> bool:
    """Whether there may be something to foresee, and to learn it from: told without loading what foresees it."""
    if epochs < 2 or not any(t.intermediate_values for t in trials if not t.state.is_finished()):
        return False
    return sum(bool(t.intermediate_values) for t in trials) >= ENOUGH


def band(points: Seen, mean: float, deviation: float, *, maximize: bool) -> tuple[float, float, float]:
    """An expected score as a value: the mean, and the lower and upper end of one deviation around it.

    Scores are turned back by interpolation between those of the values seen, so that none is beyond what was seen.

    Args:
        points: whose losses and scores say which is which; some loss is finite.
        mean: of the score.
        deviation: of the score.
        maximize: whether losses are values with the other sign.
    """
    middle, one, other = np.interp([mean, mean - deviation, mean + deviation], *scale(points)).tolist()
    if maximize:
        middle, one, other = -middle, -other, -one
    return middle, one, other


def scale(points: Seen) -> tuple[np.ndarray, np.ndarray]:
    """Scores, and the losses that they stand for, the best first; without those that are no number."""
    finite = np.isfinite(points.loss)
    order = np.argsort(points.loss[finite], kind="stable")
    return points.scores[finite][order], points.loss[finite][order]


def chosen_line(note: Mapping[str, Any]) -> str:
    """A note of why a configuration was chosen, for a person; of several metrics with what each is foreseen to be."""
    origin = "the most promising of many at random" if note["near"] is None else f"near trial {note['near']}"
    origin += f" of {note['of']}" if "of" in note else ""
    if isinstance(note["foreseen"], list):
        pairs = zip(note["foreseen"], note["band"], strict=True)
        return f"foreseen {', '.join(_with_band(value, band) for value, band in pairs)}; {origin}"
    return f"foreseen {_with_band(note['foreseen'], note['band'])}, best then {note['best']:.4g}; {origin}"


def _with_band(value: float, band: Sequence[float]) -> str:
    return f"{value:.4g} ({band[0]:.4g} to {band[1]:.4g})"
