"""Outages of services during a search: workers wait for the database, but never for MLflow."""

from __future__ import annotations

import time
from collections.abc import Callable

import optuna
import pytest

from tests.faults.breakable import Breakable
from tests.faults.harness import Arena, Worker, wire
from tests.faults.invariants import assert_equals_undisturbed, assert_tracked
from tests.faults.orders import Order
from tests.waiting import wait_for

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("faults")]


def test_an_outage_of_postgres_longer_than_a_lease_changes_no_result(
    broken_arena: Arena, breakable: Breakable, undisturbed: Callable[[int], list[list[float]]]
) -> None:
    """One worker is in the middle of an epoch, one completes its trial. No attempt is lost."""
    arena = broken_arena
    arena.create(4, [Order("training", "hang", trial=0, epoch=1), Order("record outcome", "hang", trial=1)])
    workers = [arena.start() for _ in range(2)]
    wait_for(lambda: arena.has_obeyed(0) and arena.has_obeyed(1), "the workers to be in the middle")
    breakable.away_for_longer_than_a_lease(arena, workers)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(4), 4)
    assert [t.outcomes for t in trials] == [["complete"]] * 4


def test_repeatedly_lost_connections_lose_nothing(
    broken_arena: Arena, breakable: Breakable, undisturbed: Callable[[int], list[list[float]]]
) -> None:
    arena, cut = broken_arena, 0
    arena.create(4, [])
    pause = time.monotonic()

    def meanwhile(running: list[Worker]) -> None:
        nonlocal cut, pause
        joined = all("joins study" in worker.log.read_text() for worker in running)
        if joined and time.monotonic() > pause:
            cut += breakable.cut()
            pause = time.monotonic() + 0.1

    arena.work(2, meanwhile=meanwhile, PACE="0.1")
    arena.run("sync", arena.name)  # the MLflow server does not tolerate this number of lost connections
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(4), 4)
    assert [t.outcomes for t in trials] == [["complete"]] * 4
    assert cut > 8, "two for each trial, at the least"


def test_an_outage_of_mlflow_loses_nothing(arena: Arena, undisturbed: Callable[[int], list[list[float]]]) -> None:
    """In the middle of a trial: the trial continues, and MLflow has all records after it is back."""
    with wire(arena.tracking_uri) as (line, uri):
        arena.tracking_uri, direct = uri, arena.tracking_uri
        orders = [Order("training", "hang", trial=0, epoch=1), Order("publish run", "hang until mended", trial=0)]
        arena.create(2, orders)
        worker = arena.start()
        wait_for(lambda: arena.has_obeyed(0), "the worker to be in mid-epoch")
        line.cut()
        (arena.orders / "open").touch()
        wait_for(lambda: arena.has_obeyed(1), "the trial to be trained without MLflow")
        line.mend()
        (arena.orders / "mended").touch()
        wait_for(lambda: arena.poll_workers() or worker.ended, "the worker to leave")
        assert worker.exit_code == 0, worker.log.read_text()
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(2), 2)
    assert_tracked(direct, arena.name, trials)


@pytest.mark.soak
def test_trials_that_end_during_an_outage_of_mlflow_are_sent_later(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]]
) -> None:
    with wire(arena.tracking_uri) as (line, uri):
        arena.tracking_uri, direct = uri, arena.tracking_uri
        arena.create(1, [Order("training", "hang", trial=0, epoch=1)])
        worker = arena.start()
        wait_for(lambda: arena.has_obeyed(0), "the worker to be in mid-epoch")
        line.cut()
        (arena.orders / "open").touch()
        wait_for(lambda: arena.poll_workers() or worker.ended, "the worker to leave")
        assert worker.exit_code == 0, worker.log.read_text()
        trial = optuna.load_study(study_name=arena.name, storage=arena.storage_url).trials[0]
        assert trial.state.name == "COMPLETE"
        assert trial.user_attrs["hpsearch:tracking"].startswith("pending")
        assert "no MLflow server answers" in arena.run("sync", arena.name, code=1)
        line.mend()
        assert "1 trial sent, no unsent records are left" in arena.run("sync", arena.name)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(1), 1)
    assert_tracked(direct, arena.name, trials)
    trial = optuna.load_study(study_name=arena.name, storage=arena.storage_url).trials[0]
    assert "hpsearch:tracking" not in trial.user_attrs
