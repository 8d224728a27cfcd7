"""The one order of best first, of trials and of whatever else has a number and a value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from optuna.trial import FrozenTrial, TrialState


def best_first(values: Mapping[int, float], *, maximize: bool) -> list[int]:
    """Return the keys of `values` by their value, the best one first; of equal values the lower key, as in Optuna.

    Args:
        values: by number of the trial; none is NaN.
        maximize: whether higher is better.
    """
    return sorted(values, key=lambda number: (-values[number] if maximize else values[number], number))


def is_among_best(number: int, value: float, others: Mapping[int, float], *, top: int, maximize: bool) -> bool:
    """Whether a trial that ends with `value` is among the best `top`, beside those that have ended before.

    It is at the end of each trial that will be among them when all have ended: others may only push it further down.

    Args:
        number: of the trial.
        value: what it ends with.
        others: the values of those that have run to their end, by number.
        top: of how many.
        maximize: whether higher is better.
    """
    return number in best_first({**others, number: value}, maximize=maximize)[:top]


def rank_trials(trials: Iterable[FrozenTrial], *, maximize: bool) -> list[FrozenTrial]:
    """Return those of the trials that have run to their end, the best one first; of equal values the earliest."""
    complete = {trial.number: trial for trial in trials if trial.state == TrialState.COMPLETE}
    values = {number: trial.value for number, trial in complete.items() if trial.value is not None}
    return [complete[number] for number in best_first(values, maximize=maximize)]
