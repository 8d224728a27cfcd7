"""The run directory of an attempt: its own, so that a worker that was frozen cannot write into its successor's."""

from __future__ import annotations

import shutil
from pathlib import Path

from hpsearch.search.services import Services
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.trials.claims import Claim

# What a later attempt goes on with beside the checkpoint, which is found by the database's word alone.
_CARRIED = ("train.log", "steps.jsonl", "config.yaml", "changes.diff")


def open_attempt_dir(runs: Path, claim: Claim) -> Path:
    """Make the directory of an attempt, with the logs of the one before it, where this machine has them.

    Args:
        runs: the study's run directories on this machine.
        claim: the attempt.
    """
    folder = runs / f"{claim.number:04d}-{claim.attempt}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for earlier in range(claim.attempt - 1, 0, -1):
        if (before := runs / f"{claim.number:04d}-{earlier}").is_dir():
            for name in _CARRIED:
                if (before / name).exists():
                    shutil.copy2(before / name, folder / name)
            break
    return folder


def remove_earlier(runs: Path, claim: Claim) -> None:
    """Remove the directories of the attempts before this one: the trial has ended."""
    for earlier in range(1, claim.attempt):
        shutil.rmtree(runs / f"{claim.number:04d}-{earlier}", ignore_errors=True)


def runs_folder(runs_dir: Path, study: StoredStudy) -> Path:
    """Return the folder of a study's run directories on this machine."""
    return runs_dir / study.folder


def outbox_folder(home: Path, study: StoredStudy) -> Path:
    """Return the folder of what this machine has for MLflow of a study."""
    return home / "outbox" / study.folder


def report_path(services: Services, study: StoredStudy) -> Path:
    """Return where the report of a study is written by default."""
    return services.home / "reports" / f"{study.spec.name}.html"
