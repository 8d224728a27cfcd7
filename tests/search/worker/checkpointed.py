"""A study whose trials write checkpoints, and simulated attempts on several machines."""

from __future__ import annotations

import uuid
from pathlib import Path

import fsspec
import optuna
import torch

from hpsearch.objectives.training.reproducibility import checkpoint
from hpsearch.objectives.training.reproducibility.checkpoint import RunFiles
from hpsearch.search.study.checkpoints import StudyCheckpoints
from hpsearch.search.worker.checkpoints import TrialCheckpoints
from hpsearch.storage.attributes import SPEC
from hpsearch.storage.checkpoints.pointers import read_pointers
from hpsearch.storage.checkpoints.store import CheckpointStore
from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome

LETTERS = ("format", "objective", "config", "seed", "split_seed", "split_hash")


def state_after(epoch: int) -> dict[str, object]:
    """Return the state of a run after an epoch; even epochs are the best so far."""
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
    """Write the shards of two ranks after an epoch and return their entry in the checkpoint."""
    folder = place / uuid.uuid4().hex
    folder.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (folder / name).write_text(f"{name} after epoch {epoch}")
    return {"folder": folder.name, "files": {path.name: checkpoint.describe_file(path) for path in folder.iterdir()}}


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
        self.checkpoints = StudyCheckpoints(CheckpointStore(url), self.engine, self.study_id, folder="s-1-abcd")

    def attempt(self, number: int, *, machine: str = "a") -> Attempt:
        """Start the next attempt, after the previous one released its trial."""
        if number > 1:
            self.claims.finish_attempt(self.last, Outcome.LOST, retry=True)
        claim = self.claims.claim()
        assert isinstance(claim, Claim)
        assert claim.attempt == number
        self.last = claim
        self.trial_id = claim.trial_id
        return Attempt(self, claim, self.folder / machine / "s-1-abcd" / "0000-1")

    def files(self) -> list[str]:
        return [path.removeprefix("s-1-abcd/") for path in self.checkpoints.files.find("s-1-abcd")]

    def pointers(self) -> list[str]:
        return [p.path.removeprefix("s-1-abcd/") for p in read_pointers(self.engine, self.trial_id).values()]

    def replace(self, name: str, data: bytes | None) -> None:
        fs, root = fsspec.core.url_to_fs(self.url)
        fs.rm_file(f"{root}/s-1-abcd/{name}")
        if data is not None:
            fs.pipe_file(f"{root}/s-1-abcd/{name}", data)


class Attempt:
    """An attempt of a trial in a run directory on a simulated machine."""

    def __init__(self, study: Study, claim: Claim, run_dir: Path) -> None:
        self.study = study
        self.claim = claim
        self.local = RunFiles(run_dir)
        self.kept = TrialCheckpoints(study.checkpoints, self.local, claim)

    def save(self, epoch: int, *, parts: bool = False) -> None:
        state = state_after(epoch)
        if parts:
            state["shards"] = written_in_parts(self.local.shards, epoch)
        self.kept.save(state, best=epoch % 2 == 0)
        self.epoch = epoch

    def commit(self) -> None:
        pending = self.kept.pending
        assert pending is not None
        self.study.claims.report(self.claim, self.epoch, 0.5, pending)
        self.kept.mark_committed(self.epoch)

    def epochs(self, *epochs: int, parts: bool = False) -> Attempt:
        for epoch in epochs:
            self.save(epoch, parts=parts)
            self.commit()
        return self

    def restore(self) -> int | None:
        """Restore and return the last epoch of the checkpoint."""
        state = self.kept.restore()
        return None if state is None else len(state["history"]) - 1
