"""The refit of a winner: the number of epochs, the seeds, and the selected run."""

from __future__ import annotations

import pytest

from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.choose import create_or_join, make_or_join_refit
from hpsearch.search.finalists.refit import format_refit, read_refit, tabulate_refit
from hpsearch.search.finalists.table import list_finalist_sets
from hpsearch.search.promotion.evaluate_test import choose_candidate
from hpsearch.search.samplers.suggest import derive_seed, derive_training_seed, get_resplit_seed
from hpsearch.search.study.study import StoredStudy, load_parent_study
from hpsearch.storage.attributes import PARENT_TRIAL
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from hpsearch.storage.trials.history import read_finalist_studies, read_refit_studies
from tests.search.finalists.support import VALUES, Say, params, table, train, train_runs

FRESH = {"error": 0.01, "divided": True, "sizes": [60, 20, 20]}


def confirm(study: StoredStudy, *, winner: int, epochs: list[int] | None = None, new_set: bool = False) -> StoredStudy:
    """Train finalists on two seeds so that `winner` wins; `epochs` are the best epochs of each run's halves, from 0."""
    chosen, _ = create_or_join(study, top=2, seeds=2, new_set=new_set)
    fresh = None if epochs is None else {**FRESH, "epochs": epochs}
    train(chosen, lambda trial, _seed: 0.9 if trial == winner else 0.8, fresh=fresh)
    assert table(study).winner == winner
    return chosen


def test_a_refit_has_the_median_best_epoch_of_the_retrained_runs(study: StoredStudy) -> None:
    chosen = confirm(study, winner=3, epochs=[1, 2])
    made, created = make_or_join_refit(study, seeds=None)
    of = made.spec.finalists_of
    assert of is not None
    assert (created, made.spec.name, made.spec.refit) == (True, "s.refit", 3), "the higher of the middle two"
    assert (of.trials, len(of.seeds), made.spec.epochs) == ([3], 3, study.spec.epochs)
    trials = made.trials()
    assert [trial.user_attrs[PARENT_TRIAL] for trial in trials] == [3] * 3
    assert all(trial.system_attrs["fixed_params"] == params(3) for trial in trials)
    assert [derive_training_seed(made.spec, number) for number in range(3)] == of.seeds
    assert get_resplit_seed(made.spec, 0) is None
    sets = chosen.spec.finalists_of
    assert sets is not None
    used = {*sets.seeds, *(derive_seed(study.spec.seed, "trial", number) for number in range(len(VALUES)))}
    assert not used & set(of.seeds)
    assert load_parent_study(made).study_id == study.study_id


def test_a_refit_without_new_splits_uses_the_best_epochs(study: StoredStudy) -> None:
    chosen, _ = create_or_join(study, top=1, seeds=1)
    claims = Claims(chosen.storage.engine, chosen.study_id, worker="host:1")
    claim = claims.claim()
    assert isinstance(claim, Claim)
    for epoch, value in enumerate([0.1, 0.7, 0.7, 0.3]):
        claims.report(claim, epoch, value, None)
    claims.finish_attempt(claim, Outcome.COMPLETE, value=0.7)
    assert make_or_join_refit(study, seeds=1)[0].spec.refit == 2


def test_a_refit_is_not_listed_as_finalists(study: StoredStudy, say: Say) -> None:
    chosen = confirm(study, winner=3, epochs=[1, 2])
    before = table(study)
    make_or_join_refit(study, seeds=None)
    assert read_finalist_studies(study.engine, study.study_id) == ["s.finalists"]
    assert read_refit_studies(study.engine, study.study_id) == ["s.refit"]
    assert [each.study_id for each in list_finalist_sets(study)] == [chosen.study_id]
    assert table(study) == before
    assert "s.refit (refit)" in say("studies")
    assert "holds the refit of 's' and cannot be extended" in say("extend", "s.refit", "--trials", "+1", code=2)
    assert "see the report of 's'" in say("report", "s.refit", code=2)
    assert "evaluate the test set of 's'" in say("evaluate-test", "s.refit", code=2)
    assert "hpsearch promote s --refit" in say("start", "s.refit")
    gone = say("delete", "s", "--yes").splitlines()
    assert gone == [f"deleted study {name}; its MLflow runs are kept" for name in ("s.finalists", "s.refit", "s")]


