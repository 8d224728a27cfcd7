"""The order of trials, best first, and whether a trial is among the best when it ends."""

from __future__ import annotations

import random
from typing import Any

import pytest
from optuna.trial import FrozenTrial, create_trial

from hpsearch.search.errors import SearchError
from hpsearch.search.study.ranking import (
    find_pareto_front,
    get_schedule,
    is_among_best,
    is_on_front,
    rank_trials,
    sort_best_first,
)
from hpsearch.storage.attributes import CONFIG_SCHEDULE, VIOLATIONS


@pytest.mark.parametrize("maximize", [True, False])
def test_the_final_best_were_among_the_best_when_they_ended(maximize: bool) -> None:
    """With ties, for any order of ends, and although a trial may not see others that end at the same time."""
    rng = random.Random(0)
    for _ in range(300):
        top, count = rng.randint(1, 4), rng.randint(1, 12)
        values = {number: rng.choice([*range(4), float("inf"), -float("inf")]) for number in range(count)}
        order = rng.sample(sorted(values), count)
        chosen = set()
        for place, number in enumerate(order):
            seen = {other: values[other] for other in order[: max(0, place - rng.randint(0, 2))]}
            if is_among_best(number, values[number], seen, top=top, maximize=maximize):
                chosen.add(number)
        assert set(sort_best_first(values, maximize=maximize)[:top]) <= chosen


@pytest.mark.parametrize(("number", "value", "among"), [(3, 0.8, False), (0, 0.8, True), (3, 0.85, True)])
def test_a_tie_is_won_by_the_earlier_trial(number: int, value: float, among: bool) -> None:
    assert is_among_best(number, value, {1: 0.9, 2: 0.8}, top=2, maximize=True) is among


def test_the_ranked_trial_is_not_counted_twice() -> None:
    """If a trial's model is rebuilt long after its end, the trial itself is in the list of ended trials."""
    assert is_among_best(1, 0.8, {1: 0.8, 2: 0.9}, top=2, maximize=True)


def several(*vectors: list[float], broken: tuple[int, ...] = ()) -> list[FrozenTrial]:
    """Return COMPLETE trials of two metrics, some of which violate a constraint."""
    trials = []
    for number, values in enumerate(vectors):
        attrs = {VIOLATIONS: ["it is"]} if number in broken else {}
        trial = create_trial(values=values, user_attrs=attrs)
        trial.number = number
        trials.append(trial)
    return trials


def test_several_metrics_are_ranked_by_pareto_fronts() -> None:
    trials = several([0.5, 5.0], [0.9, 9.0], [0.4, 6.0], [0.99, 0.1], [0.3, 1.0], [0.6, 5.0], broken=(3,))
    assert [trial.number for trial in find_pareto_front(trials, (True, False))] == [1, 5, 4]
    assert [trial.number for trial in rank_trials(trials, (True, False))] == [1, 4, 5, 0, 2]
    whoever = [trial.number for trial in rank_trials(trials, (True, False), infeasible=True)]
    assert (whoever[0], len(whoever)) == (3, 6)
    assert find_pareto_front([], (True, False)) == rank_trials([], (True, False)) == []


def test_a_trial_gets_a_model_if_it_ends_on_the_pareto_front() -> None:
    others = [[0.5, 5.0], [0.9, 9.0]]
    maximize = (True, False)
    assert is_on_front([0.6, 4.0], others, maximize)
    assert is_on_front([0.5, 5.0], others, maximize), "equal values do not dominate each other"
    assert not is_on_front([0.4, 5.0], others, maximize)
    assert is_on_front([0.1, 99.0], [], maximize)


@pytest.mark.parametrize(
    "schedule",
    [
        "text",
        [],
        [{"epoch": 0, "trial": "0", "params": {}}],
        [{"epoch": 0, "trial": 0}],
        [{"epoch": 1, "trial": 0, "params": {}}],
        [{"epoch": True, "trial": 0, "params": {}}],
    ],
)
def test_a_damaged_schedule_is_an_error(schedule: Any) -> None:
    trial = create_trial(value=1.0, user_attrs={CONFIG_SCHEDULE: schedule})
    with pytest.raises(SearchError, match=r"'hpsearch:config_schedule' of trial .* is damaged"):
        get_schedule(trial)
