"""A trial's checkpoints: what was committed is resumed from, on any machine; what was not is removed."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

import fsspec
import optuna
import pytest
import tenacity
import torch
from optuna.trial import TrialState

from objectives.training import LocalSession, promotable
from objectives.training.reproducibility import checkpoint, shards
from search.study.checkpoints import StudyCheckpoints
from search.worker import checkpoints
from search.worker.checkpoints import TrialCheckpoints
from storage.attributes import SPEC
from storage.checkpoints.pointers import read_pointers
from storage.checkpoints.store import Checkpoints, Stored
from storage.errors import CheckpointStoreError
from storage.study_storage.opening import open_storage
from storage.trials.claims import Claim, Claims
from storage.trials.outcome import Outcome
from tests.faults.harness import Zygote

LETTERS = ("format", "objective", "config", "seed", "split_seed", "split_hash")


def state_after(epoch: int) -> dict[str, object]:
    """What a run's state looks like after an epoch, the best so far at even epochs."""
    best = epoch - epoch % 2
    weights = {"w": torch.full((3,), float(best))}
    return {
        **dict.fromkeys(LETTERS, "x"),
        "history": [{"epoch": e, "timestamp": 0.0, "metrics": {}} for e in range(epoch + 1)],
        "epochs": 100,
        "best": {"epoch": best, "value": float(best), "metrics": {}, "model": weights},
        "model": {"w": torch.full((3,), float(epoch))},
    }


def written_in_parts(place: Path, epoch: int) -> dict[str, object]:
    """What two ranks wrote after an epoch, as the manifest has it."""
    folder = place / uuid.uuid4().hex
    folder.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (folder / name).write_text(f"{name} after epoch {epoch}")
    return {"folder": folder.name, "files": {path.name: shards.entry(path) for path in folder.iterdir()}}


class Study:
    """A study with trials in a real database, its checkpoints under a URL, and machines that run attempts."""

    def __init__(self, url: str, database_url: str, folder: Path) -> None:
        self.url = url
        self.storage = open_storage(database_url, application_name="test")
        self.engine = self.storage.engine
        self.study_id = self.storage.create_new_study([optuna.study.StudyDirection.MAXIMIZE], "s")
        self.storage.set_study_user_attr(self.study_id, SPEC, {"n_trials": 1, "retries": 9})
        self.claims = Claims(self.engine, self.study_id, worker="w")
        self.folder = folder
        self.checkpoints = StudyCheckpoints(Checkpoints(url), self.engine, self.study_id, folder="s-1-abcd")

    def attempt(self, number: int, *, machine: str = "a") -> Attempt:
        """The next attempt, after the one before has given its trial back."""
        if number > 1:
            self.claims.settle(self.last, Outcome.LOST, retry=True)
        claim = self.claims.claim()
        assert isinstance(claim, Claim)
        assert claim.attempt == number
        self.last = claim
        self.trial_id = claim.trial_id
        return Attempt(self, claim, self.folder / machine / "s-1-abcd" / "0000-1")

    def files(self) -> list[str]:
        return [path.removeprefix("s-1-abcd/") for path in self.checkpoints.files.find("s-1-abcd")]

    def pointers(self) -> list[str]:
        return [p.stored.path.removeprefix("s-1-abcd/") for p in read_pointers(self.engine, self.trial_id)]

    def replace(self, name: str, data: bytes | None) -> None:
        fs, root = fsspec.core.url_to_fs(self.url)
        fs.rm_file(f"{root}/s-1-abcd/{name}")
        if data is not None:
            fs.pipe_file(f"{root}/s-1-abcd/{name}", data)


class Attempt:
    """One attempt at a trial, in a run directory on some machine."""

    def __init__(self, study: Study, claim: Claim, run_dir: Path) -> None:
        self.study = study
        self.claim = claim
        self.local = LocalSession(run_dir)
        self.kept = TrialCheckpoints(study.checkpoints, self.local, claim)

    def save(self, epoch: int, *, parts: bool = False) -> None:
        state = state_after(epoch)
        if parts:
            state["shards"] = written_in_parts(self.local.shards, epoch)
        best = epoch % 2 == 0
        with self.kept.saving(state, best=best):
            self.local.save(state, best=best)

    def commit(self) -> None:
        pending = self.kept.pending
        assert pending is not None
        self.study.claims.report(self.claim, pending.epoch, 0.5, pending.stored)
        self.kept.committed()

    def epochs(self, *epochs: int, parts: bool = False) -> Attempt:
        for epoch in epochs:
            self.save(epoch, parts=parts)
            self.commit()
        return self

    def restore(self) -> int | None:
        """The epoch that it goes on after."""
        state = self.kept.restore()
        return None if state is None else len(state["history"]) - 1


