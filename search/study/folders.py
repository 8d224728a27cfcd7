"""The files of a study on this machine: run directories of attempts, outbox and report."""

from __future__ import annotations

import shutil
from pathlib import Path

from hpsearch.search.services import Services
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.trials.claim_results import Claim

_CONTINUED_FILES = ("train.log", "steps.jsonl", "config.yaml", "changes.diff")


def open_attempt_dir(runs: Path, claim: Claim) -> Path:
    """Create the run directory of an attempt, with a copy of the logs of the previous attempt on this machine."""
    folder = runs / f"{claim.number:04d}-{claim.attempt}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for earlier in range(claim.attempt - 1, 0, -1):
        if (before := runs / f"{claim.number:04d}-{earlier}").is_dir():
            for name in _CONTINUED_FILES:
                if (before / name).exists():
                    shutil.copy2(before / name, folder / name)
            break
    return folder


def remove_earlier_attempts(runs: Path, claim: Claim) -> None:
    """Remove the run directories of earlier attempts of an ended trial."""
    for earlier in range(1, claim.attempt):
        shutil.rmtree(runs / f"{claim.number:04d}-{earlier}", ignore_errors=True)


def get_runs_folder(runs_dir: Path, study: StoredStudy) -> Path:
    """Return the folder of a study's run directories on this machine."""
    return runs_dir / study.folder


def get_outbox_folder(home: Path, study: StoredStudy) -> Path:
    """Return the folder with a study's journals of unsent records (the outbox) on this machine."""
    return home / "outbox" / study.folder


def get_report_path(services: Services, study: StoredStudy) -> Path:
    """Return the default path of a study's report."""
    return services.home / "reports" / f"{study.spec.name}.html"


def remove_report(services: Services, study: StoredStudy) -> None:
    """Remove the default report of a study, but not one whose name differs in case where file systems ignore it."""
    path = get_report_path(services, study)
    if path.name in (each.name for each in path.parent.glob("*.html")):
        path.unlink(missing_ok=True)
