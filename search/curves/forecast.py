"""Forecast the final values of running and paused trials."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.curves.learning import Lesson, known, parameters
from hpsearch.search.curves.points import Seen, least_loss, losses

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


def slope(scores: np.ndarray, seen: np.ndarray) -> float:
    """Return the slope of the losses over their scores [n] (best first) among the best ones."""
    tail = min(max(3, round(_TAIL * len(seen))), len(seen) - 1)
    apart = scores[tail] - scores[0]
    return float((seen[tail] - seen[0]) / apart) if apart > 0 else 0.0


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


MOST = 40  # trials that are foreseen: those that run, then those that got furthest, then the best

# Points of each trial. The sampler's two forget how those that went on began: what waits would seem better than it is.
_OF_EACH = 5

# Nine of ten are within so many deviations of a normal distribution. That of the process takes its hyperparameters for
# known, which they are not before some trials have ended: alone it held 66 to 85 of a hundred ends, in the midst of
# searches with `asha`, on curves of five objectives and three families. What is added is of a score's own size.
_DEVIATIONS = 1.645
_UNKNOWN = 0.7  # before any trial has ended

_TAIL = 0.3  # of the values, the best ones, by whose slope still better ones are told


def forecasts(
    trials: Sequence[FrozenTrial],
    *,
    epochs: int,
    maximize: bool,
    metric: str = "",
    of: Container[int] | None = None,
) -> dict[int, Forecast]:
    """What the trials that run or wait will end with, by their numbers; those are at most `MOST`.

    The same trials give the same, to the bit. Learnt from at most 600 points, and fitted on 200: a second or less.

    Args:
        trials: all of a study.
        epochs: of a full trial.
        maximize: whether higher values are better.
        metric: its name; of some it is known how good they can be.
        of: numbers of those that are asked about; None for all.

    Returns:
        Nothing before enough trials have reported, nor of one that has reported no finite value.
    """
    if not foreseeable(trials, epochs):
        return {}
    told = [t for t in known(trials) if t.state != TrialState.FAIL]
    still = _open(told, epochs=epochs, maximize=maximize, of=of)
    distributions = parameters(told)
    if not still or not distributions:
        return {}
    lesson = Lesson.of(
        told,
        distributions,
        maximize=maximize,
        epochs=epochs,
        random=np.random.default_rng(0),
        of_each=_OF_EACH,
        always=still,
    )
    process = lesson.fitted(lesson.new_process)
    posterior = process.given(lesson.points, lesson.scores)
    means, deviations = (found.numpy() for found in posterior.at(lesson.ends.some([*still])))
    noise, ended = process.theta[5].exp().item(), sum(len(t.intermediate_values) >= epochs for t in told)
    wide = _DEVIATIONS * np.sqrt(deviations**2 + noise + _UNKNOWN**2 / (1 + ended))
    least = _least(lesson.seen, metric, maximize=maximize)
    ends = [_losses(lesson.seen, scores, least) for scores in (means, means - wide, means + wide)]
    found = {}
    for (index, loss), values in zip(still.items(), np.column_stack(ends), strict=True):
        # The best value so far stays, whatever comes.
        value, one, other = (-v if maximize else v for v in np.minimum(values, loss).tolist())
        found[told[index].number] = Forecast(value, min(one, other), max(one, other))
    return found


def _open(told: Sequence[FrozenTrial], *, epochs: int, maximize: bool, of: Container[int] | None) -> dict[int, float]:
    """Return the trials that are forecast: index to best loss so far, at most `MOST`."""
    found = []
    for index, trial in enumerate(told):
        asked = of is None or trial.number in of
        if asked and not trial.state.is_finished() and max(trial.intermediate_values) + 1 < epochs:
            loss = float(np.nanmin([*losses(trial, maximize=maximize, epochs=epochs).values(), np.inf]))
            order = (trial.state != TrialState.RUNNING, -len(trial.intermediate_values), loss, index)
            found += [order] if np.isfinite(loss) else []
    return {index: loss for *_, loss, index in sorted(found)[:MOST]}


def _losses(points: Seen, scores: np.ndarray, least: float) -> np.ndarray:
    """Expected scores [n] as losses [n]: told between those that were seen, and beyond the best by their slope."""
    of_seen, seen = scale(points)
    beyond = slope(of_seen, seen) * np.minimum(scores - of_seen[0], 0.0)
    found: np.ndarray = np.interp(scores, of_seen, seen) + beyond
    return found.clip(min=least)


def _least(points: Seen, metric: str, *, maximize: bool) -> float:
    """The loss beyond which none is foreseen.

    Of a metric that is not known none is, where no value was below 0, or all were between 0 and 1: it may be another
    loss, or another accuracy.
    """
    _, seen = scale(points)
    alike = 0.0 if seen[0] >= 0 else -1.0 if seen[0] >= -1 and seen[-1] <= 0 else -np.inf
    return max(alike, least_loss(metric, float(seen[0]), maximize=maximize))
