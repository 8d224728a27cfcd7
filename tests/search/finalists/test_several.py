"""Finalists in multi-objective studies: the Pareto front is retrained, and then has a Pareto front of its own."""

from __future__ import annotations

import copy

import pytest

from hpsearch.search.console import PlainConsole
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.choose import create_or_join, make_or_join_refit, select_finalists
from hpsearch.search.finalists.refit import read_refit
from hpsearch.search.finalists.table import Finalists
from hpsearch.search.finalists.text import finalist_table, format_confirmation, rank_finalists
from hpsearch.search.promotion.evaluate_test import choose_candidate
from hpsearch.search.promotion.evidence import Confirmation
from hpsearch.search.promotion.preference import parse_preference, select_preferred
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.tracking.study_run import make_table_record
from hpsearch.storage.attributes import REMOVED_BY
from hpsearch.storage.records.test_evaluations import record_test_evaluation, write_scores
from hpsearch.storage.study_storage.storage import PostgresStorage
from tests.search.finalists.support import Say, ended, search, search_several, table, train, train_runs

BOUND = {"constraints": {"latency_ms": "<= 10"}}
OUT = "latency_ms 20 is not <= 10"

# 1, 2, 0 and 5 are the Pareto front. 5 has the parameters of 0, and only 5 dominates 6.
TRIALS = [
    ended(0, 0.90, 5.0),
    ended(1, 0.95, 9.0),
    ended(2, 0.80, 2.0),
    ended(3, 0.85, 6.0),
    ended(4, 0.99, 20.0, broken=OUT),
    ended(5, 0.905, 5.2, like=0),
    ended(6, 0.903, 5.4),
]

FRESH = {
    0: ([0.90, 5.0], [0.92, 5.2]),
    1: ([0.90, 9.0], [0.90, 9.2]),
    2: ([0.80, 2.0], [0.81, 2.2]),
}

Fresh = dict[int, tuple[list[float] | None, ...]]


@pytest.fixture
def study(storage: PostgresStorage) -> StoredStudy:
    return search_several(storage, "s", TRIALS, **BOUND)


def confirm(study: StoredStudy, fresh: Fresh = FRESH, *, trials: int | None = None) -> Finalists:
    """Train finalists on two seeds."""
    chosen, _ = create_or_join(study, top=None, seeds=2)
    of = chosen.spec.finalists_of
    assert of is not None
    info = {"error": 0.01, "divided": True, "sizes": [60, 20, 20], "epochs": [1, 2]}
    train(chosen, lambda trial, seed: fresh[trial][of.seeds.index(seed)], trials=trials, fresh=info)
    return table(study)


def numbers(study: StoredStudy, top: int = 9, *, infeasible: bool = False, removed: bool = False) -> list[int]:
    return [t.number for t in select_finalists(study, top, infeasible=infeasible, removed=removed)]


def why(study: StoredStudy, trial: int) -> str:
    return Confirmation.read(study).explain_unconfirmed(trial)


def test_finalists_are_the_pareto_front_with_each_configuration_once(study: StoredStudy) -> None:
    assert [trial.number for trial in study.front()] == [1, 5, 0, 2]
    assert numbers(study) == [1, 2, 0], "the ends of the front have most room about them"
    assert numbers(study, 2) == [1, 2]
    assert set(numbers(study, infeasible=True)) == {0, 1, 2, 4}
    chosen, created = create_or_join(study, top=None, seeds=1)
    of = chosen.spec.finalists_of
    assert of is not None
    assert (created, of.trials, of.top, chosen.spec.n_trials) == (True, [1, 2, 0], 3, 3)
    assert chosen.spec.direction_by_metric == study.spec.direction_by_metric
    assert create_or_join(study, top=None, seeds=None)[1] is False


def test_a_removed_finalist_is_replaced_by_a_trial_only_it_dominates(storage: PostgresStorage) -> None:
    def without(*gone: int) -> StoredStudy:
        trials = copy.deepcopy(TRIALS)
        for number in gone:
            trials[number].user_attrs = {REMOVED_BY: "gc"}
        return search_several(storage, f"s-{len(gone)}", trials, **BOUND)

    assert numbers(without(0)) == [1, 2, 5]
    both = without(0, 5)
    assert set(numbers(both)) == {1, 2, 6}
    assert numbers(both, removed=True) == [1, 2, 0]


def test_no_feasible_trial_is_an_error(storage: PostgresStorage) -> None:
    study = search_several(storage, "b", [ended(0, 0.9, 20.0, broken=OUT)], **BOUND)
    with pytest.raises(SearchError, match=r"no complete trial within its constraints; .*--infeasible$"):
        create_or_join(study, top=None, seeds=1)
    chosen, _ = create_or_join(study, top=None, seeds=1, infeasible=True)
    assert chosen.spec.finalists_of is not None
    assert chosen.spec.finalists_of.trials == [0]


