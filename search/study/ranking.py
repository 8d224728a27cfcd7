"""The ranking of trials: by value with one metric, by Pareto fronts with several metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.errors import SearchError
from hpsearch.storage.attributes import CONFIG_SCHEDULE, VIOLATIONS
from hpsearch.storage.rungs import fronts
from hpsearch.storage.rungs.fronts import to_losses


def sort_best_first(values: Mapping[int, float], *, maximize: bool) -> list[int]:
    """Return the trial numbers, best value first. Among equal values, the lower number comes first, as in Optuna.

    Args:
        values: values by trial number, without NaN.
        maximize: whether higher is better.
    """
    return sorted(values, key=lambda number: (-values[number] if maximize else values[number], number))


def is_on_front(values: Sequence[float], others: Sequence[Sequence[float]], maximize: Sequence[bool]) -> bool:
    """Return whether a trial that ends with `values` is on the Pareto front of the trials so far.

    This is True for each trial of the final Pareto front, because later trials can only remove a trial from the front.
    """
    return 0 in fronts.find_front(to_losses([values, *others], maximize))


def is_among_best(number: int, value: float, others: Mapping[int, float], *, top: int, maximize: bool) -> bool:
    """Return whether a trial that ends with `value` is among the best `top` trials so far.

    This is True for each of the best `top` trials of the finished study, because later trials only lower a trial's
    rank.

    Args:
        number: number of the trial.
        value: final value of the trial.
        others: final values of the completed trials, by number.
        top: number of best trials.
        maximize: whether higher is better.
    """
    return number in sort_best_first({**others, number: value}, maximize=maximize)[:top]


def get_schedule(trial: FrozenTrial) -> list[dict[str, Any]] | None:
    """Return the configurations of a trial as population-based training changed them; None without changes.

    Each entry has the first epoch (0-based), the number of the trial that trained from this epoch, and the parameters.

    Raises:
        SearchError: the stored schedule is damaged.
    """
    schedule: list[dict[str, Any]] | None = trial.user_attrs.get(CONFIG_SCHEDULE)
    if schedule is None:
        return None
    kinds = {"epoch": int, "trial": int, "params": dict}
    is_valid = isinstance(schedule, list) and all(
        isinstance(part, dict) and all(type(part.get(name)) is kind for name, kind in kinds.items())
        for part in schedule
    )
    if not is_valid or not schedule or schedule[0]["epoch"] != 0:
        raise SearchError(f"the attribute {CONFIG_SCHEDULE!r} of trial {trial.number} is damaged; restore a backup")
    return schedule


def get_last_params(trial: FrozenTrial) -> dict[str, Any]:
    """Return the parameters of a trial's last epoch, which population-based training may have changed."""
    schedule = get_schedule(trial)
    return dict(trial.params if schedule is None else schedule[-1]["params"])


def get_first_value(trial: FrozenTrial) -> float | None:
    """Return a trial's value of the first metric, by which its best epoch is selected; None if it has no value."""
    values = trial.values
    return None if not values else float(values[0])


def is_feasible(trial: FrozenTrial) -> bool:
    """Return whether a trial violates no constraint."""
    return not trial.user_attrs.get(VIOLATIONS)


def _list_complete(trials: Iterable[FrozenTrial], *, infeasible: bool = False) -> list[FrozenTrial]:
    """Return the feasible COMPLETE trials in the order of their numbers.

    Args:
        trials: trials in any state.
        infeasible: whether to include trials that violate a constraint.
    """
    complete = [t for t in trials if t.state == TrialState.COMPLETE and t.values and (infeasible or is_feasible(t))]
    return sorted(complete, key=lambda trial: trial.number)


def rank_trials(
    trials: Iterable[FrozenTrial], maximize: Sequence[bool], *, infeasible: bool = False
) -> list[FrozenTrial]:
    """Return the feasible COMPLETE trials, best first.

    With one metric, trials are sorted by value, then by number. With several metrics, trials are sorted by
    non-dominated sorting, and within a front by crowding distance, largest first (Deb et al. 2002, NSGA-II).

    Args:
        trials: trials in any state.
        maximize: per metric, whether higher is better.
        infeasible: whether to include trials that violate a constraint.
    """
    complete = _list_complete(trials, infeasible=infeasible)
    if len(maximize) > 1:
        order = fronts.sort_by_crowding(to_losses([trial.values for trial in complete], maximize))
        return [complete[place] for place in order]
    return _sort_by_first_metric(complete, maximize)


def _sort_by_first_metric(trials: Iterable[FrozenTrial], maximize: Sequence[bool]) -> list[FrozenTrial]:
    sign = -1 if maximize[0] else 1
    return sorted(trials, key=lambda trial: (sign * trial.values[0], trial.number))


def find_pareto_front(
    trials: Iterable[FrozenTrial], maximize: Sequence[bool], *, infeasible: bool = False
) -> list[FrozenTrial]:
    """Return the Pareto front, best value of the first metric first; with one metric, only the best trial.

    Args:
        trials: trials in any state.
        maximize: per metric, whether higher is better.
        infeasible: whether to include trials that violate a constraint.
    """
    complete = _list_complete(trials, infeasible=infeasible)
    if len(maximize) == 1:
        return _sort_by_first_metric(complete, maximize)[:1]
    members = fronts.find_front(to_losses([trial.values for trial in complete], maximize))
    return _sort_by_first_metric([complete[place] for place in members], maximize)