@pytest.fixture(params=["file", "memory"])
def study(request: pytest.FixtureRequest, database_url: str, tmp_path: Path) -> Study:
    url = f"file://{tmp_path}/store" if request.param == "file" else f"memory://{uuid.uuid4().hex}"
    return Study(url, database_url, tmp_path)


@pytest.fixture
def folder_study(database_url: str, tmp_path: Path) -> Study:
    return Study(f"file://{tmp_path}/store", database_url, tmp_path)


def test_two_checkpoints_are_kept_and_each_has_its_pointer(study: Study) -> None:
    attempt = study.attempt(1).epochs(0, 1, 2)
    assert study.files() == ["0000/0001-1.pt", "0000/0002-1.pt"]
    assert study.pointers() == ["0000/0002-1.pt", "0000/0001-1.pt"]
    attempt.save(3)
    assert len(study.files()) == 3, "the oldest goes when the newest is committed, not before"


@pytest.mark.parametrize("machine", ["a", "b"])
def test_an_attempt_goes_on_after_the_last_committed_epoch(study: Study, machine: str) -> None:
    """On the same machine and on another; an epoch that was saved but never reported is trained again."""
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


def test_the_same_machine_brings_back_nothing_that_it_has(folder_study: Study) -> None:
    first = folder_study.attempt(1).epochs(0, 1)
    inode = first.local.last_path.stat().st_ino
    for path in folder_study.folder.glob("store/*/*/*.pt"):
        path.unlink()
    assert folder_study.attempt(2).restore() == 1
    assert first.local.last_path.stat().st_ino == inode


def test_a_local_file_of_an_epoch_that_was_never_reported_gives_way(folder_study: Study) -> None:
    first = folder_study.attempt(1).epochs(0)
    first.save(1)
    (first.local.run_dir / "metrics.jsonl").write_text('{"epoch": 1}\n')
    second = folder_study.attempt(2)
    assert second.restore() == 0
    assert checkpoint.read(second.local.last_path)["model"]["w"][0] == 0
    assert not (second.local.run_dir / "metrics.jsonl").exists(), "it had the epoch that is trained again"


@pytest.mark.parametrize("data", [None, b"", b"PK torn"])
def test_the_one_before_is_taken_when_the_newest_is_torn_or_gone(
    study: Study, caplog: pytest.LogCaptureFixture, data: bytes | None
) -> None:
    study.attempt(1).epochs(0, 1, 2)
    study.replace("0000/0002-1.pt", data)
    second = study.attempt(2, machine="b")
    assert second.restore() == 1
    assert "epoch 3 cannot be resumed" in caplog.text
    second.epochs(2)
    assert study.files() == ["0000/0001-1.pt", "0000/0002-2.pt"], "the torn file gave way"
    assert study.pointers() == ["0000/0002-2.pt", "0000/0001-1.pt"]


def test_a_file_of_the_right_checksum_that_is_no_checkpoint_is_passed_over(folder_study: Study) -> None:
    first = folder_study.attempt(1).epochs(0)
    (folder_study.folder / "other").write_bytes(b"not what torch writes")
    (folder_study.folder / "other").replace(first.local.last_path)
    first.kept._keep_elsewhere(1, "s-1-abcd/0000/0001-1.pt", {})
    first.commit()
    assert folder_study.attempt(2, machine="b").restore() == 0


def test_without_a_usable_checkpoint_the_trial_starts_anew(study: Study, caplog: pytest.LogCaptureFixture) -> None:
    study.attempt(1).epochs(0, 1)
    for name in study.files():
        study.replace(name, None)
    second = study.attempt(2, machine="b")
    assert second.restore() is None
    assert "starting from its beginning" in caplog.text
    second.epochs(0, 1)
    assert study.pointers() == ["0000/0001-2.pt", "0000/0000-2.pt"]
    assert study.files() == ["0000/0000-2.pt", "0000/0001-2.pt"]


def test_machines_that_share_no_folder_do_not_forget_each_others_checkpoints(database_url: str, tmp_path: Path) -> None:
    study = Study(f"file://{tmp_path}/store-a", database_url, tmp_path)
    study.attempt(1).epochs(0, 1, 2)
    study.checkpoints.files = Checkpoints(f"file://{tmp_path}/store-b")
    other = study.attempt(2, machine="b")
    assert other.restore() is None
    other.epochs(0)
    study.checkpoints.files = Checkpoints(f"file://{tmp_path}/store-a")
    assert study.attempt(3).restore() == 2


