"""The study of the finalists: selected trials, seeds, and creation exactly once."""

from __future__ import annotations

import multiprocessing

import optuna
import pytest
from optuna.trial import TrialState, create_trial

from hpsearch import ObjectiveError, load_objective
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.choose import create_or_join, list_excluded_trials, select_finalists
from hpsearch.search.finalists.text import format_confirmation
from hpsearch.search.promotion.evaluate_test import choose_candidate
from hpsearch.search.samplers.suggest import derive_seed, derive_training_seed, suggest
from hpsearch.search.study.study import StoredStudy, load_parent_study, load_study
from hpsearch.storage.attributes import FOLDER_NAME, PARENT_TRIAL, REMOVED_BY, STOPPED, TRAINING_SEED
from hpsearch.storage.mlflow.run_links import RunLinks
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from tests.factories import SPACE
from tests.search.finalists.support import VALUES, Say, finished, params, search, table, train


def test_the_best_trials_are_selected_once_and_ties_by_number(storage: PostgresStorage) -> None:
    trials = [finished(n, v) for n, v in enumerate(VALUES)]
    trials += [finished(1, 0.95), finished(6, float("inf")), create_trial(state=TrialState.FAIL)]
    trials += [create_trial(state=TrialState.PRUNED, value=0.99, params=params(8), distributions=SPACE)]
    study = search(storage, "s", trials)
    assert [t.number for t in select_finalists(study, 3)] == [5, 3, 4], "trial 1 is trial 5 again"
    assert [t.number for t in select_finalists(study, 99)] == [5, 3, 4, 2, 0]


@pytest.mark.parametrize("seeds", [0, 1_001, 10**9])
def test_an_impossible_number_of_seeds_is_rejected(study: StoredStudy, seeds: int) -> None:
    with pytest.raises(SearchError, match=rf"--seeds must be an integer in \[1, 1000\], not {seeds}"):
        create_or_join(study, top=1, seeds=seeds)


def test_finalist_trials_are_enqueued_in_turns_with_common_new_seeds(study: StoredStudy) -> None:
    chosen, created = create_or_join(study, top=3, seeds=2)
    assert created
    assert chosen.spec.name == "s.finalists"
    of = chosen.spec.finalists_of
    assert of is not None
    assert (of.study, of.study_id, of.trials) == ("s", study.study_id, [1, 3, 4])
    trials = chosen.trials()
    assert [t.state for t in trials] == [TrialState.WAITING] * 6
    assert [t.user_attrs[PARENT_TRIAL] for t in trials] == [1, 3, 4, 1, 3, 4]
    assert [t.user_attrs[TRAINING_SEED] for t in trials] == [of.seeds[0]] * 3 + [of.seeds[1]] * 3
    assert [derive_training_seed(chosen.spec, t.number) for t in trials] == [
        t.user_attrs[TRAINING_SEED] for t in trials
    ]
    for trial in trials:
        assert trial.system_attrs["fixed_params"] == params(trial.user_attrs[PARENT_TRIAL])
    searched = {derive_seed(study.spec.seed, "trial", n) for n in range(len(VALUES))}
    assert len(searched | set(of.seeds)) == len(VALUES) + 2
    same = ("objective", "metric", "direction", "epochs", "seed", "retries", "retry_on")
    assert [getattr(chosen.spec, key) for key in same] == [getattr(study.spec, key) for key in same]
    assert (chosen.spec.n_trials, chosen.spec.pruner.name, chosen.spec.timeout) == (
        6,
        "none",
        None,
    )
    assert chosen.attrs[FOLDER_NAME] != study.folder
    assert [t.state for t in study.trials()] == [TrialState.COMPLETE] * 5, "the search itself is unchanged"
    assert load_study(study.storage, "s.finalists").spec == chosen.spec
    assert load_parent_study(chosen).study_id == study.study_id


