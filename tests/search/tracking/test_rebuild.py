"""A trial that MLflow lacks and whose checkpoint is gone is told of, and keeps no other from being sent."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from search.study.checkpoints import open_checkpoints
from search.tracking.rebuild import resend
from search.tracking.tracker import Tracker
from storage.attributes import TRACKING
from storage.mlflow.run_links import RunLinks
from tests.search.promotion.support import Tracked


def test_a_checkpoint_that_is_gone_is_told_of_each_trial(tracked: Tracked, tmp_path: Path) -> None:
    study = tracked.stored
    trials = [study.trials()[number]._trial_id for number in (0, 2)]
    RunLinks(study.engine).mark(trials, TRACKING, "pending: on its way from host")
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
