"""Multi-objective trials wait at rungs while workers die: values, ranks and Pareto front are as without faults."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import mlflow
import optuna
import pytest
import sqlalchemy as sa

from tests.faults.harness import Arena, Worker
from tests.faults.invariants import (
    assert_attempts,
    assert_equals_undisturbed,
    assert_tracked,
    read_promotions,
    read_trials,
)
from tests.faults.orders import Order
from tests.faults.pruning.killed import kills

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("engines")]

OBJECTIVE = str(Path(__file__).parents[1] / "several.py")
ASHA = "--pruner asha --pruner-option reduction_factor=2"  # rungs after the first and second of four epochs
N_TRIALS = 6

Undisturbed = Callable[[int], list[list[float]]]

_EPOCHS = """
    SELECT number, step, metrics FROM hpsearch_epoch_values JOIN trials USING (trial_id) JOIN studies USING (study_id)
     WHERE study_name = :study ORDER BY number, step
"""


def epoch_values(url: str, study: str) -> list[tuple[int, int, list[float]]]:
    """Return trial, epoch and values of all reports."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(sa.text(_EPOCHS), {"study": study})]


def ends(url: str, study: str) -> list[tuple[int, str, list[float] | None]]:
    """Return state and values of each trial, read with plain Optuna."""
    trials = optuna.load_study(study_name=study, storage=url).trials
    return [(trial.number, trial.state.name, trial.values) for trial in trials]


def front(url: str, study: str) -> list[int]:
    """Return the Pareto front, read with plain Optuna."""
    return sorted(trial.number for trial in optuna.load_study(study_name=study, storage=url).best_trials)


def tagged_front(arena: Arena) -> dict[int, dict[str, float]]:
    """Return the Pareto front, read from the study's run in MLflow."""
    client = mlflow.MlflowClient(arena.tracking_uri)
    experiment = client.get_experiment_by_name("hpsearch")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], f"tags.`hpsearch.study` = '{arena.name}'")
    [parent] = [run for run in runs if "hpsearch.trial" not in run.data.tags]
    return {int(number): values for number, values in json.loads(parent.data.tags["hpsearch.front"]).items()}


def assert_values(arena: Arena, losses: list[list[float]]) -> None:
    """Assert that each reported epoch has both metrics once, and that the first equals the value without faults."""
    trials = read_trials(arena.storage_url, arena.name)
    found = epoch_values(arena.storage_url, arena.name)
    assert [(number, step) for number, step, _ in found] == [
        (t.number, step) for t in trials for step in sorted(t.values)
    ]
    assert [values[0] for *_, values in found] == [losses[number][step] for number, step, _ in found]
    for number, state, values in ends(arena.storage_url, arena.name):
        known = [each for at, _, each in found if at == number]
        assert values == (min(known) if state == "COMPLETE" else known[-1])


@pytest.mark.soak
def test_a_kill_at_every_step_between_report_and_promotion_changes_no_result(
    arena: Arena, undisturbed: Undisturbed
) -> None:
    """One worker after the other, so that decisions are made in one order: they are those of the quiet study."""
    quiet = arena.make_quiet_arena()
    quiet.create(N_TRIALS, [], settings=ASHA, objective=OBJECTIVE)
    quiet.work(1)
    expected = assert_equals_undisturbed(quiet.storage_url, quiet.name, quiet.home, undisturbed(N_TRIALS), N_TRIALS)
    orders, outcomes = kills(quiet, expected)
    arena.create(N_TRIALS, orders, settings=ASHA, retries=5, objective=OBJECTIVE)
    arena.work(1)
    missed = [order for index, order in enumerate(orders) if not arena.has_obeyed(index)]
    assert not missed, f"no worker was killed at {missed}"
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(N_TRIALS), N_TRIALS)
    assert [trial.outcomes for trial in trials] == outcomes
    both = [(each.storage_url, each.name) for each in (arena, quiet)]
    for read in (ends, front, epoch_values):
        made, wanted = (read(*each) for each in both)
        assert made == wanted
        assert wanted
    made, wanted = (read_promotions(*each, 2) for each in both)
    assert made == wanted
    assert len({values[1] for *_, values in epoch_values(*both[0])}) > 1, "the second metric differs between trials"
    assert_values(arena, undisturbed(N_TRIALS))
    assert_tracked(arena.tracking_uri, arena.name, trials)
    assert sorted(tagged_front(arena)) == sorted(tagged_front(quiet)) == front(*both[0])


@pytest.mark.soak
def test_a_kill_of_one_of_three_workers(arena: Arena, undisturbed: Undisturbed) -> None:
    n_trials = 9
    orders = [
        Order("reach rung", "kill", trial=3, when="after"),
        Order("report", "kill", trial=5, when="after", epoch=0),
    ]
    arena.create(n_trials, orders, settings=ASHA, objective=OBJECTIVE)
    arena.work(3)
    assert arena.has_obeyed(0)
    assert arena.has_obeyed(1)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(n_trials), n_trials)
    assert Counter(outcome for trial in trials for outcome in trial.outcomes)["lost"] in {1, 2}
    assert "lost" in trials[5].outcomes
    assert_values(arena, undisturbed(n_trials))
    promotions = read_promotions(arena.storage_url, arena.name, 2)
    assert len(promotions) == len(set(promotions)), "each trial is promoted once from a rung"
    assert {trial.number for trial in trials if trial.state == "COMPLETE"} == {n for n, rung in promotions if rung == 1}
    assert_tracked(arena.tracking_uri, arena.name, trials)
    assert sorted(tagged_front(arena)) == front(arena.storage_url, arena.name)


@pytest.mark.soak  # the same as above with a real training
def test_digits_with_three_workers_one_of_which_is_killed(arena: Arena) -> None:
    n_trials, epochs = 8, 3
    ways = "--directions accuracy=maximize,parameters=minimize"
    arena.create(n_trials, [], objective="digits", settings=f"--epochs {epochs} {ways} --pruner asha")
    killed: list[Worker] = []

    def kill(running: list[Worker]) -> None:
        if not killed and len(arena.events("reported")) >= 3:
            killed.append(running[0])
            running[0].send(signal.SIGKILL)

    arena.work(3, meanwhile=kill)
    assert [worker.exit_code for worker in killed] == [-signal.SIGKILL]
    trials = read_trials(arena.storage_url, arena.name)
    assert [trial.number for trial in trials] == list(range(n_trials))
    for trial in trials:
        assert_attempts(trial)
        assert list(trial.values) == list(range(len(trial.values))), "an epoch is missing"
    assert Counter(trial.state for trial in trials)["COMPLETE"] >= 3
    known = epoch_values(arena.storage_url, arena.name)
    assert [(number, step) for number, step, _ in known] == [(t.number, step) for t in trials for step in t.values]
    assert all(len({values[1] for at, _, values in known if at == number}) == 1 for number in range(n_trials))
    tagged = tagged_front(arena)
    assert sorted(tagged) == front(arena.storage_url, arena.name)
    study = optuna.load_study(study_name=arena.name, storage=arena.storage_url)
    assert study.metric_names == ["accuracy", "parameters"]
    assert {number: [*values.values()] for number, values in tagged.items()} == {
        trial.number: trial.values for trial in study.best_trials
    }
    summary = " ".join(arena.run("show", arena.name).split())
    assert "front: " in summary