def test_the_budget_is_exact(study: StoredStudy) -> None:
    chosen, _ = create_or_join(study, top=2, seeds=2)
    chosen.storage.import_trials(chosen.study_id, [create_trial(state=TrialState.WAITING)])  # added by a user
    train(chosen, lambda *_: 0.5)
    assert [t.state.name for t in chosen.trials()] == ["COMPLETE"] * 4 + ["WAITING"]
    assert table(study).pending == 0


def test_a_second_call_joins_the_same_finalists(study: StoredStudy) -> None:
    chosen, _ = create_or_join(study, top=2, seeds=2)
    study.storage.import_trials(study.study_id, [finished(9, 0.99)])
    for given in ({"top": None, "seeds": None}, {"top": 2, "seeds": 2}):
        again, created = create_or_join(study, **given)
        assert (again.study_id, again.spec, created) == (chosen.study_id, chosen.spec, False)
    with pytest.raises(SearchError, match=r"'s' were chosen with --top 2, not 3; --seeds 2, not 1; remove"):
        create_or_join(study, top=3, seeds=1)


def test_a_smaller_set_of_finalists_is_joined_with_the_same_options(study: StoredStudy) -> None:
    chosen, _ = create_or_join(study, top=9, seeds=1)
    assert chosen.spec.n_trials == 5
    assert create_or_join(study, top=9, seeds=1)[0].study_id == chosen.study_id


def test_a_new_set_of_finalists_has_new_seeds(study: StoredStudy) -> None:
    first, _ = create_or_join(study, top=2, seeds=3)
    second, created = create_or_join(study, top=2, seeds=3, new_set=True)
    assert (created, second.spec.name) == (True, "s.finalists-2")
    assert first.spec.finalists_of is not None
    assert second.spec.finalists_of is not None
    assert len({*first.spec.finalists_of.seeds, *second.spec.finalists_of.seeds}) == 6
    assert table(study).study == "s.finalists-2", "neither has a winner: the newest counts"
    assert create_or_join(study, top=None, seeds=None)[0].study_id == second.study_id
    study.storage.delete_study(second.study_id)
    assert table(study).study == "s.finalists"


def test_a_new_set_of_finalists_counts_once_it_has_a_winner(study: StoredStudy) -> None:
    first, _ = create_or_join(study, top=2, seeds=1)
    train(first, lambda trial, _: {1: 0.6, 3: 0.7}[trial])
    second, _ = create_or_join(study, top=2, seeds=1, new_set=True)
    train(second, lambda *_: 0.6, trials=1)
    assert (table(study).study, table(study).winner) == ("s.finalists", 3)
    assert format_confirmation(study)[0].startswith("winner: trial 3")
    assert format_confirmation(study)[-1] == ("new set, s.finalists-2: finalists: 1 of 2 runs ended, on 1 new seed")
    with pytest.raises(SearchError, match=r"in s.finalists-2, have 1 unfinished run; continue with"):
        choose_candidate(study, trial=None, unconfirmed=False)
    assert choose_candidate(study, trial=3, unconfirmed=True).finalists == "s.finalists"
    train(second, lambda *_: 0.5)
    assert (table(study).study, table(study).winner) == ("s.finalists-2", 1)
    assert format_confirmation(study)[0].startswith("winner: trial 1")
    assert "new set" not in format_confirmation(study)[-1]
    third, _ = create_or_join(study, top=2, seeds=1, new_set=True)
    train(third, lambda *_: None)
    candidate = choose_candidate(study, trial=None, unconfirmed=False)
    assert (candidate.trial.number, candidate.finalists) == (1, "s.finalists-2"), "a set without a winner replaces none"


def test_a_trial_without_its_model_is_skipped(study: StoredStudy, database_url: str) -> None:
    best = study.trials()[1]
    with RunLinks(study.storage.engine).lock_run(best._trial_id) as page:
        page.set_attrs({REMOVED_BY: "hpsearch gc removed its model"})
    again = load_study(open_storage(database_url, application_name="another process"), "s")
    assert [trial.number for trial in select_finalists(again, 3)] == [3, 4, 2]
    assert list_excluded_trials(again, 3) == [1]


