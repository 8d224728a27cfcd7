"""A worker dies during early termination while trials wait at rungs: the next worker makes the same decision."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState, create_trial

from hpsearch.search.study.terminator import MIN_ENDED_TRIALS
from hpsearch.storage.attributes import EARLY_TERMINATION, EXPECTED_GAIN
from hpsearch.storage.study_storage.storage import open_storage
from tests.faults.harness import Arena
from tests.faults.invariants import assert_attempts, read_promotions, read_trials
from tests.faults.orders import OUTSIDE, Order, write
from tests.faults.scripted import EPOCHS
from tests.waiting import wait_for

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("engines")]

BUDGET = 60
ADDED = MIN_ENDED_TRIALS - 3  # imported trials: a few more have to end
SETTINGS = "--pruner asha --pruner-option reduction_factor=2 --min-expected-gain 1000"
SPACE = {"lr": FloatDistribution(1e-3, 1e-1, log=True), "weight_decay": FloatDistribution(1e-5, 1e-1, log=True)}

_ATTRS = "SELECT key, value_json FROM study_user_attributes JOIN studies USING (study_id) WHERE study_name = :study"


def begin(arena: Arena) -> None:
    """Create a study and import trials into it."""
    arena.create(BUDGET, [], settings=SETTINGS)
    study = optuna.load_study(study_name=arena.name, storage=open_storage(arena.storage_url, application_name="test"))
    for number in range(ADDED):
        params = {"lr": 1e-3 * 1.3**number, "weight_decay": 1e-4 * 1.2**number}
        value = 2 + number / 100
        kind = {"params": params, "distributions": SPACE, "state": TrialState.COMPLETE, "value": value}
        study.add_trial(create_trial(**kind, intermediate_values=dict.fromkeys(range(EPOCHS), value + 1)))


def attrs_of(arena: Arena) -> dict[str, Any]:
    engine = sa.create_engine(arena.storage_url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        return {
            row.key: json.loads(row.value_json) for row in connection.execute(sa.text(_ATTRS), {"study": arena.name})
        }


def killed(arena: Arena, when: str) -> None:
    """Let a worker run until it is killed before or after its decision is written."""
    write(arena.orders, [Order("stop early", "kill", trial=OUTSIDE, attempt=0, when=when)])
    worker = arena.start()
    wait_for(lambda: arena.poll_workers() or worker.ended, "a worker to be killed")
    assert worker.exit_code == -signal.SIGKILL, arena.describe_failure("the worker was not killed")
    write(arena.orders, [])


@pytest.mark.soak
def test_a_kill_before_and_after_the_write_of_early_termination(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]]
) -> None:
    quiet = arena.make_quiet_arena()
    begin(quiet)
    quiet.work(1)
    expected = attrs_of(quiet)
    started = expected[EARLY_TERMINATION]["started"]
    assert ADDED + 3 < started < BUDGET

    begin(arena)
    killed(arena, "before")
    found = attrs_of(arena)
    assert not {EARLY_TERMINATION, EXPECTED_GAIN} & found.keys(), "a worker that died first stored a decision"
    waiting = [t.number for t in read_trials(arena.storage_url, arena.name) if t.state == "WAITING"]
    assert waiting, "some wait at rungs"
    killed(arena, "after")  # the next worker decides again: no decision is stored
    found = attrs_of(arena)
    assert found[EARLY_TERMINATION] == expected[EARLY_TERMINATION]
    assert found[EXPECTED_GAIN] == expected[EXPECTED_GAIN], "written together"
    assert len(read_trials(arena.storage_url, arena.name)) == started
    arena.work(1)
    assert attrs_of(arena)[EARLY_TERMINATION] == expected[EARLY_TERMINATION]

    trials, others = (read_trials(each.storage_url, each.name) for each in (arena, quiet))
    assert [(t.number, t.state, t.values, t.value, t.outcomes) for t in trials] == [
        (t.number, t.state, t.values, t.value, t.outcomes) for t in others
    ]
    assert [t.number for t in trials] == list(range(started))
    alone = undisturbed(started)
    for trial in trials[ADDED:]:
        assert_attempts(trial)
        assert list(trial.values.values()) == alone[trial.number][: len(trial.values)]
        assert trial.state == ("COMPLETE" if len(trial.values) == EPOCHS else "PRUNED")
    assert sum(t.state == "COMPLETE" for t in trials[ADDED:]) >= 3
    assert read_promotions(arena.storage_url, arena.name, 2) == read_promotions(quiet.storage_url, quiet.name, 2)