def test_the_pareto_front_of_finalists_is_that_of_the_means(
    study: StoredStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    found = confirm(study, trials=5)
    assert (found.front, found.winner, found.is_decided, found.pending) == ((), None, False, 1)
    found = confirm(study)
    assert (found.front, found.winner, found.tie, found.expected_score) == ((0, 2), None, (), None)
    assert found.get_row(0).means == (pytest.approx(0.91), pytest.approx(5.1))
    assert (found.get_row(0).search_values, found.get_row(0).mean) == ((0.90, 5.0), pytest.approx(0.91))
    assert [found.verdict(found.get_row(trial)) for trial in (0, 1, 2)] == ["front", "dominated", "front"]
    assert found.find_dominating(found.get_row(1), study.spec.maximize_each) == [0]
    assert [found.is_confirmed(trial) for trial in (0, 1, 2)] == [True, False, True]
    assert [row.trial for row in rank_finalists(study, found)] == [0, 2, 1]
    assert format_confirmation(study) == [
        "Pareto front on 2 new splits: trials 0 and 2",
        "dominated on new seeds: trial 1",
    ]
    PlainConsole().print(finalist_table(study, found))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["trial", "accuracy", "retrained", "latency_ms", "retrained"],
        ["0", "0.9", "0.91", "5", "5.1", "front"],
        ["2", "0.8", "0.805", "2", "2.1", "front"],
        ["1", "0.95", "0.9", "9", "9.1", "dominated", "by", "0"],
    ]
    record = make_table_record(study, found)
    assert (record["front"], record["directions"], record["winner"]) == ([0, 2], study.spec.directions, None)


def test_a_finalist_that_dominates_all_others_wins(study: StoredStudy) -> None:
    found = confirm(study, {**FRESH, 0: ([0.95, 1.0], [0.96, 1.0])})
    assert (found.front, found.winner) == ((0,), 0)
    assert [found.verdict(found.get_row(trial)) for trial in (0, 1, 2)] == ["winner", "dominated", "dominated"]
    assert format_confirmation(study)[0] == "winner: trial 0, which dominates all other finalists on 2 new splits"
    candidate = choose_candidate(study, trial=None, unconfirmed=False)
    assert (candidate.trial.number, candidate.finalists) == (0, "s.finalists")


def test_a_finalist_without_values_for_all_seeds_is_not_on_the_pareto_front(study: StoredStudy) -> None:
    found = confirm(study, {**FRESH, 2: ([0.99, 0.1], None)})
    assert (found.front, found.winner) == ((0,), 0)
    assert found.verdict(found.get_row(2)) == "incomplete"
    assert [row.trial for row in rank_finalists(study, found)] == [0, 1, 2]


def test_without_complete_finalists_there_is_no_pareto_front(study: StoredStudy) -> None:
    found = confirm(study, dict.fromkeys(FRESH, (None, None)))
    assert (found.front, found.winner, found.is_decided) == ((), None, False)
    assert format_confirmation(study) == [
        "finalists: no winner, because no finalist has a value for each of 2 new seeds"
    ]
    assert why(study, 0) == "the finalists have no winner: none has a value for each seed"


def test_the_test_set_opens_for_the_named_trial_of_the_pareto_front(study: StoredStudy) -> None:
    confirm(study)
    with pytest.raises(SearchError, match=r"no finalist of 's' dominates all others; choose one with --trial \(0, 2\)"):
        choose_candidate(study, trial=None, unconfirmed=False)
    with pytest.raises(SearchError, match=r"choose one with --trial \(0, 2\)"):
        choose_candidate(study, trial=1, unconfirmed=False)
    for trial in (0, 2):
        candidate = choose_candidate(study, trial=trial, unconfirmed=False)
        assert (candidate.trial.number, candidate.finalists) == (trial, "s.finalists")
    unconfirmed = choose_candidate(study, trial=1, unconfirmed=True)
    assert (unconfirmed.trial.number, unconfirmed.finalists) == (1, None)


def test_errors_of_a_choice_from_the_pareto_front(study: StoredStudy) -> None:
    assert why(study, 0) == "no finalists were trained"
    confirm(study, trials=2)
    assert why(study, 0) == "the finalists have no winner: 4 unfinished runs"
    confirm(study)
    assert why(study, 1) == "the winner among the finalists is trial 0 or 2"
    assert why(study, 0) == why(study, 2) == "the model was not evaluated on the test set"
    opening = record_test_evaluation(
        study.engine, study.study_id, trial_number=2, model_sha256="0" * 64, opened_by="me", finalists="s.finalists"
    )
    assert why(study, 0) == "the test set was evaluated with trial 2"
    assert why(study, 2) == "the test evaluation has no scores"
    write_scores(study.engine, study.study_id, opening, {"accuracy": 0.8})
    assert why(study, 2) == ""