def test_a_deleted_set_of_finalists_is_recreated_identically(study: StoredStudy) -> None:
    first, _ = create_or_join(study, top=2, seeds=2)
    study.storage.delete_study(first.study_id)
    assert create_or_join(study, top=2, seeds=2)[0].spec == first.spec


def test_another_study_with_the_name_of_finalists_is_not_changed(study: StoredStudy, storage: PostgresStorage) -> None:
    optuna.create_study(study_name="s.finalists", storage=storage)
    assert create_or_join(study, top=2, seeds=2)[0].spec.name == "s.finalists-2"


def test_a_long_name_of_finalists_is_truncated(storage: PostgresStorage) -> None:
    study = search(storage, "s" * 100, [finished(0, 0.5)])
    chosen, _ = create_or_join(study, top=1, seeds=1)
    assert chosen.spec.name == "s" * 90 + ".finalists"
    assert table(study).study == chosen.spec.name


def race(url: str, seeds: int) -> tuple[int, bool]:
    chosen, created = create_or_join(load_study(open_storage(url, application_name="racer"), "s"), top=2, seeds=seeds)
    return chosen.study_id, created


def test_eight_processes_create_one_set_of_finalists(study: StoredStudy, database_url: str) -> None:
    with multiprocessing.get_context("fork").Pool(8) as pool:
        made = pool.starmap(race, [(database_url, 2)] * 8, chunksize=1)
    assert len({study_id for study_id, _ in made}) == 1
    assert sum(created for _, created in made) == 1
    assert table(study).pending == 4


def test_finalists_wait_for_the_end_of_the_search(storage: PostgresStorage) -> None:
    study = search(storage, "s", [finished(0, 0.5)], budget=2)
    with pytest.raises(SearchError, match=r"'s' has not ended \(1 of 2 trials done\); .* hpsearch stop s$"):
        create_or_join(study, top=1, seeds=1)
    claim = Claims(storage.engine, study.study_id, worker="host:1").claim()
    assert isinstance(claim, Claim)
    study.set_attr(STOPPED, "by ann@host")
    with pytest.raises(SearchError, match=r"has 1 running trial; to wait for its end, run hpsearch stop s --wait$"):
        create_or_join(study, top=1, seeds=1)
    Claims(storage.engine, study.study_id, worker="host:1").finish_attempt(claim, Outcome.RELEASED)
    assert create_or_join(study, top=1, seeds=1)[1]


def test_without_a_complete_trial_there_is_no_finalist(storage: PostgresStorage) -> None:
    study = search(storage, "s", [create_trial(state=TrialState.FAIL)])
    with pytest.raises(SearchError, match="has no complete trial"):
        create_or_join(study, top=1, seeds=1)


def test_a_configuration_that_changed_code_alters_is_rejected(study: StoredStudy) -> None:
    chosen, _ = create_or_join(study, top=1, seeds=1)
    claim = Claims(chosen.storage.engine, chosen.study_id, worker="host:1").claim()
    assert isinstance(claim, Claim)
    with pytest.raises(ObjectiveError, match=r"differs from that of trial 1 \(batch_size, .*kind, .*lr"):
        suggest(load_objective("digits"), chosen.open(), claim, chosen.spec)
    assert chosen.trials()[0].params == {}


def test_a_failed_finalist_is_retried(study: StoredStudy, say: Say) -> None:
    chosen, _ = create_or_join(study, top=1, seeds=2)
    train(chosen, lambda *_: None)
    assert "hpsearch finalists s" in say("retry", "s.finalists", "--trial", "1")
    assert table(study).pending == 1
    train(chosen, lambda *_: 0.75)
    assert table(study).get_row(1).values == (None, 0.75)


@pytest.mark.parametrize(
    ("settings", "message"), [({"top": 0}, "--top must .*, not 0"), ({"seeds": "x"}, "--seeds must .*, not 'x'")]
)
def test_wrong_numbers_are_rejected_and_no_set_is_created(
    study: StoredStudy, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(SearchError, match=message):
        create_or_join(study, **{"top": None, "seeds": None, **settings})  # type: ignore[arg-type]
    assert study.storage.get_all_studies()[1:] == []
