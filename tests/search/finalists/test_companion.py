"""The study of the finalists: who is chosen, on which seeds, once, and what the verbs make of it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from objectives import ObjectiveError, load_objective
from search.cli import _run
from search.console import PlainConsole
from search.errors import SearchError
from search.finalists import Finalists, read_finalists
from search.finalists.companion import (
    PARENT_TRIAL,
    TRAINING_SEED,
    best_configurations,
    create_or_join,
    parent_of,
    passed_over,
)
from search.finalists.page import confirmation_lines, finalist_table
from search.samplers import derive_seed, training_seed
from search.study import FOLDER, INFEASIBLE, REMOVED, StudyHandle, load_study
from search.suggesting import suggest
from search.test_set import choose_candidate
from storage.claims import SPEC, STOPPED, Claim, Claims, Nothing
from storage.run_book import RunBook
from storage.studies import open_storage
from storage.study_storage import PostgresStorage
from storage.test_set import open_test_set, write_scores
from tests.search.pruning.test_reasons import spec_of

Say = Callable[..., str]

SPACE = {"lr": FloatDistribution(1e-4, 1e-1, log=True), "kind": CategoricalDistribution(("cnn", "mlp"))}
VALUES = [0.5, 0.9, 0.7, 0.9, 0.8]


@pytest.fixture
def storage(database_url: str) -> PostgresStorage:
    return open_storage(database_url, application_name="test")


def params(number: int) -> dict[str, object]:
    return {"lr": 1e-2 / (number + 3), "kind": "cnn"}


def finished(number: int, value: float, **changes: object) -> FrozenTrial:
    return create_trial(value=value, params={**params(number), **changes}, distributions=SPACE)


def search(storage: PostgresStorage, name: str, trials: list[FrozenTrial], *, budget: int | None = None) -> StudyHandle:
    study = optuna.create_study(study_name=name, direction="maximize", storage=storage)
    spec = spec_of(name="median").model_dump()
    spec |= {"name": name, "n_trials": len(trials) if budget is None else budget}
    storage.set_study_user_attr(study._study_id, SPEC, spec)
    storage.import_trials(study._study_id, trials)
    return load_study(storage, name)


@pytest.fixture
def handle(storage: PostgresStorage) -> StudyHandle:
    return search(storage, "s", [finished(n, v) for n, v in enumerate(VALUES)])


def train(held: StudyHandle, value_of: Callable[[int, int], float | None], *, trials: int | None = None) -> None:
    """Run waiting trials as a worker does, with values that are made up; None diverges."""
    claims = Claims(held.storage.engine, held.study_id, worker="host:1")
    of = held.spec.finalists_of
    assert of is not None
    done = 0
    while trials is None or done < trials:
        claim = claims.claim()
        if isinstance(claim, Nothing):
            break
        assert isinstance(claim, Claim)
        value = value_of(*of.assignment(claim.number))
        if value is None:
            claims.settle(claim, "PRUNED", "infeasible", attrs={INFEASIBLE: True})
        else:
            claims.settle(claim, "COMPLETE", "complete", value=value)
        done += 1


def table(handle: StudyHandle) -> Finalists:
    found = read_finalists(handle)
    assert found is not None
    return found


# The choice of finalists


def test_the_best_are_chosen_the_earliest_first_and_none_twice(storage: PostgresStorage) -> None:
    trials = [finished(n, v) for n, v in enumerate(VALUES)]
    trials += [finished(1, 0.95), finished(6, float("inf")), create_trial(state=TrialState.FAIL)]
    trials += [create_trial(state=TrialState.PRUNED, value=0.99, params=params(8), distributions=SPACE)]
    handle = search(storage, "s", trials)
    assert [t.number for t in best_configurations(handle, 3)] == [5, 3, 4], "trial 1 is trial 5 again"
    assert [t.number for t in best_configurations(handle, 99)] == [5, 3, 4, 2, 0]


def test_all_trials_wait_in_turns_with_fixed_parameters_and_common_fresh_seeds(handle: StudyHandle) -> None:
    held, created = create_or_join(handle, top=3, seeds=2)
    assert created
    assert held.spec.name == "s.finalists"
    of = held.spec.finalists_of
    assert of is not None
    assert (of.study, of.study_id, of.trials) == ("s", handle.study_id, [1, 3, 4])
    trials = held.trials()
    assert [t.state for t in trials] == [TrialState.WAITING] * 6
    assert [t.user_attrs[PARENT_TRIAL] for t in trials] == [1, 3, 4, 1, 3, 4]
    assert [t.user_attrs[TRAINING_SEED] for t in trials] == [of.seeds[0]] * 3 + [of.seeds[1]] * 3
    assert [training_seed(held.spec, t.number) for t in trials] == [t.user_attrs[TRAINING_SEED] for t in trials]
    for trial in trials:
        assert trial.system_attrs["fixed_params"] == params(trial.user_attrs[PARENT_TRIAL])
    searched = {derive_seed(handle.spec.seed, "trial", n) for n in range(len(VALUES))}
    assert len(searched | set(of.seeds)) == len(VALUES) + 2
    same = ("objective", "metric", "direction", "epochs", "seed", "retries", "retry_on")
    assert [getattr(held.spec, key) for key in same] == [getattr(handle.spec, key) for key in same]
    assert (held.spec.n_trials, held.spec.pruner.name, held.spec.timeout) == (6, "none", None)
    assert held.attrs[FOLDER] != handle.folder
    assert [t.state for t in handle.trials()] == [TrialState.COMPLETE] * 5, "the search knows nothing of it"
    assert load_study(handle.storage, "s.finalists").spec == held.spec
    assert parent_of(held).study_id == handle.study_id


def test_the_budget_is_exact(handle: StudyHandle) -> None:
    held, _ = create_or_join(handle, top=2, seeds=2)
    held.storage.import_trials(held.study_id, [create_trial(state=TrialState.WAITING)])  # by a curious hand
    train(held, lambda *_: 0.5)
    assert [t.state.name for t in held.trials()] == ["COMPLETE"] * 4 + ["WAITING"]
    assert table(handle).pending == 0


def test_a_second_call_joins_the_frozen_set(handle: StudyHandle) -> None:
    held, _ = create_or_join(handle, top=2, seeds=2)
    handle.storage.import_trials(handle.study_id, [finished(9, 0.99)])
    for given in ({"top": None, "seeds": None}, {"top": 2, "seeds": 2}):
        again, created = create_or_join(handle, **given)
        assert (again.study_id, again.spec, created) == (held.study_id, held.spec, False)
    with pytest.raises(SearchError, match=r"'s' were chosen with another setting \(--top: 2 -> 3; --seeds: 2 -> 1\)"):
        create_or_join(handle, top=3, seeds=1)


def test_a_set_smaller_than_asked_for_is_joined_by_the_same_words(handle: StudyHandle) -> None:
    held, _ = create_or_join(handle, top=9, seeds=1)
    assert held.spec.n_trials == 5
    assert create_or_join(handle, top=9, seeds=1)[0].study_id == held.study_id


def test_a_new_set_has_seeds_that_no_other_has(handle: StudyHandle) -> None:
    first, _ = create_or_join(handle, top=2, seeds=3)
    second, created = create_or_join(handle, top=2, seeds=3, new_set=True)
    assert (created, second.spec.name) == (True, "s.finalists-2")
    assert first.spec.finalists_of is not None
    assert second.spec.finalists_of is not None
    assert len({*first.spec.finalists_of.seeds, *second.spec.finalists_of.seeds}) == 6
    assert table(handle).study == "s.finalists-2", "neither has a winner: the newest counts"
    assert create_or_join(handle, top=None, seeds=None)[0].study_id == second.study_id
    handle.storage.delete_study(second.study_id)
    assert table(handle).study == "s.finalists"


def test_a_new_set_counts_from_when_it_has_a_winner(handle: StudyHandle) -> None:
    first, _ = create_or_join(handle, top=2, seeds=1)
    train(first, lambda trial, _: {1: 0.6, 3: 0.7}[trial])
    second, _ = create_or_join(handle, top=2, seeds=1, new_set=True)
    train(second, lambda *_: 0.6, trials=1)
    assert (table(handle).study, table(handle).winner) == ("s.finalists", 3)
    assert confirmation_lines(handle)[0].startswith("winner: trial 3")
    assert confirmation_lines(handle)[-1] == (
        "chosen anew, in s.finalists-2: finalists: 1 of 2 trained, on 1 fresh seed"
    )
    with pytest.raises(SearchError, match=r"chosen anew, in s.finalists-2, and are not done: go on with"):
        choose_candidate(handle, trial=None, unconfirmed=False)
    assert choose_candidate(handle, trial=3, unconfirmed=True).finalists == "s.finalists"
    train(second, lambda *_: 0.5)
    assert (table(handle).study, table(handle).winner) == ("s.finalists-2", 1)
    assert len(confirmation_lines(handle)) == 3


def test_a_trial_whose_model_was_removed_is_passed_over(handle: StudyHandle, database_url: str) -> None:
    best = handle.trials()[1]
    with RunBook(handle.storage.engine).opening(best._trial_id) as page:
        page.note({REMOVED: "hpsearch gc removed its model"})
    again = load_study(open_storage(database_url, application_name="another process"), "s")
    assert [trial.number for trial in best_configurations(again, 3)] == [3, 4, 2]
    assert passed_over(again, 3) == [1]


def test_a_set_that_is_deleted_is_made_again_as_it_was(handle: StudyHandle) -> None:
    first, _ = create_or_join(handle, top=2, seeds=2)
    handle.storage.delete_study(first.study_id)
    assert create_or_join(handle, top=2, seeds=2)[0].spec == first.spec


def test_somebody_elses_study_of_the_name_is_left_alone(handle: StudyHandle, storage: PostgresStorage) -> None:
    optuna.create_study(study_name="s.finalists", storage=storage)
    assert create_or_join(handle, top=2, seeds=2)[0].spec.name == "s.finalists-2"


def test_a_long_name_is_cut(storage: PostgresStorage) -> None:
    handle = search(storage, "s" * 100, [finished(0, 0.5)])
    held, _ = create_or_join(handle, top=1, seeds=1)
    assert held.spec.name == "s" * 90 + ".finalists"
    assert table(handle).study == held.spec.name


def race(url: str, seeds: int) -> tuple[int, bool]:
    held, created = create_or_join(load_study(open_storage(url, application_name="racer"), "s"), top=2, seeds=seeds)
    return held.study_id, created


def test_eight_processes_make_one_set(handle: StudyHandle, database_url: str) -> None:
    with multiprocessing.get_context("fork").Pool(8) as pool:
        made = pool.starmap(race, [(database_url, 2)] * 8, chunksize=1)
    assert len({study_id for study_id, _ in made}) == 1
    assert sum(created for _, created in made) == 1
    assert table(handle).pending == 4


def test_finalists_wait_for_the_end_of_the_search(storage: PostgresStorage) -> None:
    handle = search(storage, "s", [finished(0, 0.5)], budget=2)
    with pytest.raises(SearchError, match=r"'s' is not over, 1 of its 2 trials are done.*: hpsearch stop s$"):
        create_or_join(handle, top=1, seeds=1)
    claim = Claims(storage.engine, handle.study_id, worker="host:1").claim()
    assert isinstance(claim, Claim)
    handle.set_attr(STOPPED, "by ann@host")
    with pytest.raises(SearchError, match=r"has 1 running trial: wait for the end: hpsearch stop s --wait$"):
        create_or_join(handle, top=1, seeds=1)
    Claims(storage.engine, handle.study_id, worker="host:1").settle(claim, "WAITING", "released")
    assert create_or_join(handle, top=1, seeds=1)[1]


def test_without_a_complete_trial_there_is_no_finalist(storage: PostgresStorage) -> None:
    handle = search(storage, "s", [create_trial(state=TrialState.FAIL)])
    with pytest.raises(SearchError, match="has no complete trial"):
        create_or_join(handle, top=1, seeds=1)


def test_a_configuration_that_the_code_no_longer_gives_is_refused(handle: StudyHandle) -> None:
    held, _ = create_or_join(handle, top=1, seeds=1)
    claim = Claims(held.storage.engine, held.study_id, worker="host:1").claim()
    assert isinstance(claim, Claim)
    with pytest.raises(ObjectiveError, match=r"not the configuration of trial 1 any more \(batch_size, .*kind, .*lr"):
        suggest(load_objective("digits"), held.open(), claim, held.spec)
    assert held.trials()[0].params == {}


def test_a_failed_finalist_is_tried_again(handle: StudyHandle, say: Say) -> None:
    held, _ = create_or_join(handle, top=1, seeds=2)
    train(held, lambda *_: None)
    assert "hpsearch finalists s" in say("retry", "s.finalists", "--trial", "1")
    assert table(handle).pending == 1
    train(held, lambda *_: 0.75)
    assert table(handle).row(1).values == (None, 0.75)


# The table


def test_the_table_of_fresh_seeds_decides(handle: StudyHandle) -> None:
    held, _ = create_or_join(handle, top=3, seeds=2)
    values = {1: (0.80, 0.82), 3: (0.70, 0.72), 4: (0.85, 0.88)}
    of = held.spec.finalists_of
    assert of is not None

    def value(trial: int, seed: int) -> float:
        return values[trial][of.seeds.index(seed)]

    train(held, value, trials=3)
    found = table(handle)
    assert (found.winner, found.pending) == (None, 3)
    assert [row.values for row in found.rows] == [(0.80, None), (0.70, None), (0.85, None)]
    assert [row.mean for row in found.rows] == [0.80, 0.70, 0.85]
    assert "finalists: 3 of 6 trained, on 2 fresh seeds" in confirmation_lines(handle)

    train(held, value)
    found = table(handle)
    assert (found.winner, found.tie, found.pending) == (4, (), 0)
    assert found.seeds == tuple(of.seeds)
    row = found.row(4)
    assert (row.search_value, row.values, row.mean) == (0.8, (0.85, 0.88), pytest.approx(0.865))
    assert row.spread == pytest.approx(0.0212132, abs=1e-6), "the sample standard deviation"
    lines = confirmation_lines(handle)
    assert "winner: trial 4, val accuracy 0.8650 on 2 fresh seeds, spread 0.0212 (the search said 0.8000)" in lines
    assert "the search over-stated its finalists by 0.0717 on average" in lines


def test_who_lacks_a_value_cannot_win(handle: StudyHandle) -> None:
    held, _ = create_or_join(handle, top=2, seeds=2)
    of = held.spec.finalists_of
    assert of is not None
    train(held, lambda trial, seed: None if (trial, seed) == (1, of.seeds[1]) else 0.9 - trial / 10)
    found = table(handle)
    assert found.winner == 3
    row = found.row(1)
    assert (row.values, row.reasons, row.whole) == ((0.8, None), (None, "diverged"), False)
    assert (row.mean, row.spread) == (0.8, None)
    assert found.verdict(row) == "incomplete"


def test_no_winner_where_none_is_whole(handle: StudyHandle) -> None:
    held, _ = create_or_join(handle, top=2, seeds=1)
    train(held, lambda *_: None)
    assert table(handle).winner is None
    assert confirmation_lines(handle) == ["finalists: no winner, none has a value for each of 1 fresh seed"]


def test_ties_and_unknown_spreads_are_said_to_be_so(handle: StudyHandle) -> None:
    held, _ = create_or_join(handle, top=2, seeds=1)
    train(held, lambda *_: 0.75)
    found = table(handle)
    assert (found.winner, found.tie, found.row(1).spread) == (1, (3,), None)
    lines = confirmation_lines(handle)
    assert "a tie with trial 3: their values are equal; the better mean is taken" in lines
    assert "with one seed the spread is unknown: a difference may be chance" in lines


def test_the_table_is_printed_whole(handle: StudyHandle, capsys: pytest.CaptureFixture[str]) -> None:
    held, _ = create_or_join(handle, top=3, seeds=2)
    of = held.spec.finalists_of
    assert of is not None
    train(held, lambda trial, seed: None if trial == 3 else 0.8 + trial / 100 + of.seeds.index(seed) / 10)
    PlainConsole().print(finalist_table(handle, table(handle)))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        ["1", "4", "0.8000", "0.8900", "0.0707", "-0.0900", "0.8400", "0.9400", "winner"],
        ["2", "1", "0.9000", "0.8600", "0.0707", "+0.0400", "0.8100", "0.9100"],
        ["-", "3", "0.9000", "-", "unknown", "-", "diverged", "diverged", "cannot", "win"],
    ]


# The verbs


@pytest.fixture
def say(database_url: str, capsys: pytest.CaptureFixture[str]) -> Say:
    def run(*arguments: str, code: int = 0) -> str:
        assert _run([*arguments, "--storage-url", database_url]) == code
        captured = capsys.readouterr()
        assert captured.err.count("\n") == (1 if code else 0), captured.err
        return captured.err if code else captured.out

    return run


def test_verbs_know_finalists(handle: StudyHandle, say: Say) -> None:
    held, _ = create_or_join(handle, top=2, seeds=2)
    assert "s.finalists (finalists)" in say("studies")
    assert "holds the finalists of 's'" in say("extend", "s.finalists", "--trials", "+1", code=2)
    assert "in the report of 's'" in say("report", "s.finalists", code=2)
    assert "open the test set of 's'" in say("open-test", "s.finalists", code=2)
    assert "hpsearch finalists s" in say("start", "s.finalists")
    assert f"trials=[1, 3], seeds={held.spec.finalists_of.seeds}" in say("show", "s.finalists")  # type: ignore[union-attr]
    assert "finalists: 0 of 4 trained" in say("show", "s")
    train(held, lambda trial, _seed: 0.8 + trial / 100)
    assert "winner: trial 3, val accuracy 0.8300 on 2 fresh seeds" in say("show", "s")


def test_the_search_takes_its_finalists_along(handle: StudyHandle, say: Say) -> None:
    held, _ = create_or_join(handle, top=2, seeds=2)
    claim = Claims(held.storage.engine, held.study_id, worker="host:1").claim()
    assert isinstance(claim, Claim)
    assert "'s.finalists' has 1 running trial:" in say("delete", "s", "--yes", code=2)
    Claims(held.storage.engine, held.study_id, worker="host:1").settle(claim, "WAITING", "released")
    said = say("delete", "s", "--yes")
    assert said.splitlines() == [f"deleted {name}; its runs in MLflow stay" for name in ("s.finalists", "s")]
    assert held.storage.get_all_studies() == []


def test_finalists_outlive_a_search_that_another_program_deletes(handle: StudyHandle) -> None:
    held, _ = create_or_join(handle, top=2, seeds=2)
    handle.storage.delete_study(handle.study_id)
    with pytest.raises(SearchError, match=r"'s', whose finalists 's.finalists' holds, was deleted"):
        parent_of(held)
    again = search(handle.storage, "s", [finished(0, 0.5)])
    assert read_finalists(again) is None, "another study under the old name"
    with pytest.raises(SearchError, match="was deleted"):
        parent_of(held)
    assert create_or_join(again, top=1, seeds=1)[0].spec.name == "s.finalists-2"


def test_a_spec_file_makes_no_finalists(say: Say, tmp_path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text('objective = "digits"\n[finalists_of]\nstudy = "s"\n')
    assert "finalists_of cannot be set" in say("run", "--spec", str(path), code=2)


# Whom the test set is opened for


def test_the_test_set_wants_a_winner(handle: StudyHandle, say: Say) -> None:
    assert "'s' has no finalists" in say("open-test", "s", "--yes", code=2)
    assert "--trial 77" in say("open-test", "s", "--yes", "--unconfirmed", "--trial", "77", code=2)
    held, _ = create_or_join(handle, top=2, seeds=1)
    assert "are not done, 2 are left" in say("open-test", "s", "--yes", code=2)
    train(held, lambda trial, _seed: 0.8 + trial / 100)
    assert "is trial 3: leave it out, or add --unconfirmed" in say("open-test", "s", "--yes", "--trial", "1", code=2)
    assert "names no tracking server" in say("open-test", "s", "--yes", code=2)


def test_an_opened_test_set_is_shown_and_not_opened_again(handle: StudyHandle, say: Say) -> None:
    engine = handle.storage.engine
    opening = open_test_set(
        engine, handle.study_id, trial_number=1, model_sha256="a" * 64, opened_by="ann@host", finalists=None
    )
    assert "opened on" in say("open-test", "s", "--yes", "--trial", "3", "--unconfirmed", code=2)
    write_scores(engine, handle.study_id, opening, {"loss": 0.5, "accuracy": 0.875})
    assert "test set: accuracy 0.8750, opened on " in say("show", "s")
    refused = say("open-test", "s", "--yes", code=2)
    assert "by ann@host for trial 1, and it opens once; see it with: hpsearch show s" in refused
