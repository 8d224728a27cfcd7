"""TensorBoard and Weights & Biases in addition to MLflow, with killed workers and outages of MLflow."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hpsearch.search.services import DASHBOARD_COMMAND
from hpsearch.storage.embedded import stack as embedded
from tests.faults.harness import Arena, wire
from tests.faults.invariants import assert_equals_undisturbed, assert_tracked
from tests.faults.orders import Order
from tests.faults.scripted import EPOCHS
from tests.faults.trackers.records import assert_sent, event_points, wandb_rows
from tests.waiting import wait_for

pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
pytest.importorskip("wandb", reason="the package wandb is not installed")

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("faults")]

Undisturbed = Callable[[int], list[list[float]]]


@pytest.fixture
def events(arena: Arena) -> Path:
    """Return the folder of the study's event files; runs of Weights & Biases are in offline files."""
    arena.settings = {"WANDB_MODE": "offline", "HOME": str(arena.folder)}
    return arena.folder / "events" / arena.name


def settings(events: Path) -> str:
    return f"--tensorboard {events.parent} --wandb me/faults"


def test_a_trial_killed_three_times_has_one_run_and_one_history_in_each_tracker(
    arena: Arena, events: Path, undisturbed: Undisturbed
) -> None:
    """It is killed during training, and after a reader wrote the events but before it stored its position."""
    orders = [
        Order("training", "kill", trial=0, attempt=1, epoch=1),
        Order("write events", "kill", trial=0, attempt=2, when="after", nth=2),
        Order("training", "kill", trial=0, attempt=3, epoch=3),
    ]
    arena.create(1, orders, retries=3, settings=settings(events))
    arena.work(1, PACE="0.5")
    arena.run("sync", arena.name)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(1), 1)
    assert trials[0].outcomes[-1] == "complete"
    assert [arena.has_obeyed(index) for index in range(3)] == [True] * 3
    assert_tracked(arena.tracking_uri, arena.name, trials)
    assert_sent(trials, events, arena.home)
    assert not list((arena.home / "outbox").glob("*/*")), "all of it has arrived everywhere"


@pytest.mark.soak
def test_an_outage_of_mlflow_does_not_affect_other_trackers(
    arena: Arena, events: Path, undisturbed: Undisturbed
) -> None:
    with wire(arena.tracking_uri) as (line, uri):
        arena.tracking_uri, direct = uri, arena.tracking_uri
        arena.create(3, [], settings=settings(events))
        worker = arena.start()
        wait_for(lambda: arena.poll_workers() or arena.events("reported"), "an epoch")
        line.cut()
        wait_for(lambda: arena.poll_workers() or worker.ended, "the worker to leave")
        assert worker.exit_code == 0, worker.log.read_text()
        output = worker.log.read_text()
        assert "not fully sent to MLflow" in output
        for number in range(3):
            assert len(event_points(events, number)) == EPOCHS, "while MLflow is away"
            assert len(wandb_rows(arena.home, number)) == EPOCHS
        line.mend()
        assert "no unsent records are left" in arena.run("sync", arena.name)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(3), 3)
    assert_tracked(direct, arena.name, trials)
    assert_sent(trials, events, arena.home)


@pytest.mark.soak  # the same as above with a killed server
def test_all_trackers_are_complete_after_mlflow_is_killed_for_half_of_a_search(
    own_stack: embedded.StackInfo, arena: Arena, events: Path, undisturbed: Undisturbed
) -> None:
    arena.tracking_uri = own_stack.tracking_uri
    arena.create(8, [], settings=settings(events))
    phase, seen = "before", set[int]()

    def trained() -> int:
        return sum(event["epoch"] == EPOCHS - 1 for event in arena.events("reported"))

    def meanwhile(_: object) -> None:
        nonlocal phase
        if phase == "before" and trained() >= 2:
            [service] = [one for one in embedded.read_status(own_stack.home) if one.name == "MLflow"]
            process = psutil.Process(service.pid)
            for victim in [process, *process.children(recursive=True)]:
                victim.send_signal(signal.SIGKILL)
            psutil.wait_procs([process])
            phase = "away"
        elif phase == "away":
            seen.update(n for n in range(2, 8) if len(event_points(events, n)) == EPOCHS)
            if trained() >= 6 and len(seen) >= 2:
                assert embedded.up(own_stack.home, dashboard=DASHBOARD_COMMAND).tracking_uri == own_stack.tracking_uri
                phase = "back"

    arena.work(2, meanwhile=meanwhile, PACE="0.3")
    assert phase == "back"
    arena.run("sync", arena.name)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(8), 8)
    assert_tracked(own_stack.tracking_uri, arena.name, trials)
    assert_sent(trials, events, arena.home)


def test_records_for_unreachable_weights_and_biases_are_sent_later(
    arena: Arena, events: Path, undisturbed: Undisturbed
) -> None:
    """Port 9 of this machine is closed."""
    arena.create(1, [], settings=settings(events))
    arena.settings |= {"WANDB_MODE": "online", "WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    worker = arena.start()
    wait_for(lambda: arena.poll_workers() or worker.ended, "the worker to leave")
    assert worker.exit_code == 0, worker.log.read_text()
    output = worker.log.read_text()
    assert "Weights & Biases unavailable (http://127.0.0.1:9: no answer" in output
    assert "1 trial not fully sent to Weights & Biases" in output
    assert len(event_points(events, 0)) == EPOCHS
    arena.settings["WANDB_MODE"] = "offline"
    assert "1 trial sent, no unsent records are left" in arena.run("sync", arena.name)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(1), 1)
    assert_tracked(arena.tracking_uri, arena.name, trials)
    assert_sent(trials, events, arena.home)


def test_an_unusable_tracker_prevents_creating_and_joining_a_study(arena: Arena, events: Path) -> None:
    """Each error is one line with the setting, its value and a remedy."""
    arena.settings |= {"WANDB_MODE": "online", "NETRC": str(arena.folder / "netrc")}
    with pytest.raises(
        AssertionError, match=r"hpsearch: --wandb me/faults: no API key of Weights & Biases; set WANDB_API_"
    ):
        arena.create(1, [], settings=settings(events))
    arena.settings["WANDB_MODE"] = "offline"
    arena.create(1, [], settings=settings(events))
    events.parent.rmdir()
    events.parent.write_text("in its way")
    assert f"--tensorboard {events.parent} is not writable (File exists); choose another" in arena.run(
        "worker", "--study", arena.name, code=2
    )
    events.parent.unlink()
    arena.settings["WANDB_MODE"] = "online"
    said = arena.run("worker", "--study", arena.name, code=2)
    assert "hpsearch: --wandb me/faults: no API key of Weights & Biases" in said
    assert "Traceback" not in said
