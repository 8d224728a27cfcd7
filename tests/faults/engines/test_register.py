"""The table of workers in `hpsearch top`."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
import sqlalchemy as sa

from hpsearch.storage.attributes import VERSION
from tests.faults.harness import Arena, Worker
from tests.faults.orders import Order
from tests.waiting import wait_for

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("engines")]


def standing(arena: Arena) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(arena.run("top", arena.name, "--json"))
    return found


def row(arena: Arena, worker: Worker) -> dict[str, Any]:
    (found,) = [each for each in standing(arena)["workers"] if each["identity"]["pid"] == worker.pid]
    return dict(found)


@pytest.mark.soak
def test_the_register_has_the_state_and_exit_reason_of_workers(arena: Arena) -> None:
    arena.create(2, [Order("training", "hang", trial=0, epoch=1), Order("training", "hang until mended", trial=1)])
    first = arena.start(SLURM_JOB_ID="78", SLURM_ARRAY_JOB_ID="77", SLURM_ARRAY_TASK_ID="3")
    wait_for(lambda: arena.has_obeyed(0), "the first worker to be in its second epoch")
    second = arena.start(KUBERNETES_SERVICE_HOST="10.0.0.1", HOSTNAME="search-4")
    wait_for(lambda: arena.has_obeyed(1), "the second worker to be in its first epoch")
    running = row(arena, first)
    assert (running["state"], running["trial"], running["epoch"], running["left_as"]) == ("running", 0, 1, None)
    assert (running["identity"]["engine"], running["identity"]["job"]) == ("slurm", "77_3")
    assert 0 < running["lease_left"] <= 4
    assert (row(arena, second)["identity"]["engine"], row(arena, second)["epoch"]) == ("kubernetes", 0)
    second.send(signal.SIGKILL)
    wait_for(lambda: arena.poll_workers() or second.ended, "the second worker to die")
    assert row(arena, second)["state"] == "lost"
    first.send(signal.SIGTERM)
    (arena.orders / "open").touch()
    wait_for(lambda: arena.poll_workers() or first.ended, "the first worker to leave")
    assert (row(arena, first)["state"], row(arena, first)["left_as"]) == ("left", "stopped")
    (arena.orders / "mended").touch()
    arena.work(1)
    found = standing(arena)
    (last,) = [each for each in found["workers"] if each["left_as"] == "no trial left to run"]
    assert (last["state"], last["trials"]) == ("left", 2)
    assert (found["progress"]["complete"], found["eta"]) == (2, 0.0)
    assert [event["outcome"] for event in found["events"]][:2] == ["complete", "complete"]
    assert sorted(event["outcome"] for event in found["events"]) == ["complete", "complete", "lost", "released"]
    assert found["reached"] == {"1": 2, "2": 2, "4": 2}
    shown = arena.start("top", arena.name, "--once", COLUMNS="120")
    wait_for(lambda: arena.poll_workers() or shown.ended, "hpsearch top")
    said = shown.log.read_text()
    for part in (
        "2/2 trials: 2 complete",
        "0 active workers, 3 exited or lost",
        "slurm 77_3",
        "lost",
        "exited: stopped",
    ):
        assert part in said, said


def test_a_worker_of_another_series_is_refused(arena: Arena) -> None:
    arena.create(1, [])
    engine = sa.create_engine(arena.storage_url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        made = sa.text("""
            UPDATE study_user_attributes SET value_json = :made FROM studies s
             WHERE s.study_id = study_user_attributes.study_id AND s.study_name = :name AND key = :key
        """)
        arguments = {"made": '"0.99.1"', "name": arena.name, "key": VERSION}
        assert connection.execute(made, arguments).rowcount == 1
    said = arena.run("worker", "--study", arena.name, code=2)
    assert "was created by hpsearch 0.99.1, whose results may differ" in said
    assert "install hpsearch 0.99.1 on this machine" in said
