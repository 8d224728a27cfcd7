"""What a trial leaves in MLflow is listed in the Optuna dashboard."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from storage.claims import Claim
from storage.run_artifacts import artifact_attrs
from storage.study_storage import PostgresStorage


def list_artifacts(storage: PostgresStorage, claim: Claim, run_id: str, files: Iterable[Path]) -> None:
    """Note the files of a trial's run with the trial, in one statement; before it is settled, for then it is final.

    Raises:
        ClaimLostError: the trial is no longer this worker's.
    """
    with storage.together(claim.trial_id):
        for key, value in artifact_attrs(run_id, [path.name for path in files]).items():
            storage.set_trial_system_attr(claim.trial_id, key, value)
