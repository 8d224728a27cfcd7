"""Files that a custom training loop logs in each attempt of a trial."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpsearch.search.api.study import Study
from hpsearch.storage.attributes import RUN_ID
from hpsearch.storage.embedded.stack import StackInfo
from hpsearch.storage.mlflow.client import Tracking

# They share the MLflow run of a study `s`, so one pytest process runs them.
pytestmark = pytest.mark.xdist_group("several workers")

OBJECTIVE = """
def main(trial):
    rate = trial.suggest_float("rate", 0.01, 0.4, log=True)
    for epoch in trial.epochs():
        file = trial.folder / f"epoch-{epoch}.txt"
        file.write_text(str(rate))
        trial.log_artifact(file)
        trial.report({"error": rate / (epoch + 1)}, state={})

main.metric, main.direction, main.epochs = "error", "minimize", 4
"""


def test_files_of_an_attempt_that_pauses_at_a_rung_are_kept(
    database_url: str, stack: StackInfo, tmp_path: Path
) -> None:
    (tmp_path / "loop.py").write_text(OBJECTIVE)
    pruner = {"name": "asha", "min_resource": 2, "reduction_factor": 2, "min_complete": 1}
    study = Study.create(
        spec={
            "objective": f"{tmp_path}/loop.py:main",
            "name": "s",
            "n_trials": 2,
            "sampler": "random",
            "pruner": pruner,
        },
        storage_url=database_url,
        tracking_uri=stack.tracking_uri,
        home=str(tmp_path / "home"),
    )
    study.run_worker()
    client = Tracking(stack.tracking_uri).client
    files = [
        sorted(file.path for file in client.list_artifacts(trial.user_attrs[RUN_ID]) if file.path.startswith("epoch-"))
        for trial in study.trials
    ]
    assert sorted(files, key=len) == [
        ["epoch-0.txt", "epoch-1.txt"],
        ["epoch-0.txt", "epoch-1.txt", "epoch-2.txt", "epoch-3.txt"],
    ]
