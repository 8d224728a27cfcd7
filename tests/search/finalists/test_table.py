"""The table of the finalists: the winner on new seeds, and the text about it."""

from __future__ import annotations

import re

import pytest
from sqlalchemy import text

from hpsearch.search.console import PlainConsole
from hpsearch.search.finalists.choose import create_or_join
from hpsearch.search.finalists.text import finalist_table, format_confirmation, format_finalists
from hpsearch.search.samplers.suggest import get_resplit_seed
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import SPEC
from hpsearch.storage.records.test_evaluations import record_test_evaluation, write_scores
from hpsearch.storage.study_storage.storage import open_storage
from tests.search.finalists.support import table, train


def test_the_table_of_new_seeds_decides(study: StoredStudy) -> None:
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
    assert "finalists: 3 of 6 runs ended, on 2 new seeds" in format_confirmation(study)

    train(chosen, value)
    found = table(study)
    assert (found.winner, found.tie, found.pending) == (4, (), 0)
    assert found.seeds == tuple(of.seeds)
    row = found.get_row(4)
    assert (row.search_value, row.values, row.mean) == (0.8, (0.85, 0.88), pytest.approx(0.865))
    assert row.spread == pytest.approx(0.0212132, abs=1e-6), "the sample standard deviation"
    lines = format_confirmation(study)
    assert (
        "winner: trial 4, val accuracy 0.8650 on 2 new seeds, standard deviation 0.0212 (0.8000 in the search)" in lines
    )
    assert "the search values of the finalists are too optimistic by 0.0717 on average" in lines


DIVIDED = {"error": 0.01, "epochs": [3, 4], "divided": True, "sizes": [600, 200, 200]}


def test_new_splits_give_an_expected_test_score(study: StoredStudy) -> None:
    chosen, _ = create_or_join(study, top=3, seeds=2)
    of = chosen.spec.finalists_of
    assert of is not None
    assert of.divisions
    train(chosen, lambda trial, seed: 0.8 + trial / 100 + of.seeds.index(seed) / 100, fresh=DIVIDED)
    found = table(study)
    expected = found.expected_score
    assert (found.winner, found.is_resplit) == (4, True)
    assert expected is not None
    assert expected.low < 0.845 < expected.high
    between = f"{expected.low:.4f} to {expected.high:.4f} (90% prediction interval)"
    lines = format_confirmation(study)
    assert lines[0].startswith("winner: trial 4, val accuracy 0.8450 on 2 new splits")
    assert f"expected score on new data: 0.8450, {between}; each seed has a new train/validation split" in lines


@pytest.mark.parametrize(
    ("test", "where"), [(0.84, "within the expected"), (0.5, "below the expected"), (0.99, "above the expected")]
)
def test_the_test_score_is_compared_with_the_expected_one(study: StoredStudy, test: float, where: str) -> None:
    chosen, _ = create_or_join(study, top=3, seeds=2)
    train(chosen, lambda trial, _: 0.8 + trial / 100, fresh=DIVIDED)
    opening = record_test_evaluation(
        study.engine,
        study.study_id,
        trial_number=4,
        model_sha256="0" * 64,
        opened_by="somebody",
        finalists=chosen.spec.name,
    )
    write_scores(study.engine, study.study_id, opening, {"accuracy": test})
    assert re.search(
        rf"^test set: accuracy {test:.4f}, {where} 0\.\d+ to 0\.\d+ \(90% prediction interval\), evaluated",
        last_line(study),
    )


def last_line(study: StoredStudy) -> str:
    return format_confirmation(study)[-1]


def test_fixed_splits_are_mentioned(study: StoredStudy) -> None:
    chosen, _ = create_or_join(study, top=2, seeds=2)
    train(chosen, lambda trial, _: trial / 10, fresh={**DIVIDED, "divided": False})
    lines = format_confirmation(study)
    assert "on 2 new seeds" in lines[0]
    assert lines[1].endswith("test split that depends on the others")


