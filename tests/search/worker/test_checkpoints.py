"""Checkpoints of a trial: any machine can resume from committed ones, and others are removed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import sqlalchemy as sa
import tenacity
import torch
from optuna.trial import TrialState

from hpsearch import promotable
from hpsearch.objectives.training.reproducibility import checkpoint
from hpsearch.search.worker import checkpoints
from hpsearch.storage.checkpoints.pointers import copy_pointers, find_referenced_paths
from hpsearch.storage.checkpoints.store import CheckpointStore
from hpsearch.storage.errors import CheckpointStoreError
from hpsearch.storage.trials.finishing import Outcome
from tests.faults.harness import Zygote
from tests.search.worker.checkpointed import Study, state_after


def test_two_checkpoints_are_kept_with_a_pointer_each(study: Study) -> None:
    attempt = study.attempt(1).epochs(0, 1, 2)
    assert study.files() == ["0000/0001-1.pt", "0000/0002-1.pt"]
    assert study.pointers() == ["0000/0002-1.pt", "0000/0001-1.pt"]
    attempt.save(3)
    assert len(study.files()) == 3, "the oldest goes when the newest is committed, not before"


@pytest.mark.parametrize("machine", ["a", "b"])
def test_an_attempt_resumes_after_the_last_committed_epoch(study: Study, machine: str) -> None:
    """On the same machine and on another. An epoch that was saved but not reported is trained again."""
    study.attempt(1).epochs(0, 1, 2).save(3)
    second = study.attempt(2, machine=machine)
    assert second.restore() == 2
    assert study.files() == ["0000/0001-1.pt", "0000/0002-1.pt"], "the uncommitted file is gone"
    best = checkpoint.read(second.local.best_path)
    assert best["epoch"] == 2
    assert torch.equal(best["model"]["w"], torch.full((3,), 2.0)), "the best weights come with the state"
    second.epochs(3)
    assert study.files() == ["0000/0002-1.pt", "0000/0003-2.pt"]
    assert study.pointers() == ["0000/0003-2.pt", "0000/0002-1.pt"]


def test_a_resume_on_the_same_machine_downloads_nothing(folder_study: Study) -> None:
    first = folder_study.attempt(1).epochs(0, 1)
    inode = first.local.last_path.stat().st_ino
    for path in folder_study.folder.glob("store/*/*/*.pt"):
        path.unlink()
    assert folder_study.attempt(2).restore() == 1
    assert first.local.last_path.stat().st_ino == inode


def test_a_local_file_of_an_unreported_epoch_is_replaced(folder_study: Study) -> None:
    first = folder_study.attempt(1).epochs(0)
    first.save(1)
    (first.local.run_dir / "metrics.jsonl").write_text('{"epoch": 1}\n')
    second = folder_study.attempt(2)
    assert second.restore() == 0
    assert checkpoint.read(second.local.last_path)["model"]["w"][0] == 0
    assert not (second.local.run_dir / "metrics.jsonl").exists(), "it had the epoch that is trained again"


@pytest.mark.parametrize("data", [None, b"", b"PK torn"])
def test_the_previous_checkpoint_is_used_if_the_newest_is_torn_or_gone(
    study: Study, caplog: pytest.LogCaptureFixture, data: bytes | None
) -> None:
    study.attempt(1).epochs(0, 1, 2)
    study.replace("0000/0002-1.pt", data)
    second = study.attempt(2, machine="b")
    assert second.restore() == 1
    assert "cannot resume after epoch 3" in caplog.text
    second.epochs(2)
    assert study.files() == ["0000/0001-1.pt", "0000/0002-2.pt"], "the torn file gave way"
    assert study.pointers() == ["0000/0002-2.pt", "0000/0001-1.pt"]


def test_a_file_that_is_no_checkpoint_is_skipped_despite_its_checksum(folder_study: Study) -> None:
    first = folder_study.attempt(1).epochs(0)
    (folder_study.folder / "other").write_bytes(b"not what torch writes")
    (folder_study.folder / "other").replace(first.local.last_path)
    first.kept._put_last("0001", {})
    first.epoch = 1
    first.commit()
    assert folder_study.attempt(2, machine="b").restore() == 0


def test_a_trial_without_a_usable_checkpoint_restarts_from_scratch(
    study: Study, caplog: pytest.LogCaptureFixture
) -> None:
    study.attempt(1).epochs(0, 1)
    for name in study.files():
        study.replace(name, None)
    second = study.attempt(2, machine="b")
    assert second.restore() is None
    assert "starting from the first epoch" in caplog.text
    second.epochs(0, 1)
    assert study.pointers() == ["0000/0001-2.pt", "0000/0000-2.pt"]
    assert study.files() == ["0000/0000-2.pt", "0000/0001-2.pt"]


def test_machines_without_a_shared_folder_keep_the_pointers_of_others(database_url: str, tmp_path: Path) -> None:
    study = Study(f"file://{tmp_path}/store-a", database_url, tmp_path)
    study.attempt(1).epochs(0, 1, 2)
    study.checkpoints.files = CheckpointStore(f"file://{tmp_path}/store-b")
    other = study.attempt(2, machine="b")
    assert other.restore() is None
    other.epochs(0)
    study.checkpoints.files = CheckpointStore(f"file://{tmp_path}/store-a")
    assert study.attempt(3).restore() == 2


def test_an_unreachable_store_is_not_treated_as_empty(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    study.attempt(1).epochs(0)

    def away(*_: object) -> None:
        raise CheckpointStoreError("away")

    second = study.attempt(2, machine="b")
    monkeypatch.setattr(checkpoints._retry_download, "stop", tenacity.stop_after_attempt(2))
    monkeypatch.setattr(study.checkpoints.files, "get", away)
    with pytest.raises(CheckpointStoreError):
        second.restore()


def test_a_thawed_attempt_removes_only_its_own_files(study: Study) -> None:
    """It was frozen past its lease. Another worker resumed the trial and is uploading its next file."""
    frozen = study.attempt(1).epochs(0)
    second = study.attempt(2, machine="b")
    assert second.restore() == 0
    second.epochs(1)
    second.save(2)
    frozen.save(1)
    frozen.save(2)
    frozen.kept.abandon()
    assert study.files() == ["0000/0000-1.pt", "0000/0001-2.pt", "0000/0002-2.pt"]
    second.commit()
    assert study.attempt(3, machine="c").restore() == 2


@pytest.mark.parametrize("path", ["precious.txt", "other-1-abcd/0000/0000-1.pt", "s-1-abcd/0001/0000-1.pt"])
def test_a_pointer_to_a_file_of_others_is_ignored(folder_study: Study, path: str) -> None:
    """Worker roles and backups can write any path into the database."""
    folder_study.attempt(1).epochs(0)
    precious = Path(folder_study.url.removeprefix("file://"), path)
    precious.parent.mkdir(parents=True, exist_ok=True)
    precious.write_text("of others")
    with folder_study.engine.begin() as connection:
        connection.execute(sa.text("UPDATE hpsearch_checkpoints SET epoch = epoch + 1"))
        insert = "INSERT INTO hpsearch_checkpoints VALUES (:trial, :epoch, 1, :path, '', 9)"
        for epoch in (0, 5):
            connection.execute(sa.text(insert), {"trial": folder_study.trial_id, "epoch": epoch, "path": path})
    second = folder_study.attempt(2, machine="b")
    assert second.restore() == 0
    second.epochs(1, 2, 3)
    assert precious.read_text() == "of others"


def test_a_commit_with_a_lost_reply_keeps_its_file(study: Study) -> None:
    first = study.attempt(1)
    first.save(0)
    first.commit()
    first.kept.abandon()
    assert study.files() == ["0000/0000-1.pt"]
    assert study.attempt(2, machine="b").restore() == 0


def test_a_completed_trial_keeps_only_its_best_checkpoint(study: Study) -> None:
    first = study.attempt(1).epochs(0, 1)
    study.storage.set_trial_state_values(study.trial_id, TrialState.COMPLETE, [1.0])
    first.kept.delete()
    assert (study.files(), study.pointers()) == ([], [])
    assert [path.name for path in first.local.run_dir.glob("*.pt")] == ["best.pt"]


@pytest.mark.parametrize(
    ("state", "files", "resumable"),
    [
        (TrialState.COMPLETE, [], False),
        (TrialState.PRUNED, [], False),
        (TrialState.FAIL, ["0000/0000-1.pt", "0000/0001-1.pt"], True),
        (TrialState.RUNNING, ["0000/0000-1.pt", "0000/0001-1.pt", "0000/0002-1.pt"], True),
    ],
)
def test_files_of_dead_workers_are_removed(study: Study, state: TrialState, files: list[str], resumable: bool) -> None:
    first = study.attempt(1).epochs(0, 1)
    first.save(2)  # and died here, or right after the trial completed
    half_written = [first.local.run_dir / name for name in (".previous.pt.4711.tmp", ".config.yaml.tmp")]
    for path in half_written:
        path.write_bytes(b"PK")
    if state != TrialState.RUNNING:
        study.storage.set_trial_state_values(study.trial_id, state, [1.0] if state == TrialState.COMPLETE else None)
    study.checkpoints.clean_up(study.folder / "a" / "s-1-abcd")
    assert study.files() == files
    assert bool(study.pointers()) == resumable
    assert {path.exists() for path in (first.local.last_path, *half_written)} == {state == TrialState.RUNNING}
    assert first.local.best_path.exists()


def test_files_of_a_deleted_study_are_removed(study: Study) -> None:
    study.attempt(1).epochs(0)
    study.checkpoints.delete()
    assert study.files() == []


@pytest.mark.parametrize("are_shared", [False, True])
def test_files_that_are_not_checkpoints_are_kept(folder_study: Study, tmp_path: Path, are_shared: bool) -> None:
    """Worker roles and backups can choose the folder and the URL, such as `s-20260101` with photos in `0002`."""
    study = folder_study
    study.checkpoints.are_shared = are_shared
    first = study.attempt(1).epochs(0)
    kept = ["0000/1-1.pt.jpg", "0000/model.pt", "0000/photos/1-1.pt", "0000/photos/a.jpg", "0001/a.jpg"]
    own = ("0000/0000-1.pt.metadata", "0000/0000-1.pt.0_0.distcp", "0000/0001-1.pt.1a2b3c4d.tmp", "0002/0000-1.pt")
    folder = study.folder / "store" / "s-1-abcd"
    for name in (*kept, *own):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    first.kept.abandon()
    assert set(kept) < set(study.files())
    study.storage.set_trial_state_values(study.trial_id, TrialState.COMPLETE, [1.0])
    study.checkpoints.delete_trial(0)
    assert study.files() == [*kept, "0002/0000-1.pt"]
    study.checkpoints.clean_up(tmp_path)
    study.checkpoints.delete()
    assert study.files() == kept
    assert not (folder / "0002").exists(), "empty folders are removed"


def test_a_lost_best_checkpoint_is_written_again(folder_study: Study, caplog: pytest.LogCaptureFixture) -> None:
    """The disk was full when the best epoch was saved. An older best checkpoint must not replace it."""

    def full(_state: object) -> None:
        raise OSError(28, "No space left on device")

    first = folder_study.attempt(1).epochs(0, 1)
    caplog.set_level(logging.WARNING)
    for epoch in (2, 3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(first.local, "_write_last", full)
            first.kept.save(state_after(epoch), best=epoch == 2)
        assert first.kept.pending is None
        assert not first.local.best_path.exists()
    assert caplog.text.count("No space left on device") == 1, "logged once"
    assert "the trial continues, and a resume would start after epoch 2" in caplog.text
    first.epochs(5)
    assert checkpoint.read(first.local.best_path)["epoch"] == 4
    assert folder_study.pointers() == ["0000/0005-1.pt", "0000/0001-1.pt"]


FULL = """
import resource, sys, torch
from pathlib import Path
from hpsearch.objectives.training.reproducibility import checkpoint
path = Path(sys.argv[1])
checkpoint.write(path, {"w": torch.zeros(10)})
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    checkpoint.write(path, {"w": torch.zeros(100_000)})
except OSError as error:
    print(error.strerror, len(checkpoint.read(path)["w"]), [p.name for p in path.parent.iterdir()])
