"""A study is stopped, extended and repaired with the command line while its workers run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlflow
import pytest
from optuna.trial import TrialState

from hpsearch.search.cli import run_command
from tests.e2e.support import BROKEN, GATED, PLAIN, Cli, start
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("faults")]

Say = Callable[..., str]


@pytest.fixture
def say(cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Run a command in this process, which saves seconds of imports."""
    for name in ("HPSEARCH_HOME", "COLUMNS"):
        monkeypatch.setenv(name, cli.environment[name])

    def run(*arguments: str) -> str:
        assert run_command(list(arguments)) == 0
        return capsys.readouterr().out

    return run


def parent_of(cli: Cli, name: str) -> mlflow.entities.Run:
    client = mlflow.MlflowClient(cli.stack.tracking_uri)
    return client.get_run(cli.study(name).user_attrs["hpsearch:mlflow_run_id"])


def states(cli: Cli, name: str) -> list[TrialState]:
    return [trial.state for trial in cli.study(name).trials]


def test_a_running_study_is_stopped_and_started(cli: Cli, say: Say, tmp_path: Path) -> None:
    name = "steered"
    process = start(cli, name, tmp_path)
    assert "running trials: 1" in say("stop", name)
    (tmp_path / "open").touch()
    output, _ = process.communicate()
    assert process.returncode == 1, output
    assert "stopped by " in output
    assert states(cli, name) == [TrialState.WAITING]
    assert list(cli.study(name).trials[0].intermediate_values) == [0, 1, 2], "the epoch was ended"
    assert "was stopped by" in cli("run", GATED, "--name", name, code=2)
    say("start", name)
    cli("run", GATED, "--name", name, "--workers", "1")
    assert states(cli, name) == [TrialState.COMPLETE] * 2


@pytest.mark.soak
def test_a_study_is_extended_while_it_runs_and_after_its_end(cli: Cli, say: Say, tmp_path: Path) -> None:
    name = "extended"
    process = cli.start("run", GATED, "--name", name, "--workers", "1", "--trials", "1", *PLAIN, GATE=str(tmp_path))
    wait_for(lambda: list(tmp_path.glob("reached-*")), "the worker to arrive at the gate")
    assert "budget changed from 1 to 2 trials" in say("extend", name, "--trials", "+1")
    (tmp_path / "open").touch()
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert f"study {name}: 2 of 2 trials" in output
    assert states(cli, name) == [TrialState.COMPLETE] * 2
    assert parent_of(cli, name).info.status == "FINISHED"

    assert f"hpsearch extend {name} --trials 9" in cli("run", GATED, "--name", name, "--trials", "9", code=2)
    report = cli.stack.home / "reports" / f"{name}.html"
    assert f"report: {report}\n" in say("extend", name, "--trials", "3")
    assert "2 / 3" in report.read_text()
    parent = parent_of(cli, name)
    assert (parent.info.status, parent.data.tags["hpsearch.trials"]) == ("RUNNING", "2 of 3")
    cli("run", GATED, "--name", name, "--workers", "1")
    parent = parent_of(cli, name)
    assert (parent.info.status, parent.data.tags["hpsearch.trials"]) == ("FINISHED", "3 of 3")


def test_a_failed_trial_is_retried_in_its_own_run(cli: Cli, say: Say) -> None:
    name = "retried"
    arguments = ("run", BROKEN, "--name", name, "--workers", "1")
    cli(*arguments, "--trials", "1", BREAK="in workers", code=1)
    failed = cli.study(name).trials[0]
    assert failed.state == TrialState.FAIL
    assert "KeyError" in say("show", name, "--trial", "0")

    assert "from scratch" in say("retry", name, "--trial", "0")
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
    page = say("show", name, "--trial", "0").splitlines()
    heading = next(number for number, line in enumerate(page) if line.split()[:2] == ["attempt", "worker"])
    assert [line.split()[-1] for line in page[heading + 1 : heading + 3]] == ["retried", "infeasible"]
    say("retry", name, "--trial", "0")
    waiting = cli.study(name).trials[0]
    assert (waiting.state, waiting.intermediate_values) == (TrialState.WAITING, {})