def test_a_store_that_is_away_is_not_taken_for_an_empty_one(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    study.attempt(1).epochs(0)

    def away(*_: object) -> None:
        raise CheckpointStoreError("away")

    second = study.attempt(2, machine="b")
    monkeypatch.setattr(checkpoints._waiting, "stop", tenacity.stop_after_attempt(2))
    monkeypatch.setattr(study.checkpoints.files, "get", away)
    with pytest.raises(CheckpointStoreError):
        second.restore()


def test_a_thawed_attempt_removes_what_it_put_and_nothing_else(study: Study) -> None:
    """It was frozen past its lease; the trial has gone on elsewhere, and the new attempt's next file is on its way."""
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


def test_a_commit_whose_answer_was_lost_keeps_its_file(study: Study) -> None:
    first = study.attempt(1)
    first.save(0)
    first.commit()
    first.kept.abandon()
    assert study.files() == ["0000/0000-1.pt"]
    assert study.attempt(2, machine="b").restore() == 0


def test_a_settled_trial_leaves_its_best_alone(study: Study) -> None:
    first = study.attempt(1).epochs(0, 1)
    study.storage.set_trial_state_values(study.trial_id, TrialState.COMPLETE, [1.0])
    first.kept.forget()
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
def test_what_dead_workers_left_is_tidied_up(
    study: Study, state: TrialState, files: list[str], resumable: bool
) -> None:
    first = study.attempt(1).epochs(0, 1)
    first.save(2)  # and there it died, or right after it settled
    half_written = first.local.run_dir / ".previous.pt.4711.tmp"
    half_written.write_bytes(b"PK")
    if state != TrialState.RUNNING:
        study.storage.set_trial_state_values(study.trial_id, state, [1.0] if state == TrialState.COMPLETE else None)
    study.checkpoints.tidy(study.folder / "a" / "s-1-abcd")
    assert study.files() == files
    assert bool(study.pointers()) == resumable
    assert first.local.last_path.exists() == half_written.exists() == (state == TrialState.RUNNING)
    assert first.local.best_path.exists()


def test_a_deleted_studys_files_go(study: Study) -> None:
    study.attempt(1).epochs(0)
    study.checkpoints.forget()
    assert study.files() == []


def test_a_best_that_was_lost_is_written_again(folder_study: Study, caplog: pytest.LogCaptureFixture) -> None:
    """The disk was full when the best epoch was saved: an older best must not pass for it."""
    first = folder_study.attempt(1).epochs(0, 1)
    caplog.set_level(logging.WARNING)
    for epoch in (2, 3):
        with first.kept.saving(state_after(epoch), best=epoch == 2):
            raise OSError(28, "No space left on device")
        assert first.kept.pending is None
        assert not first.local.best_path.exists()
    assert caplog.text.count("No space left on device") == 1, "told once"
    assert "the trial goes on, and would be resumed after epoch 2" in caplog.text
    first.epochs(5)
    assert checkpoint.read(first.local.best_path)["epoch"] == 4
    assert folder_study.pointers() == ["0000/0005-1.pt", "0000/0001-1.pt"]


def test_a_session_that_saves_less_often_puts_each_file_once(folder_study: Study) -> None:
    first = folder_study.attempt(1)
    first.local = LocalSession(first.local.run_dir, interval=3600)
    first.kept._local = first.local
    first.epochs(0)
    first.save(1)
    assert first.kept.pending is None
    assert folder_study.files() == ["0000/0000-1.pt"]


PARTS = ("", ".0_0.distcp", ".1_0.distcp", ".metadata")


def in_parts(*checkpoints: str) -> list[str]:
    """The files of checkpoints that two ranks wrote."""
    return [f"0000/{name}.pt{part}" for name in checkpoints for part in PARTS]


def test_the_parts_of_a_checkpoint_come_and_go_with_it(study: Study) -> None:
    first = study.attempt(1).epochs(0, 1, 2, parts=True)
    assert study.files() == in_parts("0001-1", "0002-1")
    first.save(3, parts=True)
    second = study.attempt(2, machine="b")
    state = second.kept.restore()
    assert state is not None
    folder = Path(state["shards"]["folder"])
    assert folder.parent == second.local.shards
    assert shards.verified(state, second.local.run_dir) == state
    assert (folder / "__1_0.distcp").read_text() == "__1_0.distcp after epoch 2"
    assert study.files() == in_parts("0001-1", "0002-1"), "the uncommitted ones are gone, with their parts"
    second.epochs(3, parts=True)
    assert study.files() == in_parts("0002-1", "0003-2"), "also of what another attempt put"
    second.epochs(4, 5)
    assert study.files() == ["0000/0004-2.pt", "0000/0005-2.pt"], "and where none are in parts any more"
    assert not second.local.shards.exists()


@pytest.mark.parametrize("data", [None, b"", b"__1_0.distcp after epoch 0"])
def test_the_one_before_is_taken_when_a_part_is_torn_changed_or_gone(
    study: Study, caplog: pytest.LogCaptureFixture, data: bytes | None
) -> None:
    study.attempt(1).epochs(0, 1, 2, parts=True)
    study.replace("0000/0002-1.pt.1_0.distcp", data)
    second = study.attempt(2, machine="b")
    assert second.restore() == 1
    assert "epoch 3 cannot be resumed" in caplog.text
    assert [path.name for path in second.local.shards.iterdir()] == [
        checkpoint.read(second.local.last_path)["shards"]["folder"]
    ], "what was brought of the other is gone"


def test_parts_that_were_not_written_cost_the_checkpoint_alone(
    folder_study: Study, caplog: pytest.LogCaptureFixture
) -> None:
    first = folder_study.attempt(1).epochs(0, parts=True)
    state = {**state_after(1), "shards": {"folder": "x", "files": {}, "failed": "No space left on device"}}
    with first.kept.saving(state, best=False):
        first.local.save(state, best=False)
    assert first.kept.pending is None
    assert "no checkpoint of epoch 2: No space left on device; the trial goes on" in caplog.text
    assert folder_study.files() == in_parts("0000-1")
    assert folder_study.attempt(2).restore() == 0


def test_a_store_that_is_full_keeps_no_part_of_what_it_did_not_take(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = study.attempt(1).epochs(0, parts=True)
    put = study.checkpoints.files.put

    def full(local: Path, *, name: str, sha256: str | None = None) -> Stored:
        if name.endswith("1_0.distcp"):
            raise CheckpointStoreError("full")
        return put(local, name=name, sha256=sha256)

    monkeypatch.setattr(study.checkpoints.files, "put", full)
    first.save(1, parts=True)
    assert study.files() == in_parts("0000-1")


def test_a_settled_trial_leaves_no_parts(study: Study) -> None:
    first = study.attempt(1).epochs(0, 1, parts=True)
    study.storage.set_trial_state_values(study.trial_id, TrialState.COMPLETE, [1.0])
    first.kept.forget()
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
def test_parts_that_dead_workers_left_are_tidied_up(study: Study, state: TrialState, left: list[str]) -> None:
    first = study.attempt(1).epochs(0, 1, parts=True)
    first.save(2, parts=True)
    if state != TrialState.RUNNING:
        study.storage.set_trial_state_values(study.trial_id, state, [1.0] if state == TrialState.COMPLETE else None)
    runs = study.folder / "a" / "s-1-abcd"
    _, local = study.checkpoints.leftovers(runs)
    assert (local.get(first.local.shards, 0) > 0) == (state != TrialState.RUNNING)
    study.checkpoints.tidy(runs)
    assert study.files() == in_parts(*left)
    assert first.local.shards.exists() == (state == TrialState.RUNNING)


FULL = """
import resource, sys, torch
from pathlib import Path
from objectives.training.reproducibility import checkpoint
path = Path(sys.argv[1])
checkpoint.write(path, {"w": torch.zeros(10)})
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    checkpoint.write(path, {"w": torch.zeros(100_000)})
except OSError as error:
    print(error.strerror, len(checkpoint.read(path)["w"]), [p.name for p in path.parent.iterdir()])
"""


def test_a_full_disk_is_called_so_and_leaves_the_old_checkpoint(zygote: Zygote, tmp_path: Path) -> None:
    """Torch itself speaks of an unexpected position."""
    said, _ = zygote.python(FULL, tmp_path / "x.pt").communicate()
    assert said.strip() == "File too large 10 ['x.pt']"


def test_best_is_what_a_promotion_needs(folder_study: Study) -> None:
    folder_study.attempt(1).epochs(0, 1)
    second = folder_study.attempt(2, machine="b")
    second.restore()
    assert checkpoint.read(second.local.best_path).keys() == promotable(state_after(1)).keys()
