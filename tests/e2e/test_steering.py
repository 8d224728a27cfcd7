"""A study is stopped, extended and repaired while its workers run, with the commands that a person types."""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest
from optuna.trial import TrialState

from tests.e2e.support import Cli
from tests.e2e.test_interruptions import BROKEN, GATED, start, wait_for

# One process runs what looks at the one search.
pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("steering")]


def parent_of(cli: Cli, name: str) -> mlflow.entities.Run:
    client = mlflow.MlflowClient(cli.stack.tracking_uri)
    return client.get_run(cli.study(name).user_attrs["hpsearch:mlflow_run_id"])


def states(cli: Cli, name: str) -> list[TrialState]:
    return [trial.state for trial in cli.study(name).trials]


def test_a_running_study_is_stopped_started_and_extended(cli: Cli, tmp_path: Path) -> None:
    name = "steered"
    process = start(cli, name, tmp_path)
    said = cli("stop", name)
    assert "running trials: 1" in said
    (tmp_path / "open").touch()
    output, _ = process.communicate()
    assert process.returncode == 1, output
    assert "stopped by " in output
    assert states(cli, name) == [TrialState.WAITING]
    assert list(cli.study(name).trials[0].intermediate_values) == [0, 1, 2], "the epoch was ended"
    assert "was stopped by" in cli("run", GATED, "--name", name, code=2)

    cli("start", name)
    gate = tmp_path / "second"
    gate.mkdir()
    process = cli.start("run", GATED, "--name", name, "--workers", "1", GATE=str(gate))
    # The trial that goes on is past its third epoch after one: a fresh process is at the gate in the next one.
    wait_for(lambda: list(gate.glob("reached-*")), "the worker to arrive at the gate")
    assert "3 -> 4 trials" in cli("extend", name, "--trials", "+1")
    (gate / "open").touch()
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert f"study {name}: 4 of 4 trials" in output
    assert states(cli, name) == [TrialState.COMPLETE] * 4
    assert parent_of(cli, name).info.status == "FINISHED"

    assert f"hpsearch extend {name} --trials 9" in cli("run", GATED, "--name", name, "--trials", "9", code=2)
    cli("extend", name, "--trials", "5")
    parent = parent_of(cli, name)
    assert (parent.info.status, parent.data.tags["hpsearch.trials"]) == ("RUNNING", "4 of 5")
    cli("run", GATED, "--name", name, "--workers", "1")
    parent = parent_of(cli, name)
    assert (parent.info.status, parent.data.tags["hpsearch.trials"]) == ("FINISHED", "5 of 5")


def test_a_failed_trial_is_tried_again_in_its_own_run(cli: Cli) -> None:
    name = "retried"
    arguments = ("run", BROKEN, "--name", name, "--workers", "1")
    cli(*arguments, "--trials", "1", BREAK="in workers", code=1)
    failed = cli.study(name).trials[0]
    assert failed.state == TrialState.FAIL
    assert "KeyError" in cli("show", name, "--trial", "0")

    assert "from its beginning" in cli("retry", name, "--trial", "0")
    client = mlflow.MlflowClient(cli.stack.tracking_uri)
    run = client.get_run(failed.user_attrs["hpsearch:mlflow_run_id"])
    assert (run.info.status, run.data.tags["hpsearch.state"]) == ("SCHEDULED", "waiting")
    assert parent_of(cli, name).info.status == "RUNNING"

    cli(*arguments, BREAK="", code=1)  # now it trains, and diverges
    again = cli.study(name).trials[0]
    assert again.params == failed.params
    assert again.user_attrs["hpsearch:infeasible"] is True
    assert again.user_attrs["hpsearch:mlflow_run_id"] == run.info.run_id
    run = client.get_run(run.info.run_id)
    assert (run.info.status, run.data.tags["hpsearch.state"]) == ("FAILED", "infeasible")
    assert [line.split()[-1] for line in cli("show", name, "--trial", "0").splitlines() if " UTC " in line] == [
        "retried",
        "infeasible",
    ]
    cli("retry", name, "--trial", "0")
    waiting = cli.study(name).trials[0]
    assert (waiting.state, waiting.intermediate_values) == (TrialState.WAITING, {})
