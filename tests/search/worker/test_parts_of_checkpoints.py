"""Sharded checkpoints: shards are stored and removed with their checkpoint, and incomplete ones are rejected."""

from __future__ import annotations

from pathlib import Path

import pytest
from optuna.trial import TrialState

from hpsearch.objectives.training.reproducibility import checkpoint
from hpsearch.storage.checkpoints.store import StoredFile
from hpsearch.storage.errors import CheckpointStoreError, StoredCheckpointError
from tests.search.worker.checkpointed import Study, state_after

PARTS = ("", ".0_0.distcp", ".1_0.distcp", ".metadata")


def in_parts(*checkpoints: str) -> list[str]:
    """Return the files of checkpoints that two ranks wrote."""
    return [f"0000/{name}.pt{part}" for name in checkpoints for part in PARTS]


def test_shards_are_uploaded_and_removed_with_their_checkpoint(study: Study) -> None:
    first = study.attempt(1).epochs(0, 1, 2, parts=True)
    assert study.files() == in_parts("0001-1", "0002-1")
    first.save(3, parts=True)
    second = study.attempt(2, machine="b")
    state = second.kept.restore()
    assert state is not None
    folder = Path(state["shards"]["folder"])
    assert folder.parent == second.local.shards
    verified = second.local.restore()
    assert verified is not None
    assert (verified["shards"], len(verified["history"])) == (state["shards"], 3)
    assert (folder / "__1_0.distcp").read_text() == "__1_0.distcp after epoch 2"
    assert study.files() == in_parts("0001-1", "0002-1"), "the uncommitted ones are gone, with their parts"
    second.epochs(3, parts=True)
    assert study.files() == in_parts("0002-1", "0003-2"), "also the files of another attempt"
    second.epochs(4, 5)
    assert study.files() == ["0000/0004-2.pt", "0000/0005-2.pt"], "and where none are in parts any more"
    assert not second.local.shards.exists()


@pytest.mark.parametrize("data", [None, b"", b"__1_0.distcp after epoch 0"])
def test_the_previous_checkpoint_is_used_if_a_shard_is_damaged_or_gone(
    study: Study, caplog: pytest.LogCaptureFixture, data: bytes | None
) -> None:
    study.attempt(1).epochs(0, 1, 2, parts=True)
    study.replace("0000/0002-1.pt.1_0.distcp", data)
    second = study.attempt(2, machine="b")
    assert second.restore() == 1
    assert "cannot resume after epoch 3" in caplog.text
    assert [path.name for path in second.local.shards.iterdir()] == [
        checkpoint.read(second.local.last_path)["shards"]["folder"]
    ], "what was brought of the other is gone"


@pytest.mark.parametrize(("folder", "name"), [("x", "../../y"), ("x/..", ".metadata"), ("", ".metadata")])
def test_a_checkpoint_that_names_other_files_as_shards_is_rejected(study: Study, folder: str, name: str) -> None:
    first = study.attempt(1)
    state = {**state_after(1), "shards": {"folder": folder, "files": {name: {"sha256": "0", "size": 1}}}}
    with pytest.raises(StoredCheckpointError, match="names files that are not shards"):
        first.kept._put_last("0001", state)


def test_failed_shards_cost_only_their_checkpoint(folder_study: Study, caplog: pytest.LogCaptureFixture) -> None:
    first = folder_study.attempt(1).epochs(0, parts=True)
    state = {**state_after(1), "shards": {"folder": "x", "files": {}, "failed": "No space left on device"}}
    first.kept.save(state, best=False)
    assert first.kept.pending is None
    assert "checkpoint of epoch 2 not saved: No space left on device; the trial continues" in caplog.text
    assert folder_study.files() == in_parts("0000-1")
    assert folder_study.attempt(2).restore() == 0


def test_a_full_store_keeps_no_shard_of_a_failed_checkpoint(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    first = study.attempt(1).epochs(0, parts=True)
    put = study.checkpoints.files.put

    def full(local: Path, *, name: str, sha256: str | None = None) -> StoredFile:
        if name.endswith("1_0.distcp"):
            raise CheckpointStoreError("full")
        return put(local, name=name, sha256=sha256)

    monkeypatch.setattr(study.checkpoints.files, "put", full)
    first.save(1, parts=True)
    assert study.files() == in_parts("0000-1")


def test_a_completed_trial_leaves_no_shards(study: Study) -> None:
    first = study.attempt(1).epochs(0, 1, parts=True)
    study.storage.set_trial_state_values(study.trial_id, TrialState.COMPLETE, [1.0])
    first.kept.delete()
    assert (study.files(), study.pointers()) == ([], [])
    assert not first.local.shards.exists()


@pytest.mark.parametrize(
    ("state", "left"),
    [
        (TrialState.COMPLETE, []),
        (TrialState.FAIL, ["0000-1", "0001-1"]),
        (TrialState.RUNNING, ["0000-1", "0001-1", "0002-1"]),
    ],
)
def test_shards_of_dead_workers_are_removed(study: Study, state: TrialState, left: list[str]) -> None:
    first = study.attempt(1).epochs(0, 1, parts=True)
    first.save(2, parts=True)
    if state != TrialState.RUNNING:
        study.storage.set_trial_state_values(study.trial_id, state, [1.0] if state == TrialState.COMPLETE else None)
    runs = study.folder / "a" / "s-1-abcd"
    _, local = study.checkpoints.find_leftovers(runs)
    assert (local.get(first.local.shards, 0) > 0) == (state != TrialState.RUNNING)
    study.checkpoints.clean_up(runs)
    assert study.files() == in_parts(*left)
    assert first.local.shards.exists() == (state == TrialState.RUNNING)
