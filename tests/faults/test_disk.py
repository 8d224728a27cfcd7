"""Checkpoints on a full disk, and torn checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlflow
import optuna
import pytest

from hpsearch.objectives.training.reproducibility import checkpoint
from hpsearch.search.process.exits import EXIT_UNAVAILABLE
from tests.faults.harness import Arena
from tests.faults.invariants import assert_equals_undisturbed
from tests.faults.orders import Order
from tests.waiting import wait_for

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("faults")]


def test_a_full_disk_costs_checkpoints_but_no_trial(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]]
) -> None:
    """Trial 0 never has disk space again; trial 1 has it in its third epoch, and is killed in its fourth."""
    orders = [
        Order("save checkpoint", "fill the disk", trial=0, epoch=1),
        Order("publish run", "free the disk", trial=0),
        Order("save checkpoint", "fill the disk", trial=1, epoch=0),
        Order("save checkpoint", "free the disk", trial=1, epoch=2),
        Order("training", "kill", trial=1, epoch=3),
        Order("save checkpoint", "fill the disk", trial=2, epoch=1),
        Order("training", "kill", trial=2, epoch=3),
    ]
    arena.create(3, orders)
    arena.work(1)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(3), 3)
    assert [t.outcomes for t in trials] == [["complete"], ["lost", "complete"], ["lost", "complete"]]
    again = {(e["trial"], e["epoch"]) for e in arena.events("training") if e["attempt"] == 2}
    assert again == {(1, 3), (2, 1), (2, 2), (2, 3)}, "each trial resumes after its last complete checkpoint"
    log = "".join(worker.log.read_text() for worker in arena.workers)
    assert log.count("File too large; the trial continues") == 3, "each worker logs it once"


def test_an_objective_without_disk_space_costs_no_trial(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]]
) -> None:
    arena.create(1, [Order("training", "no space", trial=0, attempt=n, epoch=2) for n in (1, 2, 3, 4)])
    arena.work(1, codes=(EXIT_UNAVAILABLE,))
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(1), 1)
    assert trials[0].outcomes == [*["released"] * 4, "complete"]
    log = "".join(worker.log.read_text() for worker in arena.workers)
    assert "no disk space left for 'cache.npy' (No space left on device); free disk space" in log
    assert "Traceback" not in log


def test_a_trial_resumes_on_another_machine(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]], tmp_path: Path
) -> None:
    """The homes share only the study's checkpoint URL. Deleting the study deletes its checkpoints."""
    shared = arena.folder / "shared"
    arena.create(1, [Order("training", "kill", trial=0, epoch=3)], settings=f"--checkpoint-url {shared}")
    first = arena.start()
    wait_for(lambda: arena.poll_workers() or first.ended, "the worker to be killed")
    kept = [path.name for path in shared.glob("*/0000/*")]
    assert sorted(kept) == ["0001-1.pt", "0002-1.pt"]
    other = arena.folder / "other"
    other.mkdir()
    arena.work(1, HPSEARCH_HOME=str(other))
    assert [e["epoch"] for e in arena.events("training") if e["attempt"] == 2] == [3], "no epoch is trained again"
    values = undisturbed(1)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, other, values, 1, store=shared)
    client = mlflow.MlflowClient(arena.tracking_uri)
    study = optuna.load_study(study_name=arena.name, storage=arena.storage_url)
    run_id = study.trials[0].user_attrs["hpsearch:mlflow_run_id"]
    best = checkpoint.read(Path(client.download_artifacts(run_id, "checkpoints/best.pt", str(tmp_path))))
    assert best["value"] == min(values[0]) == trials[0].value
    (shared / "left").touch()
    arena.run("delete", arena.name, "--yes", "--checkpoint-url", str(shared))
    assert [path.name for path in shared.iterdir()] == ["left"]


@pytest.mark.parametrize("how", ["torn", "gone"])
def test_a_trial_resumes_from_the_checkpoint_before_a_damaged_one(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]], how: str
) -> None:
    arena.create(1, [Order("training", "kill", trial=0, epoch=3)])

    first = arena.start()
    wait_for(lambda: arena.poll_workers() or first.ended, "the worker to be killed")
    next((arena.home / "runs").glob("*/0000-1/last.pt")).unlink()
    newest = next((arena.home / "checkpoints").glob("*/0000/0002-1.pt"))
    if how == "torn":
        newest.write_bytes(newest.read_bytes()[:-100])
    else:
        newest.unlink()
    arena.work(1)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(1), 1)
    assert trials[0].outcomes == ["lost", "complete"]
    assert [e["epoch"] for e in arena.events("training")] == [0, 1, 2, 3, 2, 3]
    for w in arena.workers:
        print(w.log.read_text()[-300:])
