"""Finalists and the sealed test set on real services: what a person types after a search, with a worker that dies."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import mlflow
import psutil
import pytest
import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from search.finalists import Finalists, read_finalists
from search.study import StudyHandle, load_study
from storage.studies import open_storage
from tests.e2e.support import Cli
from tests.e2e.test_interruptions import wait_for
from tests.e2e.test_steering import Say, say

__all__ = ["say"]

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("finalists")]

NAME, HELD = "to-confirm", "to-confirm.finalists"
FINALISTS = ("finalists", NAME, "--top", "3", "--seeds", "2", "--workers", "2")


@pytest.fixture(scope="module")
def searched(cli: Cli) -> Iterator[StudyHandle]:
    """A search of five trials."""
    arguments = ("--trials", "5", "--epochs", "3", "--workers", "2", "--sampler", "random", "--pruner", "none")
    cli("run", "digits", "--name", NAME, *arguments)
    storage = open_storage(cli.stack.storage_url, application_name="test")
    yield load_study(storage, NAME)
    storage.engine.dispose()


def table(handle: StudyHandle) -> Finalists:
    found = read_finalists(handle)
    assert found is not None
    return found


def kill_in_mid_trial(handle: StudyHandle) -> None:
    """Kill a worker that has reported an epoch of a trial and has not ended it."""
    running = sa.text("""
        SELECT a.worker FROM trials t JOIN studies s USING (study_id) JOIN hpsearch_attempts a USING (trial_id)
         WHERE s.study_name = :name AND t.state = 'RUNNING' AND a.ended_at IS NULL
           AND EXISTS (SELECT FROM trial_intermediate_values v WHERE v.trial_id = t.trial_id)
    """)

    def workers() -> list[int]:
        with handle.storage.engine.connect() as connection:
            found = connection.execute(running, {"name": HELD}).scalars().all()
        return [int(worker.rpartition(":")[2]) for worker in found]

    def killed() -> bool:
        for pid in workers():
            os.kill(pid, signal.SIGSTOP)  # so that the second look tells what it will never end
            wait_for(lambda pid=pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the worker to stop")
            mine = pid in workers()
            os.kill(pid, signal.SIGKILL if mine else signal.SIGCONT)
            if mine:
                return True
        return False

    wait_for(killed, "a worker to be in mid-trial")


def outcomes(handle: StudyHandle) -> list[str]:
    query = sa.text("""
        SELECT a.outcome FROM trials t JOIN studies s USING (study_id) JOIN hpsearch_attempts a USING (trial_id)
         WHERE s.study_name = :name
    """)
    with handle.storage.engine.connect() as connection:
        return sorted(connection.execute(query, {"name": HELD}).scalars())


@pytest.fixture(scope="module")
def disturbed(cli: Cli, searched: StudyHandle) -> Finalists:
    """The table of finalists one of whose workers was killed."""
    process = cli.start(*FINALISTS)
    kill_in_mid_trial(searched)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert outcomes(searched) == ["complete"] * 6 + ["lost"]
    found = table(searched)
    winner = found.row(found.winner)  # type: ignore[arg-type]
    assert f"winner: trial {winner.trial}, val accuracy {winner.mean:.4f} on 2 fresh seeds" in output
    assert re.search(rf"{winner.trial} +{winner.search_value:.4f} .*winner", output)
    return found


def test_a_killed_worker_changes_no_bit_of_the_table(
    cli: Cli, searched: StudyHandle, disturbed: Finalists, say: Say
) -> None:
    assert "the budget is spent" not in say(*FINALISTS), "called again it shows the table"
    say("delete", HELD, "--yes")
    cli(*FINALISTS)
    assert outcomes(searched) == ["complete"] * 6
    assert table(searched) == disturbed
    best = sorted((t for t in searched.trials()), key=lambda t: (-(t.value or 0), t.number))[:3]
    assert [row.trial for row in disturbed.rows] == [t.number for t in best]
    assert [row.search_value for row in disturbed.rows] == [t.value for t in best]


def trials(cli: Cli, name: str) -> list[FrozenTrial]:
    return cli.study(name).trials


def test_finalists_are_runs_under_the_run_of_the_search(cli: Cli, searched: StudyHandle, disturbed: Finalists) -> None:
    client = mlflow.MlflowClient(cli.stack.tracking_uri)
    parent = client.get_run(searched.attrs["hpsearch:mlflow_run_id"])
    assert (parent.info.status, parent.data.tags["hpsearch.trials"]) == ("FINISHED", "5 of 5")
    assert parent.data.tags["hpsearch.winner"] == str(disturbed.winner)
    searches = trials(cli, NAME)
    for trial in trials(cli, HELD):
        assert trial.state == TrialState.COMPLETE
        run = client.get_run(trial.user_attrs["hpsearch:mlflow_run_id"])
        tags = run.data.tags
        assert tags["mlflow.parentRunId"] == parent.info.run_id
        assert tags["hpsearch.finalist_of"] == str(trial.user_attrs["hpsearch:finalist_of"])
        assert tags["hpsearch.seed"] == str(trial.user_attrs["hpsearch:seed"])
        assert (run.info.status, tags["hpsearch.state"]) == ("FINISHED", "complete")
        points = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "val_accuracy")]
        assert sorted(points) == sorted(trial.intermediate_values.items())
        assert not (run.outputs and run.outputs.model_outputs), "the model to promote is the search's"
        same = searches[trial.user_attrs["hpsearch:finalist_of"]]
        assert trial.params == same.params
        assert trial.intermediate_values != same.intermediate_values
    for row in disturbed.rows:
        run = client.get_run(searches[row.trial].user_attrs["hpsearch:mlflow_run_id"])
        assert run.data.metrics["finalist_mean"] == row.mean
        assert run.data.metrics["finalist_spread"] == row.spread
        assert run.data.tags["hpsearch.finalist"] == disturbed.verdict(row)
        assert len(client.get_metric_history(run.info.run_id, "val_accuracy")) == 3, "the search's run is as it was"
    path = mlflow.artifacts.download_artifacts(f"runs:/{parent.info.run_id}/finalists.json")
    record = json.loads(Path(path).read_text())
    assert (record["winner"], record["seeds"]) == (disturbed.winner, list(disturbed.seeds))


def test_the_test_set_is_opened_once_for_the_winner(
    cli: Cli, searched: StudyHandle, disturbed: Finalists, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    said = say("open-test", NAME, "--yes")
    found = re.search(r"^test accuracy (\S+)$", said, re.MULTILINE)
    assert found, said
    assert f"for trial {disturbed.winner}" in said
    assert "unconfirmed" not in said
    again = cli("open-test", NAME, "--yes", "--unconfirmed", "--trial", "0", code=2)
    assert re.search(rf"was opened on \S+ at \S+ UTC by \S+ for trial {disturbed.winner}, and it opens once", again)
    assert f"test set: accuracy {float(found[1]):.4f}" in say("show", NAME)
    run_id = trials(cli, NAME)[disturbed.winner or 0].user_attrs["hpsearch:mlflow_run_id"]
    metrics = mlflow.MlflowClient(cli.stack.tracking_uri).get_run(run_id).data.metrics
    assert metrics["test_accuracy"] == pytest.approx(float(found[1]), abs=1e-6)
    assert 0.1 < metrics["test_accuracy"] <= 1
    assert "test_loss" in metrics
    study = cli.study(NAME)
    attrs = study._storage.get_study_system_attrs(study._study_id)
    note = "".join(value for key, value in sorted(attrs.items()) if key.startswith("dashboard:note_str"))
    assert f"Winner: trial {disturbed.winner}" in note
    assert "Test set: accuracy" in note
