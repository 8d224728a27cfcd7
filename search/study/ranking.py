"""The one order of best first, of trials and of whatever else has a number and a value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from optuna.trial import FrozenTrial, TrialState

from hpsearch.storage.attributes import VIOLATIONS
from hpsearch.storage.rungs import fronts
from hpsearch.storage.rungs.fronts import to_losses


def best_first(values: Mapping[int, float], *, maximize: bool) -> list[int]:
    """Return the keys of `values` by their value, the best one first; of equal values the lower key, as in Optuna.

    Args:
        values: by number of the trial; none is NaN.
        maximize: whether higher is better.
    """
    return sorted(values, key=lambda number: (-values[number] if maximize else values[number], number))


def is_on_front(values: Sequence[float], others: Sequence[Sequence[float]], maximize: Sequence[bool]) -> bool:
    """Whether a trial that ends with such values is dominated by none that has ended before.

    Who is on the front when all have ended is on it at its own end.
    """
    return 0 in fronts.find_front(to_losses([values, *others], maximize))


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


def get_first_value(trial: FrozenTrial) -> float | None:
    """Return a trial's value: of several metrics that of the first, by which its best epoch was chosen."""
    values = trial.values
    return None if not values else float(values[0])


def is_feasible(trial: FrozenTrial) -> bool:
    """Whether a trial breaks no constraint."""
    return not trial.user_attrs.get(VIOLATIONS)


def _ended(trials: Iterable[FrozenTrial], *, infeasible: bool = False) -> list[FrozenTrial]:
    """Those that have run to their end within all bounds, or whatever their bounds, the earliest first."""
    complete = [t for t in trials if t.state == TrialState.COMPLETE and t.values and (infeasible or is_feasible(t))]
    return sorted(complete, key=lambda trial: trial.number)


def rank_trials(
    trials: Iterable[FrozenTrial], maximize: Sequence[bool], *, infeasible: bool = False
) -> list[FrozenTrial]:
    """Return those of the trials that have run to their end within all bounds, the best one first.

    Of one metric by its value, of equal ones the earliest. Of several by their fronts: first the front that no trial
    dominates, in it who has most room about it (Deb et al. 2002).
    """
    ended = _ended(trials, infeasible=infeasible)
    if len(maximize) > 1:
        order = fronts.sort_by_crowding(to_losses([trial.values for trial in ended], maximize))
        return [ended[place] for place in order]
    return _by_first_metric(ended, maximize)


def _by_first_metric(trials: Iterable[FrozenTrial], maximize: Sequence[bool]) -> list[FrozenTrial]:
    sign = -1 if maximize[0] else 1
    return sorted(trials, key=lambda trial: (sign * trial.values[0], trial.number))


def find_pareto_front(
    trials: Iterable[FrozenTrial], maximize: Sequence[bool], *, infeasible: bool = False
) -> list[FrozenTrial]:
    """Return those that have run to their end within all bounds and that none dominates, by the first metric.

    Of one metric it is the best trial. With `infeasible` those count too that break a constraint.
    """
    ended = _ended(trials, infeasible=infeasible)
    if len(maximize) == 1:
        return _by_first_metric(ended, maximize)[:1]
    members = [ended[place] for place in fronts.find_front(to_losses([trial.values for trial in ended], maximize))]
    return _by_first_metric(members, maximize)
