"""Trials that are missing in MLflow: a lost checkpoint is logged, a trial that arrives meanwhile is skipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from rich.console import Console

from hpsearch.search.run.sync import sync_study
from hpsearch.search.services import Services
from hpsearch.search.spec.spec import parse_spec
from hpsearch.search.study.checkpoints import open_checkpoints
from hpsearch.search.study.folders import get_outbox_folder
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.search.tracking.rebuild import resend
from hpsearch.search.tracking.tracker import Tracker
from hpsearch.storage.attributes import TRACKING
from hpsearch.storage.mlflow.run_links import RunLinks
from hpsearch.storage.study_storage.storage import open_storage
from tests.search.promotion.support import Tracked

PENDING = "pending: records not yet sent from host"


@pytest.fixture
def study(tracked: Tracked, database_url: str) -> StoredStudy:
    """Create a study with two trials that another process is sending to MLflow and whose checkpoints are lost."""
    trials = {number: tracked.stored.trials()[number]._trial_id for number in (0, 2)}
    RunLinks(tracked.stored.engine).set_attr_of_trials(trials.values(), TRACKING, PENDING)
    # From another process, because finished trials are read once.
    study = load_study(open_storage(database_url, application_name="test"), tracked.stored.spec.name)
    with study.engine.begin() as connection:
        statement = "INSERT INTO hpsearch_checkpoints VALUES (:trial, 0, 1, :path, repeat('0', 64), 1)"
        paths = {trial: f"{study.folder}/{number:04d}/0000-1.pt" for number, trial in trials.items()}
        connection.execute(sa.text(statement), [{"trial": trial, "path": path} for trial, path in paths.items()])
    return study


def send(tracked: Tracked, study: StoredStudy, home: Path, tell: Callable[[str], None]) -> list[str]:
    checkpoints = open_checkpoints(study, home, None)
    return resend(study, Tracker(study, tracked.tracking, checkpoints, home), checkpoints, on_progress=tell)


def deliver(tracked: Tracked, home: Path, number: int) -> None:
    """Do as the other process does when MLflow has all records of a trial."""
    RunLinks(tracked.stored.engine).record_delivery(tracked.stored.trials()[number]._trial_id, None)
    open_checkpoints(tracked.stored, home, None).delete_trial(number)


def test_a_lost_checkpoint_is_reported_for_each_trial(tracked: Tracked, study: StoredStudy, tmp_path: Path) -> None:
    problems = send(tracked, study, tmp_path, lambda _: None)
    assert [problem.partition(" does not exist at")[0] for problem in problems] == [
        f"trial 0: {study.folder}/0000/0000-1.pt",
        f"trial 2: {study.folder}/0002/0000-1.pt",
    ]


def test_a_pointer_to_a_file_of_another_trial_is_not_followed(
    tracked: Tracked, study: StoredStudy, tmp_path: Path
) -> None:
    """Every worker's database role can write it."""
    with study.engine.begin() as connection:
        connection.execute(sa.text("UPDATE hpsearch_checkpoints SET path = 'other/0000/0000-1.pt'"))
    problems = send(tracked, study, tmp_path, lambda _: None)
    assert [problem.partition(";")[0] for problem in problems] == [
        "trial 0: the trial has no checkpoint",
        "trial 2: the trial has no checkpoint",
    ]


def test_a_model_is_rebuilt_with_all_metrics_of_the_study(tracked: Tracked, study: StoredStudy, tmp_path: Path) -> None:
    """A metric of the study that the objective lacks is an error, also if it is not the first one."""
    bounded = replace(study, spec=parse_spec({**study.spec.model_dump(), "constraints": "sparsity<=1"}))
    problems = send(tracked, bounded, tmp_path, lambda _: None)
    assert [problem.partition(" is not reported with")[0] for problem in problems] == [
        "trial 0: metric 'sparsity'",
        "trial 2: metric 'sparsity'",
    ]


def test_a_trial_that_arrives_during_the_check_is_not_missing(
    tracked: Tracked, study: StoredStudy, tmp_path: Path
) -> None:
    """It arrives between the query for pending trials and the check of checkpoints."""
    messages: list[str] = []

    def tell(what: str) -> None:
        if not messages:
            deliver(tracked, tmp_path, 0)
        messages.append(what)

    problems = send(tracked, study, tmp_path, tell)
    assert [problem.partition(":")[0] for problem in problems] == ["trial 2"]
    assert len(messages) == 2, "both were on their way at first"


def test_a_trial_that_arrived_after_the_check_is_not_changed(
    tracked: Tracked, study: StoredStudy, tmp_path: Path
) -> None:
    assert study.trials()[0].user_attrs[TRACKING] == PENDING
    deliver(tracked, tmp_path, 0)
    messages: list[str] = []
    problems = send(tracked, study, tmp_path, messages.append)
    assert [problem.partition(":")[0] for problem in problems] == ["trial 2"]
    assert len(messages) == 1


def test_sync_names_damaged_journals_and_how_to_give_up_their_records(
    tracked: Tracked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = get_outbox_folder(tmp_path, tracked.stored) / "0001-1"
    damaged.mkdir(parents=True)
    damaged.with_name("0001-2").mkdir()  # another attempt of the same trial
    services = Services(tmp_path, "unused", tracked.tracking.uri, None)
    assert sync_study(services, tracked.stored, Console(width=1000)).unsent == 1
    said = capsys.readouterr().out
    assert (
        f"0001-1 is missing or damaged; restore journal.jsonl, or give up its records with: rm -r {damaged}\n" in said
    )
    assert "0 trials sent, 1 not sent\n" in said
