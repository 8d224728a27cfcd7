"""Budgets in epochs and seconds while workers die: the counts equal the reported epochs exactly."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from hpsearch.storage.attributes import BUDGET_CUT, REASON
from tests.faults.harness import Arena
from tests.faults.invariants import Trial, read_trials
from tests.faults.orders import Order
from tests.faults.scripted import EPOCHS

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("engines")]

N_TRIALS = 6

Undisturbed = Callable[[int], list[list[float]]]


def rows(arena: Arena, query: str) -> list[tuple[object, ...]]:
    engine = sa.create_engine(arena.storage_url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(sa.text(query), {"study": arena.name})]


COUNTED = "SELECT epochs, budget_epochs FROM hpsearch_spending JOIN studies USING (study_id) WHERE study_name = :study"
REASONS = f"""
    SELECT t.number, r.value_json FROM trials t JOIN studies USING (study_id)
      JOIN trial_user_attributes r ON r.trial_id = t.trial_id AND r.key = '{REASON}'
      JOIN trial_user_attributes c ON c.trial_id = t.trial_id AND c.key = '{BUDGET_CUT}' WHERE study_name = :study
"""


def check(arena: Arena, undisturbed: list[list[float]], budget: int) -> list[Trial]:
    """Assert that exactly the budget is reported and counted, and that all values are those without faults."""
    trials = read_trials(arena.storage_url, arena.name)
    assert sum(len(trial.values) for trial in trials) == budget
    assert rows(arena, COUNTED) == [(budget, budget)]
    for trial in trials:
        assert list(trial.values.values()) == undisturbed[trial.number][: len(trial.values)]
        assert trial.state == ("COMPLETE" if len(trial.values) == EPOCHS else "PRUNED")
        assert all(attempt.ended is not None for attempt in trial.attempts)
    return trials


@pytest.mark.soak
def test_kills_keep_an_epoch_budget_exact_also_after_an_extension(arena: Arena, undisturbed: Undisturbed) -> None:
    budget = 2 * EPOCHS + 2
    orders = [
        Order("report", "kill", trial=0, epoch=1),
        Order("report", "kill", trial=1, when="after", epoch=0),
        Order(
            "report", "kill", trial=1, attempt=2, when="after", epoch=EPOCHS - 1
        ),  # all epochs reported, and not completed
        Order("report", "kill", trial=2, epoch=1),  # the last epoch of the budget
        Order("report", "kill", trial=2, attempt=2, when="after", epoch=1),
    ]
    arena.create(N_TRIALS, orders, settings=f"--budget-epochs {budget}", retries=5)
    arena.work(1)
    missed = [order for index, order in enumerate(orders) if not arena.has_obeyed(index)]
    assert not missed, f"no worker was killed at {missed}"
    trials = check(arena, undisturbed(N_TRIALS), budget)
    assert [trial.state for trial in trials] == ["COMPLETE", "COMPLETE", "PRUNED"]
    assert rows(arena, REASONS) == [(2, f'"after epoch 2 of {EPOCHS}: the budget of {budget} epochs was spent"')]

    said = arena.run("extend", arena.name, "--budget-epochs", f"+{EPOCHS}")
    assert f"budget changed from {budget} to {budget + EPOCHS} epochs" in said
    arena.work(1)
    trials = check(arena, undisturbed(N_TRIALS), budget + EPOCHS)
    assert [(trial.state, len(trial.values)) for trial in trials] == [
        ("COMPLETE", EPOCHS), ("COMPLETE", EPOCHS), ("COMPLETE", EPOCHS), ("PRUNED", 2)
    ]  # fmt: skip
    assert f"{budget + EPOCHS} of {budget + EPOCHS} epochs" in arena.run("show", arena.name)


def test_several_workers_spend_an_epoch_budget_exactly(arena: Arena, undisturbed: Undisturbed) -> None:
    """Also with `asha`: trials that wait when the budget is spent are pruned."""
    budget = 3 * EPOCHS + 1
    settings = f"--budget-epochs {budget} --pruner asha --pruner-option reduction_factor=2"
    arena.create(20, [Order("report", "kill", trial=1), Order("report", "kill", trial=3)], settings=settings, retries=5)
    arena.work(3)
    check(arena, undisturbed(20), budget)


@pytest.mark.soak
def test_kills_at_the_end_of_the_default_search_change_no_result(arena: Arena) -> None:
    """One worker, so that decisions are made in one order: the killed study equals the undisturbed one."""
    budget = 6 * EPOCHS
    settings = f"--sampler freeze_thaw --sampler-option n_startup_trials=3 --pruner asha --budget-epochs {budget}"
    quiet = arena.make_quiet_arena()
    quiet.create(budget, [], settings=settings)
    quiet.work(1)
    expected = read_trials(quiet.storage_url, quiet.name)
    complete = [trial for trial in expected if trial.state == "COMPLETE"]
    assert len(complete) >= 3
    assert sum(len(trial.values) for trial in expected) == budget

    orders = []
    for trial in complete:  # in the claim of the last attempt, and before and after the report of the last epoch
        number, last = trial.number, len(trial.attempts)
        orders += [
            Order("claim", "kill", trial=number, attempt=last, when="after"),
            Order("report", "kill", trial=number, attempt=last + 1, epoch=EPOCHS - 1),
            Order("report", "kill", trial=number, attempt=last + 2, when="after", epoch=EPOCHS - 1),
        ]
    arena.create(budget, orders, settings=settings, retries=5)
    arena.work(1)
    missed = [order for index, order in enumerate(orders) if not arena.has_obeyed(index)]
    assert not missed, f"no worker was killed at {missed}"
    trials = read_trials(arena.storage_url, arena.name)
    assert [(t.state, t.values, t.value) for t in trials] == [(t.state, t.values, t.value) for t in expected]
    assert rows(arena, COUNTED) == [(budget, budget)]


@pytest.mark.soak
def test_a_time_budget_ends_a_search_after_the_running_epochs(arena: Arena, undisturbed: Undisturbed) -> None:
    arena.create(N_TRIALS, [], settings="--budget-seconds 0.001")
    arena.work(2, codes=(-signal.SIGKILL,))
    trials = read_trials(arena.storage_url, arena.name)
    assert 1 <= len(trials) <= 2, "one for each worker"
    for trial in trials:
        assert_attempts_of_cut(trial, undisturbed(N_TRIALS))


def assert_attempts_of_cut(trial: Trial, undisturbed: list[list[float]]) -> None:
    assert (trial.state, len(trial.values)) == ("PRUNED", 1)
    assert trial.value == undisturbed[trial.number][0]
    assert trial.outcomes == ["released"]
