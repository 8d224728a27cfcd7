"""Budgets in epochs and seconds in the commands that set, change and show them."""

from __future__ import annotations

import re
from typing import Any

import optuna
import pytest

from hpsearch import load_objective
from hpsearch.search.api.opening import list_studies
from hpsearch.search.cli import run_command
from hpsearch.search.errors import SearchError
from hpsearch.search.report.top import read_status, render_status
from hpsearch.search.spec.resolve import resolve_spec
from hpsearch.search.spec.spec import MAX_TRIALS, parse_stored_spec
from hpsearch.search.study.control import extend_study, retry_trial
from hpsearch.search.study.create import create_or_join
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.storage.attributes import BUDGET_CUT, REASON, SPEC
from hpsearch.storage.rungs.rungs import PrunedTrial
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.trials.budget import create_spending
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from tests.factories import spec_of
from tests.search.study.steering.support import Say, take

METRICS = {"accuracy": "maximize", "parameters": "minimize"}


@pytest.fixture
def study(storage: PostgresStorage) -> optuna.Study:
    study = optuna.create_study(study_name="s", direction="maximize", storage=storage)
    spec = {**spec_of(name="none").model_dump(), "n_trials": MAX_TRIALS, "budget_epochs": 2}
    with storage.engine.begin() as connection:
        create_spending(connection, study._study_id, epochs=2, seconds=None)
    storage.set_study_user_attr(study._study_id, SPEC, spec)
    return study


@pytest.fixture
def claims(study: optuna.Study, storage: PostgresStorage) -> Claims:
    metered = load_study(storage, "s").spec.epochs
    return Claims(storage.engine, study._study_id, worker="host:1", metered_epochs=metered)


def cut(claims: Claims) -> PrunedTrial:
    """Spend the budget, and return the trial that it ends."""
    claim = take(claims)
    assert claims.report(claim, 0, 0.5).has_budget
    assert not claims.report(claim, 1, 0.6).has_budget
    claims.finish_attempt(claim, Outcome.RELEASED)
    retired = claims.claim()
    assert isinstance(retired, PrunedTrial)
    return retired


def test_no_trial_is_retried_after_the_budget_is_spent(
    claims: Claims, study: optuna.Study, storage: PostgresStorage
) -> None:
    """A worker would prune it at once, so its error would be lost."""
    claims.finish_attempt(take(claims), Outcome.FAILED, attrs={REASON: "a bug"})
    cut(claims)
    stored = load_study(storage, "s")
    extend = rf"extend s --budget-epochs \+{stored.spec.epochs}"
    with pytest.raises(SearchError, match=f"--trial 0: the budget of 2 epochs was spent; first .*: .*{extend}"):
        retry_trial(stored, 0)
    assert study.trials[0].user_attrs[REASON] == "a bug"
    extend_study(stored, "+2", setting="budget_epochs")
    assert retry_trial(stored, 0)[1] is None


def test_the_spent_budget_is_printed_in_its_unit(
    say: Say, claims: Claims, storage: PostgresStorage, database_url: str
) -> None:
    retired = cut(claims)
    shown = say("show", "s", "--all")
    assert "study s: 1 trial, 2 of 2 epochs (0 complete, 1 pruned" in shown
    assert "the budget of 2 epochs was spent" in shown
    assert re.search(r"n_trials +unlimited", shown)
    assert "pruning saved" not in shown, "other trials use the epochs of pruned trials"
    assert "the budget of 2 epochs was spent" in say("show", "s", "--trial", "0")
    standing = read_status(load_study(storage, "s"))
    assert standing.progress.summary == "1 trial, 2/2 epochs"
    assert (standing.progress.finished_fraction, standing.eta) == (1.0, 0.0)
    assert render_status(standing, None)
    assert load_study(storage, "s").is_spent(1)
    assert "1 trial, 2/2 epochs" in say("studies")
    [row] = list_studies({"storage_url": database_url})
    assert row.used_budget == "1 trial, 2/2 epochs"
    assert storage.get_trial(retired.trial_id).user_attrs[BUDGET_CUT] is True


def test_a_study_continues_with_an_extended_budget(say: Say, claims: Claims, storage: PostgresStorage) -> None:
    retired = cut(claims)
    assert "study s: budget changed from 2 to 5 epochs" in say("extend", "s", "--budget-epochs", "+3")
    again = take(claims)
    assert (again.trial_id, again.attempt) == (retired.trial_id, 2)
    stored = load_study(storage, "s")
    assert stored.spec.budget_epochs == 5
    assert stored.spending is not None
    assert stored.spending.budget_epochs == 5
    assert "s already has a budget of 5 epochs" in say("extend", "s", "--budget-epochs", "5")
    assert "study s: budget changed from unlimited to 7 trials" in say("extend", "s", "--trials", "7")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget-epochs", "2"], ["--budget-epochs 2", "used 2 epochs", "+N"]),
        (["--budget-epochs", "0"], ["--budget-epochs"]),
        (["--budget-epochs", "nan"], ["--budget-epochs 'nan'", "+N"]),
        (["--budget-seconds", "+5"], ["--budget-seconds", "without a budget in seconds"]),
        (["--trials", "+5"], ["no limit of trials", "--budget-epochs +N"]),
        (["--budget-epochs", "+5", "--trials", "+5"], ["exactly one budget"]),
        ([], ["exactly one budget"]),
    ],
)
def test_a_wrong_budget_is_rejected_and_changes_nothing(
    say: Say, claims: Claims, storage: PostgresStorage, arguments: list[str], words: list[str]
) -> None:
    cut(claims)
    message = say("extend", "s", *arguments, code=2)
    for word in words:
        assert word in message
    stored = load_study(storage, "s")
    assert stored.spec.budget_epochs == 2
    assert stored.spending is not None
    assert stored.spending.budget_epochs == 2


