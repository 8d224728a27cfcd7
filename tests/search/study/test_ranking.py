"""The order of best first, and who is among the best at its end."""

from __future__ import annotations

import random

import pytest

from search.study.ranking import best_first, is_among_best


@pytest.mark.parametrize("maximize", [True, False])
def test_the_final_best_were_among_the_best_when_they_ended(maximize: bool) -> None:
    """With ties, in whatever order trials end, and though a trial may not see those that end just then."""
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
        assert set(best_first(values, maximize=maximize)[:top]) <= chosen


@pytest.mark.parametrize(("number", "value", "among"), [(3, 0.8, False), (0, 0.8, True), (3, 0.85, True)])
def test_a_tie_is_the_earlier_trials(number: int, value: float, among: bool) -> None:
    assert is_among_best(number, value, {1: 0.9, 2: 0.8}, top=2, maximize=True) is among


def test_who_is_asked_about_is_not_counted_twice() -> None:
    """A trial whose model is made again, long after its end, is among those that have ended."""
    assert is_among_best(1, 0.8, {1: 0.8, 2: 0.9}, top=2, maximize=True)
