"""A trial that MLflow lacks and whose checkpoint is gone is told of, and keeps no other from being sent."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from search.study.checkpoints import open_checkpoints
from search.study.study import load_study
from search.tracking.rebuild import resend
from search.tracking.tracker import Tracker
from storage.attributes import TRACKING
from storage.mlflow.run_links import RunLinks
from storage.study_storage.opening import open_storage
from tests.search.promotion.support import Tracked


def test_a_checkpoint_that_is_gone_is_told_of_each_trial(tracked: Tracked, database_url: str, tmp_path: Path) -> None:
    trials = [tracked.stored.trials()[number]._trial_id for number in (0, 2)]
    RunLinks(tracked.stored.engine).mark(trials, TRACKING, "pending: on its way from host")
    # Another process's: finished trials are read once.
    study = load_study(open_storage(database_url, application_name="test"), tracked.stored.spec.name)
    with study.engine.begin() as connection:
        statement = "INSERT INTO hpsearch_checkpoints VALUES (:trial, 0, 1, 'gone/0000-1.pt', repeat('0', 64), 1)"
        connection.execute(sa.text(statement), [{"trial": trial} for trial in trials])
    checkpoints = open_checkpoints(study, tmp_path, None)
    tracker = Tracker(study, tracked.tracking, checkpoints, tmp_path)
    problems = resend(study, tracker, checkpoints)
    assert [problem.partition(" is not under")[0] for problem in problems] == [
        "trial 0: gone/0000-1.pt",
        "trial 2: gone/0000-1.pt",
    ]
