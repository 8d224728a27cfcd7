"""Outages of MLflow and deleted runs during a search, and lost machines that did not send their trials."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import optuna
import psutil
import pytest

from hpsearch.search.services import DASHBOARD_COMMAND
from hpsearch.storage.embedded import stack as embedded
from tests.faults.harness import Arena, wire
from tests.faults.invariants import assert_equals_undisturbed, assert_tracked
from tests.faults.orders import Order
from tests.faults.scripted import EPOCHS
from tests.waiting import wait_for

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("faults")]

Undisturbed = Callable[[int], list[list[float]]]


class Server:
    """An MLflow server that is killed and started again."""

    def __init__(self, stack: embedded.StackInfo) -> None:
        self.home, self.uri = stack.home, stack.tracking_uri

    def kill(self) -> None:
        [service] = [one for one in embedded.read_status(self.home) if one.name == "MLflow"]
        process = psutil.Process(service.pid)
        for victim in [process, *process.children(recursive=True)]:
            victim.send_signal(signal.SIGKILL)
        psutil.wait_procs([process])

    def start(self) -> None:
        assert embedded.up(self.home, dashboard=DASHBOARD_COMMAND).tracking_uri == self.uri


@pytest.fixture
def server(own_stack: embedded.StackInfo, arena: Arena) -> Iterator[Server]:
    """The MLflow server of the arena."""
    found = Server(own_stack)
    arena.tracking_uri = found.uri
    yield found
    found.start()


@pytest.mark.soak  # test_services.py cuts the connection, e2e/test_interruptions.py kills the server
def test_an_outage_of_mlflow_during_half_of_a_search_loses_nothing(
    arena: Arena, server: Server, undisturbed: Undisturbed
) -> None:
    """MLflow has every metric of every epoch once, and each trial has its model."""
    arena.models = None
    arena.create(6, [])

    def trained() -> int:
        return sum(event["epoch"] == EPOCHS - 1 for event in arena.events("reported"))

    phase = "before"

    def meanwhile(_: object) -> None:
        nonlocal phase
        if phase == "before" and trained() >= 2:
            server.kill()
            phase = "away"
        elif phase == "away" and trained() >= 4:
            server.start()
            phase = "back"

    arena.work(2, meanwhile=meanwhile)
    assert phase == "back"
    assert "no unsent records are left\n" in arena.run("sync", arena.name)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(6), 6)
    assert [t.outcomes for t in trials] == [["complete"]] * 6, "no trial felt it"
    assert_tracked(server.uri, arena.name, trials, models=range(6))


@pytest.mark.soak
def test_a_trial_killed_three_times_on_three_machines_has_one_run_and_one_model(
    arena: Arena, undisturbed: Undisturbed
) -> None:
    """Machines that share only the checkpoints. Only the last machine sends the remaining records to MLflow."""
    orders = [Order("training", "kill", trial=0, attempt=n, epoch=n) for n in (1, 2, 3)]
    arena.models = None
    arena.create(1, orders, retries=3, settings=f"--checkpoint-url {arena.folder / 'shared'}")
    for n in range(4):
        (home := arena.folder / f"machine-{n}").mkdir()
        worker = arena.start(HPSEARCH_HOME=str(home))
        wait_for(lambda worker=worker: arena.poll_workers() or worker.ended, "the worker to end")
    assert worker.exit_code == 0, worker.log.read_text()
    trials = assert_equals_undisturbed(
        arena.storage_url, arena.name, home, undisturbed(1), 1, store=arena.folder / "shared"
    )
    assert trials[0].outcomes == ["lost", "lost", "lost", "complete"]
    assert_tracked(arena.tracking_uri, arena.name, trials, models=range(1))


# `sync` calls the same code; a test below runs it after a search that started without MLflow.
@pytest.mark.parametrize("by", [pytest.param("sync", marks=pytest.mark.soak), "worker"])
def test_the_best_trial_of_a_lost_machine_gets_a_model(arena: Arena, undisturbed: Undisturbed, by: str) -> None:
    """Its worker dies after the trial is completed and before anything is sent. The machine and its outbox are lost."""
    arena.models = None
    orders = [
        Order("finish run", "kill", trial=0, when="after"),
        Order("log batch", "hang until mended", trial=0, attempt=0),
    ]
    trials = 1 if by == "sync" else 2
    arena.create(trials, orders, settings=f"--checkpoint-url {arena.folder / 'shared'}")
    (gone := arena.folder / "gone").mkdir()
    worker = arena.start(HPSEARCH_HOME=str(gone))
    wait_for(lambda: arena.poll_workers() or worker.ended, "the worker to die")
    (arena.orders / "mended").touch()
    assert (
        "hpsearch:tracking" in optuna.load_study(study_name=arena.name, storage=arena.storage_url).trials[0].user_attrs
    )
    if by == "sync":
        assert "1 trial sent, no unsent records are left" in arena.run("sync", arena.name)
    else:
        arena.work(1)
        if undisturbed(2)[1] < undisturbed(2)[0]:  # the other trial won: only a winner is sent automatically
            arena.run("sync", arena.name)
    found = assert_equals_undisturbed(
        arena.storage_url, arena.name, arena.home, undisturbed(trials), trials, store=arena.folder / "shared"
    )
    assert_tracked(arena.tracking_uri, arena.name, found, models=range(trials))


@pytest.mark.soak
def test_a_search_that_starts_without_mlflow_sends_its_records_later(arena: Arena, undisturbed: Undisturbed) -> None:
    with wire(arena.tracking_uri) as (line, uri):
        arena.tracking_uri, direct = uri, arena.tracking_uri
        line.cut()
        arena.models = None
        arena.create(2, [])
        output = arena.workers[0].log.read_text()
        assert "no MLflow server answers" in output
        assert "the search continues" in output
        assert "no MLflow server answers" in arena.run("worker", "--study", arena.name, "--tracking-required", code=1)
        workers = [arena.start() for _ in range(2)]
        wait_for(lambda: arena.poll_workers() or all(w.ended for w in workers), "the workers to leave")
        assert [w.exit_code for w in workers] == [0, 0]
        assert "the search continues" in workers[0].log.read_text()
        line.mend()
        assert "2 trials sent, no unsent records are left" in arena.run("sync", arena.name)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(2), 2)
    assert_tracked(direct, arena.name, trials, models=range(2))


@pytest.mark.soak
def test_workers_that_start_together_create_one_parent_run(arena: Arena, undisturbed: Undisturbed) -> None:
    """Their study was created during an outage of MLflow, so it has no run yet."""
    with wire(arena.tracking_uri) as (line, uri):
        arena.tracking_uri, direct = uri, arena.tracking_uri
        line.cut()
        arena.create(4, [Order("claim", "hang", trial=number, when="after") for number in range(4)])
        line.mend()
        workers = [arena.start() for _ in range(4)]
        wait_for(lambda: all(arena.has_obeyed(n) for n in range(4)), "four workers to have a trial")
        (arena.orders / "open").touch()
        wait_for(lambda: arena.poll_workers() or all(w.ended for w in workers), "the workers to leave")
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(4), 4)
    assert_tracked(direct, arena.name, trials)


def test_a_full_outbox_costs_no_trial(arena: Arena, undisturbed: Undisturbed) -> None:
    """Its disk is full when two epochs are logged. They are sent from memory."""
    orders = []
    for nth in (3, 5):  # the epochs follow the journal's head and the parameters
        orders.append(Order("append to journal", "fill the outbox", trial=0, nth=nth))
        orders.append(Order("append to journal", "free the disk", trial=0, nth=nth, when="after"))
    arena.create(1, orders)
    arena.work(1)
    assert all(arena.has_obeyed(index) for index in range(4))
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(1), 1)
    assert_tracked(arena.tracking_uri, arena.name, trials)