def test_a_budget_in_epochs_or_seconds_has_no_default_limit_of_trials() -> None:
    digits = load_objective("digits")
    of_epochs = resolve_spec({"objective": "digits", "budget_epochs": 100}, digits)
    assert of_epochs.n_trials == MAX_TRIALS
    assert of_epochs.budget_description == "100 epochs (5 full trials)"
    both = resolve_spec({"objective": "digits", "budget_seconds": 60, "n_trials": 5}, digits)
    assert both.n_trials == 5
    assert both.budget_description == "5 trials, 60 s"


@pytest.mark.parametrize(
    ("given", "kinds", "n_trials", "budget_epochs"),
    [
        ({}, ("freeze_thaw", "asha"), MAX_TRIALS, 24 * 20),
        ({"epochs": 4}, ("freeze_thaw", "asha"), MAX_TRIALS, 24 * 4),
        ({"epochs": 3}, ("tpe", "median"), 24, None),
        ({"directions": METRICS}, ("freeze_thaw", "asha"), MAX_TRIALS, 480),
        ({"sampler": {"name": "random"}}, ("random", "asha"), MAX_TRIALS, 480),
        ({"sampler": {"name": "cmaes"}}, ("cmaes", "median"), 24, None),
        ({"sampler": {"name": "nsga2", "population_size": 8}}, ("nsga2", "median"), 24, None),
        ({"sampler": {"name": "nsga2", "population_size": 8}, "directions": METRICS}, ("nsga2", "none"), 24, None),
        ({"sampler": {"name": "grid", "search_space": {"weight_decay": [0.1, 0.2]}}}, ("grid", "median"), 2, None),
        ({"pruner": {"name": "none"}}, ("freeze_thaw", "none"), 24, None),
        ({"pruner": {"name": "median"}}, ("freeze_thaw", "median"), 24, None),
        ({"n_trials": 5}, ("freeze_thaw", "asha"), 5, None),
        ({"budget_epochs": 100}, ("freeze_thaw", "asha"), MAX_TRIALS, 100),
        ({"budget_seconds": 60}, ("freeze_thaw", "asha"), MAX_TRIALS, None),
    ],
)
def test_defaults_of_a_new_study(
    given: dict[str, Any], kinds: tuple[str, str], n_trials: int, budget_epochs: int | None
) -> None:
    """The objective `digits` has 24 trials of 20 epochs."""
    spec = resolve_spec({"objective": "digits", **given}, load_objective("digits"))
    assert (spec.sampler.name, spec.pruner.name) == kinds
    assert (spec.n_trials, spec.budget_epochs) == (n_trials, budget_epochs)


def test_a_stored_study_keeps_its_sampler_pruner_and_budget() -> None:
    """Studies of earlier versions have `tpe` and `median`, or `asha` with the first rung after the first epoch."""
    digits = load_objective("digits")
    for pruner in ({"name": "median"}, {"name": "asha", "min_resource": 1}):
        given = {"objective": "digits", "sampler": {"name": "tpe"}, "pruner": pruner, "n_trials": 24}
        values = resolve_spec(given, digits).model_dump()
        stored = parse_stored_spec(values)
        assert resolve_spec({"objective": "digits"}, digits, stored).model_dump() == values


def _create(storage: PostgresStorage, **settings: object) -> StoredStudy:
    digits = load_objective("digits")
    given = {"objective": "digits", "name": "made", **settings}
    return create_or_join(storage, given, digits, inspect=lambda *_: {})[0]


def test_creating_a_study_writes_its_budget_row_once(storage: PostgresStorage) -> None:
    made = _create(storage, budget_epochs=100, budget_seconds=5.5)
    assert made.spending is not None
    assert (made.spending.budget_epochs, made.spending.budget_seconds) == (100, 5.5)
    assert _create(storage).spec == made.spec
    with pytest.raises(SearchError, match="extend made --budget-epochs 200"):
        _create(storage, budget_epochs=200)
    assert extend_study(made, "+0.75", setting="budget_seconds").new_budget == 6.25


def test_a_budget_below_one_full_trial_is_rejected(storage: PostgresStorage) -> None:
    with pytest.raises(SearchError, match="--budget-epochs 5 is less than one full trial of 6 epochs"):
        _create(storage, epochs=6, budget_epochs=5)
    assert storage.get_all_studies() == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--budget-epochs", "0"],
        ["--budget-epochs", "-3"],
        ["--budget-epochs", "2.5"],
        ["--budget-seconds", "0"],
        ["--budget-seconds", "-1"],
        ["--budget-seconds", "nan"],
        ["--budget-seconds", "inf"],
    ],
)
def test_bad_input_is_an_error_of_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "digits", *arguments]) == 2
    said = capsys.readouterr().err
    assert arguments[0] in said
    assert said.count("\n") == 1, said