def test_a_named_trial_of_the_pareto_front_is_refit(study: StoredStudy) -> None:
    confirm(study)
    with pytest.raises(SearchError, match=r"no finalist of 's' dominates all others; choose one with --trial \(0, 2\)"):
        make_or_join_refit(study, seeds=None)
    with pytest.raises(SearchError, match=r"choose one with --trial \(0, 2\)"):
        make_or_join_refit(study, seeds=None, trial=1)
    made, created = make_or_join_refit(study, seeds=3, trial=2)
    of = made.spec.finalists_of
    assert of is not None
    assert (created, of.trials, of.refit) == (True, [2], 3)
    train_runs(made, [0.3, 0.1, 0.2], value=[0.9, 1.0])
    _, found = read_refit(study, 2)
    assert (found.selected_trial, found.search_trial) == (2, 2)
    assert why(made, 2) == "the model was not evaluated on the test set yet"
    with pytest.raises(SearchError, match="the winner of study 's' has no refit yet"):
        read_refit(study, 0)


PREFERENCES = [
    ("latency_ms", 2),
    ("accuracy", 1),
    ("accuracy >= 0.9 then latency_ms", 0),
    ("accuracy > 0.9 then latency_ms", 5),
    ("latency_ms<6 and accuracy>=0.9", 5),
    ("latency_ms <= 5.2, accuracy >= 0.7 then latency_ms", 2),
    ("latency_ms <= 5 and latency_ms > 2", 0),
]


@pytest.mark.parametrize(("text", "trial"), PREFERENCES)
def test_prefer_selects_a_trial_of_the_pareto_front(study: StoredStudy, text: str, trial: int) -> None:
    assert select_preferred(study, text) == trial


def test_prefer_uses_the_means_of_finalists(study: StoredStudy, say: Say) -> None:
    assert select_preferred(study, "accuracy") == 1
    confirm(study)
    assert select_preferred(study, "accuracy") == 0, "the search's best is dominated on new seeds"
    assert select_preferred(study, "accuracy >= 0.8 then latency_ms") == 2
    with pytest.raises(SearchError) as error:
        select_preferred(study, "accuracy >= 0.95")
    assert str(error.value) == (
        "--prefer 'accuracy >= 0.95': no Pareto-optimal trial matches; the nearest are trial 0 (accuracy 0.91, "
        "latency_ms 5.1), trial 2 (accuracy 0.805, latency_ms 2.1)"
    )
    assert say("promote", "s", "--prefer", "latency_ms < 1", code=2).endswith(
        "trial 0 (accuracy 0.91, latency_ms 5.1)\n"
    )


def test_prefer_breaks_ties_by_another_metric(storage: PostgresStorage) -> None:
    ways = {"accuracy": "maximize", "latency_ms": "minimize", "model_mb": "minimize"}
    trials = [ended(0, 0.9, 5.0, 3.0), ended(1, 0.8, 5.0, 1.0), ended(2, 0.8, 5.0, 1.0), ended(3, 0.7, 9.0, 0.5)]
    study = search_several(storage, "three", trials, ways=ways)
    assert select_preferred(study, "latency_ms then accuracy") == 0
    assert select_preferred(study, "latency_ms then model_mb") == 1, "of equal ones the earliest"
    assert select_preferred(study, "model_mb <= 2 then latency_ms then model_mb") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("latency", "'latency' is not a condition"),
        ("accuracy == 0.9", "'accuracy == 0.9' is not a condition"),
        ("accuracy >= high", "'high' is not a number"),
        ("accuracy >= nan", "'nan' is not a number"),
        ("", "'' is not a condition"),
        ("accuracy >= 0.9 or latency_ms", "write conditions, then metrics"),
        ("accuracy >= 0.9 then", "with the metrics accuracy, latency_ms"),
        ("accuracy >=", "'accuracy >=' is not a condition"),
    ],
)
def test_an_invalid_prefer_is_an_error_of_one_line(text: str, words: str) -> None:
    with pytest.raises(SearchError) as error:
        parse_preference(text, ["accuracy", "latency_ms"])
    said = str(error.value)
    assert said.startswith(f"--prefer {text!r}: ")
    assert words in said, said
    assert "\n" not in said


def test_prefer_needs_several_metrics_and_a_trial(storage: PostgresStorage) -> None:
    with pytest.raises(SearchError, match="has one metric, accuracy; replace --prefer with --trial"):
        select_preferred(search(storage, "one", [], budget=1), "accuracy")
    nobody = search_several(storage, "nobody", [ended(0, 0.9, 20.0, broken=OUT)], **BOUND)
    with pytest.raises(SearchError, match=r"has no trial to select: all complete trials .* --infeasible"):
        select_preferred(nobody, "accuracy")
    assert select_preferred(nobody, "accuracy", infeasible=True) == 0