def test_a_refit_is_joined_while_winner_and_epochs_are_the_same(study: StoredStudy) -> None:
    confirm(study, winner=3, epochs=[1, 2])
    made, _ = make_or_join_refit(study, seeds=1)
    for seeds in (None, 1):
        again, created = make_or_join_refit(study, seeds=seeds)
        assert (again.study_id, created) == (made.study_id, False)
    with pytest.raises(
        SearchError, match=r"--refit-seeds 3 differs from the 1 of the existing refit; remove --refit-seeds"
    ):
        make_or_join_refit(study, seeds=3)
    confirm(study, winner=1, epochs=[1, 2], new_set=True)
    with pytest.raises(SearchError, match="the winner of study 's' has no refit yet"):
        read_refit(study)  # a refit of another winner does not count
    other, created = make_or_join_refit(study, seeds=1)
    assert (other.spec.name, other.spec.finalists_of.trials, created) == ("s.refit-2", [1], True)  # type: ignore[union-attr]
    confirm(study, winner=3, epochs=[4, 4], new_set=True)
    assert make_or_join_refit(study, seeds=1)[0].spec.name == "s.refit-3"


def test_a_refit_needs_complete_finalists(study: StoredStudy) -> None:
    with pytest.raises(SearchError, match=r"^--refit: study 's' has no finalists .* hpsearch finalists s$"):
        make_or_join_refit(study, seeds=None)
    chosen, _ = create_or_join(study, top=2, seeds=2)
    with pytest.raises(
        SearchError, match=r"the finalists of 's', in s.finalists, have 4 unfinished runs; continue with"
    ):
        make_or_join_refit(study, seeds=None)
    train(chosen, lambda *_: None)
    with pytest.raises(SearchError, match="the finalists of 's' have no winner"):
        make_or_join_refit(study, seeds=None)
    confirm(study, winner=3, new_set=True, epochs=[1])
    with pytest.raises(SearchError, match="--trial 1 differs from the winner 3 of 's'"):
        make_or_join_refit(study, seeds=None, trial=1)
    with pytest.raises(
        SearchError, match=r"--refit: the winner of study 's' has no refit yet; train it with .*--refit"
    ):
        choose_candidate(study, trial=None, unconfirmed=False, refit=True)
    with pytest.raises(SearchError, match="--unconfirmed and --refit exclude each other"):
        choose_candidate(study, trial=None, unconfirmed=True, refit=True)
    with pytest.raises(SearchError, match="--refit-seeds 2 is even; give an odd number"):
        make_or_join_refit(study, seeds=2)
    create_or_join(study, top=2, seeds=2, new_set=True)
    with pytest.raises(SearchError, match=r"in s.finalists-3, have 4 unfinished runs"):
        make_or_join_refit(study, seeds=None)


@pytest.mark.parametrize(
    ("losses", "taken"),
    [([0.3, 0.1, 0.2], 2), ([0.2, 0.2, 0.2], 1), ([0.3, None, 0.2], 2), ([None, 0.5, None], 1), ([None] * 3, None)],
)
def test_a_refit_selects_the_run_with_the_median_training_loss(
    study: StoredStudy, losses: list[float | None], taken: int | None
) -> None:
    confirm(study, winner=3, epochs=[1, 2])
    made, _ = make_or_join_refit(study, seeds=3)
    train_runs(made, losses[:2])
    found = tabulate_refit(made)
    assert (found.selected_trial, found.pending) == (None, 1)
    train_runs(made, losses[2:])
    found = tabulate_refit(made)
    assert (found.losses, found.selected_trial, found.pending) == (tuple(losses), taken, 0)
    marked = [number for number, line in enumerate(format_refit(made, found)) if "selected as the median" in line]
    assert marked == ([] if taken is None else [taken])
