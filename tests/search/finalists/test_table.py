"""The table of the finalists: who wins on fresh seeds, and what is said of it."""

from __future__ import annotations

import pytest

from search.console import PlainConsole
from search.finalists.study import (
    create_or_join,
)
from search.finalists.text import confirmation_lines, finalist_table
from search.study.study import StoredStudy
from tests.search.finalists.support import table, train


def test_the_table_of_fresh_seeds_decides(study: StoredStudy) -> None:
    chosen, _ = create_or_join(study, top=3, seeds=2)
    values = {1: (0.80, 0.82), 3: (0.70, 0.72), 4: (0.85, 0.88)}
    of = chosen.spec.finalists_of
    assert of is not None

    def value(trial: int, seed: int) -> float:
        return values[trial][of.seeds.index(seed)]

    train(chosen, value, trials=3)
    found = table(study)
    assert (found.winner, found.pending) == (None, 3)
    assert [row.values for row in found.rows] == [(0.80, None), (0.70, None), (0.85, None)]
    assert [row.mean for row in found.rows] == [0.80, 0.70, 0.85]
    assert "finalists: 3 of 6 trained, on 2 fresh seeds" in confirmation_lines(study)

    train(chosen, value)
    found = table(study)
    assert (found.winner, found.tie, found.pending) == (4, (), 0)
    assert found.seeds == tuple(of.seeds)
    row = found.row(4)
    assert (row.search_value, row.values, row.mean) == (0.8, (0.85, 0.88), pytest.approx(0.865))
    assert row.spread == pytest.approx(0.0212132, abs=1e-6), "the sample standard deviation"
    lines = confirmation_lines(study)
    assert "winner: trial 4, val accuracy 0.8650 on 2 fresh seeds, spread 0.0212 (the search said 0.8000)" in lines
    assert "the search over-stated its finalists by 0.0717 on average" in lines


def test_who_lacks_a_value_cannot_win(study: StoredStudy) -> None:
    chosen, _ = create_or_join(study, top=2, seeds=2)
    of = chosen.spec.finalists_of
    assert of is not None
    train(chosen, lambda trial, seed: None if (trial, seed) == (1, of.seeds[1]) else 0.9 - trial / 10)
    found = table(study)
    assert found.winner == 3
    row = found.row(1)
    assert (row.values, row.reasons, row.whole) == ((0.8, None), (None, "diverged"), False)
    assert (row.mean, row.spread) == (0.8, None)
    assert found.verdict(row) == "incomplete"


def test_no_winner_where_none_is_whole(study: StoredStudy) -> None:
    chosen, _ = create_or_join(study, top=2, seeds=1)
    train(chosen, lambda *_: None)
    assert table(study).winner is None
    assert confirmation_lines(study) == ["finalists: no winner, none has a value for each of 1 fresh seed"]


def test_ties_and_unknown_spreads_are_said_to_be_so(study: StoredStudy) -> None:
    chosen, _ = create_or_join(study, top=2, seeds=1)
    train(chosen, lambda *_: 0.75)
    found = table(study)
    assert (found.winner, found.tie, found.row(1).spread) == (1, (3,), None)
    lines = confirmation_lines(study)
    assert "a tie with trial 3: their values are equal; the better mean is taken" in lines
    assert "with one seed the spread is unknown: a difference may be chance" in lines


def test_the_table_is_printed_whole(study: StoredStudy, capsys: pytest.CaptureFixture[str]) -> None:
    chosen, _ = create_or_join(study, top=3, seeds=2)
    of = chosen.spec.finalists_of
    assert of is not None
    train(chosen, lambda trial, seed: None if trial == 3 else 0.8 + trial / 100 + of.seeds.index(seed) / 10)
    PlainConsole().print(finalist_table(study, table(study)))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        ["1", "4", "0.8000", "0.8900", "0.0707", "-0.0900", "0.8400", "0.9400", "winner"],
        ["2", "1", "0.9000", "0.8600", "0.0707", "+0.0400", "0.8100", "0.9100"],
        ["-", "3", "0.9000", "-", "unknown", "-", "diverged", "diverged", "cannot", "win"],
    ]