def test_without_sampling_errors_there_is_no_expected_test_score(study: StoredStudy) -> None:
    chosen, _ = create_or_join(study, top=2, seeds=2)
    train(chosen, lambda trial, _: trial / 10, fresh={**DIVIDED, "error": None})
    assert (table(study).winner, table(study).expected_score) == (3, None)
    assert "no prediction interval: the sampling error of the validation data is unknown" in format_confirmation(study)


def test_a_set_of_finalists_from_before_new_splits_continues_without_them(study: StoredStudy, owner_url: str) -> None:
    chosen, _ = create_or_join(study, top=2, seeds=2)
    spec = chosen.attrs[SPEC]
    del spec["finalists_of"]["divisions"]  # the stored format of that version
    open_storage(owner_url, application_name="test owner").set_study_user_attr(chosen.study_id, SPEC, spec)
    again, made = create_or_join(study, top=2, seeds=2)
    assert (again.study_id, made) == (chosen.study_id, False)
    assert get_resplit_seed(again.spec, 0) is None
    assert get_resplit_seed(chosen.spec, 0) == get_resplit_seed(chosen.spec, 1) != get_resplit_seed(chosen.spec, 2)
    train(again, lambda trial, _: trial / 10)
    found = table(study)
    assert (found.winner, found.expected_score, found.is_resplit) == (3, None, False)


def test_a_finalist_without_all_values_cannot_win(study: StoredStudy) -> None:
    chosen, _ = create_or_join(study, top=2, seeds=2)
    of = chosen.spec.finalists_of
    assert of is not None

    def value(trial: int, seed: int) -> float | None:
        return None if (trial, seed) == (1, of.seeds[1]) else 0.9 - trial / 10

    train(chosen, value, trials=3)
    assert format_confirmation(study) == ["finalists: 3 of 4 runs ended, 1 without a value, on 2 new seeds"]
    train(chosen, value)
    found = table(study)
    assert found.winner == 3
    row = found.get_row(1)
    assert (row.values, row.missing_reasons, row.is_complete) == ((0.8, None), (None, "diverged"), False)
    assert (row.mean, row.spread) == (0.8, None)
    assert found.verdict(row) == "incomplete"


def test_no_winner_without_a_complete_finalist(study: StoredStudy) -> None:
    chosen, _ = create_or_join(study, top=2, seeds=1)
    train(chosen, lambda *_: None)
    assert table(study).winner is None
    assert format_confirmation(study) == [
        "finalists: no winner, because no finalist has a value for each of 1 new seed"
    ]


def test_ties_and_unknown_spreads_are_mentioned(study: StoredStudy) -> None:
    chosen, _ = create_or_join(study, top=2, seeds=1)
    train(chosen, lambda *_: 0.75)
    found = table(study)
    assert (found.winner, found.tie, found.get_row(1).spread) == (1, (3,), None)
    lines = format_confirmation(study)
    assert "tied with trial 3 (with one seed, any difference may be chance); the lower trial number wins" in lines


def test_the_table_is_printed_without_truncation(study: StoredStudy, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_finalist_whose_search_value_the_database_lacks_is_not_in_the_table(study: StoredStudy) -> None:
    chosen, _ = create_or_join(study, top=3, seeds=2)
    train(chosen, lambda trial, _: 0.8 + trial / 100)
    for lost, left in (("number = 4", [1, 3]), ("number IN (1, 3)", [])):
        with study.engine.begin() as connection:
            trials = f"SELECT trial_id FROM trials WHERE study_id = {study.study_id} AND {lost}"
            connection.execute(text(f"DELETE FROM trial_values WHERE trial_id IN ({trials})"))
        study.refresh()
        assert sorted(row.trial for row in table(study).rows) == left
        assert table(study).winner == (3 if left else None)
        assert format_confirmation(study)
        finalist_table(study, table(study))


def test_the_runs_of_a_finalist_without_a_search_value_are_pending(study: StoredStudy) -> None:
    create_or_join(study, top=3, seeds=2)
    with study.engine.begin() as connection:
        trials = f"SELECT trial_id FROM trials WHERE study_id = {study.study_id} AND number = 4"
        connection.execute(text(f"DELETE FROM trial_values WHERE trial_id IN ({trials})"))
    study.refresh()
    assert format_finalists(study, table(study))[0].startswith("finalists: 0 of 6 runs ended")
