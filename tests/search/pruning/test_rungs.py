"""Successive halving and Hyperband on Postgres: the rungs of all trials, with one query per rung."""

from __future__ import annotations

import random

import optuna
import pytest
import sqlalchemy as sa
from optuna.trial import TrialState

from hpsearch.search.pruners.study_pruner import Decision, StudyPruner
from hpsearch.search.spec.spec import StudySpec
from hpsearch.storage.study_storage.reading import get_rung_key, read_rung_values
from hpsearch.storage.study_storage.storage import open_storage
from tests.factories import spec_of
from tests.search.pruning.optunas import optunas_pruner

HALVING = {"name": "successive_halving", "reduction_factor": 2}
HYPERBAND = {"name": "hyperband", "reduction_factor": 2, "min_resource": 1}


class Search:
    """A study on Postgres that hpsearch's pruner prunes, and a copy in memory that Optuna's pruner prunes."""

    def __init__(self, url: str, spec: StudySpec) -> None:
        self.storage = open_storage(url, application_name="test")
        self.study = optuna.create_study(study_name=spec.name, direction=spec.direction, storage=self.storage)
        self.twin = optuna.create_study(
            study_name=spec.name, direction=spec.direction, pruner=optunas_pruner(spec.pruner)
        )
        self.judge = StudyPruner(spec, self.storage, self.study._study_id)

    def ask(self) -> tuple[optuna.Trial, optuna.Trial]:
        return self.study.ask(), self.twin.ask()

    def report(self, pair: tuple[optuna.Trial, optuna.Trial], step: int, value: float) -> Decision:
        for trial in pair:
            trial.report(value, step)
        decision = self.again(pair)
        assert decision.prune == pair[1].should_prune()
        return decision

    def again(self, pair: tuple[optuna.Trial, optuna.Trial]) -> Decision:
        trial = self.storage.get_trial(pair[0]._trial_id)
        return self.judge(trial, trial.intermediate_values)


@pytest.mark.parametrize("pruner", [HALVING, HYPERBAND], ids=lambda pruner: pruner["name"])
@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_a_search_is_pruned_as_by_optuna(database_url: str, pruner, direction: str) -> None:
    search = Search(database_url, spec_of(direction, epochs=9, **pruner))
    numbers = random.Random(3)
    running = {n: search.ask() for n in range(5)}
    epochs = dict.fromkeys(running, 0)
    brackets, pruned = set(), 0
    while running:
        number = numbers.choice(sorted(running))
        decision = search.report(running[number], epochs[number], round(numbers.random(), 1))
        epochs[number] += 1
        brackets.add(decision.bracket)
        pruned += decision.prune
        if decision.prune or epochs[number] == 9:
            for trial in running.pop(number):
                trial.study.tell(trial, state=TrialState.PRUNED if decision.prune else TrialState.FAIL)
            if len(epochs) < 16:
                running[len(epochs)] = search.ask()
                epochs[len(epochs)] = 0
    assert 0 < pruned < 16
    assert len(brackets - {None}) == (4 if pruner is HYPERBAND else 0)
    assert [t.system_attrs for t in search.study.trials] == [t.system_attrs for t in search.twin.trials]


def test_the_reason_names_the_rung_its_cutoff_and_the_number_of_trials(database_url: str) -> None:
    search = Search(database_url, spec_of(**HALVING))
    first, second, third = search.ask(), search.ask(), search.ask()
    assert not search.report(first, 1, 0.9).prune
    decision = search.report(second, 1, 0.5)
    assert decision.reason == (
        "successive_halving pruner at epoch 2 of 20: accuracy 0.5 is below 0.9, which the best 1 of 2 trials "
        "at rung 0 reach"
    )
    assert (decision.rung, decision.value, decision.cutoff, decision.peers) == (0, 0.5, 0.9, 1)
    assert search.report(third, 1, 0.95).cutoff == 0.95
    decision = search.report(third, 2, 0.5)
    assert (decision.prune, decision.rung, decision.peers) == (False, 1, 0)


def test_the_reason_mentions_an_unfilled_rung(database_url: str) -> None:
    search = Search(database_url, spec_of(**HALVING, bootstrap_count=2))
    assert search.report(search.ask(), 1, 0.9).reason.endswith(
        "rung 0 prunes the first 2 trials (bootstrap_count); this is number 1"
    )
    assert search.report(search.ask(), 1, 0.8).prune
    assert not search.report(search.ask(), 1, 0.9).prune


def test_a_repeated_decision_after_a_lost_worker_is_the_same(database_url: str) -> None:
    search = Search(database_url, spec_of(**HALVING))
    search.report(search.ask(), 1, 0.9)
    worse = search.ask()
    first = search.report(worse, 1, 0.5)
    assert first.prune
    assert search.again(worse) == first
    assert not worse[1].should_prune(), "Optuna forgets it: this test shows why ours differs"


def test_trials_of_other_studies_do_not_affect_decisions(database_url: str) -> None:
    search = Search(database_url, spec_of(**HALVING))
    other = optuna.create_study(study_name="other", storage=search.storage)
    search.storage.set_trial_system_attr(other.ask()._trial_id, get_rung_key(0), 99.0)
    search.storage.set_trial_system_attr(search.ask()[0]._trial_id, "completed_rung_00", 99.0)
    assert search.report(search.ask(), 1, float("-inf")).peers == 0
    assert read_rung_values(search.storage.engine, search.study._study_id, 0) == [(1, float("-inf"))]


def test_a_rung_costs_one_query_and_an_epoch_between_rungs_none(database_url: str) -> None:
    search = Search(database_url, spec_of(**HALVING))
    trial = search.ask()[0]
    statements: list[str] = []
    sa.event.listen(search.storage.engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))

    def cost(step: int) -> tuple[int, int]:
        """Return how many queries for rungs, and how many other statements, a verdict needs."""
        trial.report(0.5, step)
        frozen = search.storage.get_trial(trial._trial_id)
        statements.clear()
        assert not search.judge(frozen, frozen.intermediate_values).prune
        rungs = sum("a.value_json" in statement for statement in statements)
        return rungs, len(statements) - rungs

    assert cost(1)[0] == 1
    assert cost(2)[0] == 1
    assert cost(3) == (0, 0)
    assert cost(4)[0] == 1