"""


def test_a_full_disk_is_reported_and_keeps_the_old_checkpoint(zygote: Zygote, tmp_path: Path) -> None:
    """Torch's own error is about an unexpected position."""
    said, _ = zygote.python(FULL, tmp_path / "x.pt").communicate()
    assert said.strip() == "File too large 10 ['x.pt']"


def test_the_best_checkpoint_has_everything_for_a_promotion(folder_study: Study) -> None:
    folder_study.attempt(1).epochs(0, 1)
    second = folder_study.attempt(2, machine="b")
    second.restore()
    assert checkpoint.read(second.local.best_path).keys() == promotable(state_after(1)).keys()


def test_files_that_another_trial_has_copied_stay_until_that_trial_needs_them_no_more(
    folder_study: Study, tmp_path: Path
) -> None:
    study = folder_study
    study.checkpoints.are_shared = True
    study.attempt(1).epochs(0, 1)
    copied = ["0000/0000-1.pt", "0000/0001-1.pt"]
    child = study.storage.create_new_trial(study.study_id)
    with study.engine.begin() as connection:
        copy_pointers(connection, child=child, parent=study.trial_id)
    assert {f"s-1-abcd/{path}" for path in copied} == find_referenced_paths(study.engine, study.study_id)
    assert sorted(study.checkpoints.read_trial_files(child, 1)) == [0, 1]
    parent = study.attempt(2)
    assert parent.restore() == 1
    parent.epochs(2, 3, 4)
    own = ["0000/0003-2.pt", "0000/0004-2.pt"]
    assert study.files() == [*copied, *own], "the parent has other checkpoints, but the child needs these"
    study.claims.finish_attempt(parent.claim, Outcome.COMPLETE, value=0.5)
    assert study.checkpoints.find_leftovers(tmp_path)[0].keys() == {f"s-1-abcd/{path}" for path in own}
    parent.kept.delete()
    assert study.files() == copied
    study.storage.set_trial_state_values(child, TrialState.COMPLETE, [0.5])
    study.checkpoints.clean_up(tmp_path)
    assert study.files() == []
