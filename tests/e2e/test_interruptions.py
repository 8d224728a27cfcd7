"""Workers, fleets, services and terminals that end during a search: no trial is lost, none counts twice."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import mlflow
import optuna
import psutil
import pytest
import sqlalchemy as sa
from optuna.trial import TrialState

from hpsearch.storage.database.connect import make_engine
from hpsearch.storage.embedded import stack as embedded
from hpsearch.storage.web.token import find_token
from tests.e2e.support import BROKEN, GATED, PLAIN, Cli, reached, start, values
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("faults")]


def outcomes(cli: Cli, name: str, trial: int = 0) -> list[str | None]:
    """Return the outcomes of the attempts of a trial."""
    engine = make_engine(cli.stack.storage_url, application_name="test")
    query = """
        SELECT a.outcome FROM hpsearch_attempts a JOIN trials t USING (trial_id) JOIN studies s USING (study_id)
         WHERE s.study_name = :name AND t.number = :trial ORDER BY a.attempt
    """
    try:
        with engine.connect() as connection:
            return list(connection.execute(sa.text(query), {"name": name, "trial": trial}).scalars())
    finally:
        engine.dispose()


@pytest.fixture(scope="module")
def undisturbed(cli: Cli) -> optuna.Study:
    cli("run", GATED, "--name", "undisturbed", "--workers", "1", *PLAIN)
    return cli.study("undisturbed")


def assert_as_undisturbed(cli: Cli, name: str, undisturbed: optuna.Study) -> None:
    study = cli.study(name)
    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 2
    assert values(study) == values(undisturbed), "a resumed trial must give the same numbers to the last bit"
    assert [t.params for t in study.trials] == [t.params for t in undisturbed.trials]
    client = mlflow.MlflowClient(cli.stack.tracking_uri)
    parent = client.get_run(study.user_attrs["hpsearch:mlflow_run_id"])
    query = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    runs = client.search_runs([parent.info.experiment_id], query)
    assert len(runs) == 2, "a resumed trial continues in its own run"
    for trial in study.trials:
        run_id = trial.user_attrs["hpsearch:mlflow_run_id"]
        points = [(m.step, m.value) for m in client.get_metric_history(run_id, "val_accuracy")]
        assert sorted(points) == sorted(trial.intermediate_values.items())


def test_a_killed_worker_changes_no_result(cli: Cli, tmp_path: Path, undisturbed: optuna.Study) -> None:
    process = start(cli, "killed-worker", tmp_path)
    os.kill(reached(tmp_path)[0], signal.SIGKILL)
    (tmp_path / "open").touch()
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert_as_undisturbed(cli, "killed-worker", undisturbed)
    assert cli.study("killed-worker").trials[0].user_attrs["hpsearch:attempt"] == 2
    assert outcomes(cli, "killed-worker") == ["lost", "complete"]


def find_logs(cli: Cli, study: str) -> list[Path]:
    """Return the logs of a study with one worker; their folder has the unique name of the study's folders."""
    return list((cli.stack.home / "logs").glob(f"{study}-*/worker-0.log"))


def test_an_interrupted_run_resumes_where_it_stopped(cli: Cli, tmp_path: Path, undisturbed: optuna.Study) -> None:
    """A signal stops the run in its first trial, and another signal stops it in its second."""
    name = "interrupted"
    for number, sent in enumerate([signal.SIGINT, signal.SIGTERM]):
        (gate := tmp_path / sent.name).mkdir()
        process = start(cli, name, gate)
        (log,) = find_logs(cli, name)
        process.send_signal(sent)
        wait_for(lambda: log.read_text().count("finishing the epoch") == number + 1, "the worker to handle the signal")  # noqa: B023 called at once
        (gate / "open").touch()
        output, _ = process.communicate()
        assert process.returncode == 130, output
        assert "continue with: hpsearch run" in output
        trials = cli.study(name).trials
        assert [t.state for t in trials] == [TrialState.COMPLETE] * number + [TrialState.WAITING]
        assert list(trials[number].intermediate_values) == [0, 1, 2], "the epoch was ended"
    cli("run", GATED, "--name", name, "--workers", "1")
    assert_as_undisturbed(cli, name, undisturbed)
    assert [t.user_attrs["hpsearch:attempt"] for t in cli.study(name).trials] == [2, 2]


def test_a_lost_terminal_drains_the_run(cli: Cli, tmp_path: Path) -> None:
    """Its output goes to a pipe without a reader, so that printing fails."""
    os.mkfifo(pipe := tmp_path / "terminal")
    terminal = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    process = start(cli, "hung-up", tmp_path, log=pipe)
    os.close(terminal)
    process.send_signal(signal.SIGHUP)
    (log,) = find_logs(cli, "hung-up")
    wait_for(lambda: "finishing the epoch" in log.read_text(), "the worker to handle the signal")
    (tmp_path / "open").touch()
    process.wait()
    trial = cli.study("hung-up").trials[0]
    assert (trial.state, list(trial.intermediate_values)) == (TrialState.WAITING, [0, 1, 2])
    assert outcomes(cli, "hung-up") == ["released"]


def test_a_study_with_dead_workers_can_be_deleted(cli: Cli, tmp_path: Path) -> None:
    process = start(cli, "deleted", tmp_path)
    assert "1 running trial;" in cli("delete", "deleted", "--yes", code=2)
    worker = reached(tmp_path)[0]
    process.send_signal(signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not psutil.pid_exists(worker), "the worker to be gone")
    report = cli.stack.home / "reports" / "deleted.html"
    report.parent.mkdir(exist_ok=True)
    report.touch()
    cli("delete", "deleted", "--yes")
    assert not report.exists()
    assert "no study 'deleted'" in cli("show", "deleted", code=2)


def test_workers_of_a_killed_fleet_exit_and_its_trials_are_resumed(
    cli: Cli, tmp_path: Path, undisturbed: optuna.Study
) -> None:
    process = start(cli, "killed-fleet", tmp_path)
    worker = psutil.Process(reached(tmp_path)[0])
    process.send_signal(signal.SIGKILL)
    process.wait()
    (tmp_path / "open").touch()
    wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "the worker to leave")
    assert [t.state for t in cli.study("killed-fleet").trials] == [TrialState.WAITING]
    cli("run", GATED, "--name", "killed-fleet", "--workers", "1")
    assert_as_undisturbed(cli, "killed-fleet", undisturbed)


def test_a_worker_joins_with_study_name_and_addresses_only(cli: Cli, tmp_path: Path, undisturbed: optuna.Study) -> None:
    cli("run", GATED, "--name", "joined", "--workers", "0", *PLAIN)
    assert cli.study("joined").trials == []
    environment = {
        "HPSEARCH_STORAGE_URL": cli.stack.storage_url,
        "HPSEARCH_HOME": str(tmp_path / "elsewhere"),
        "HPSEARCH_TRACKING_URI": cli.stack.tracking_uri,
        "MLFLOW_TRACKING_TOKEN": find_token(cli.stack.tracking_uri) or "",
    }
    (tmp_path / "search.py").write_text("raise SystemExit('not this one')\n")
    cli("worker", "--study", "joined", **environment)
    assert_as_undisturbed(cli, "joined", undisturbed)
    parent = cli.study("joined").user_attrs["hpsearch:mlflow_run_id"]
    client = mlflow.MlflowClient(cli.stack.tracking_uri)
    assert client.get_run(parent).info.status == "FINISHED"
    report = tmp_path / "elsewhere" / "reports" / "joined.html"
    assert "2 / 2" in report.read_text()
    assert Path(client.download_artifacts(parent, report.name, str(tmp_path))).read_bytes() == report.read_bytes()


def test_a_trial_failed_in_the_dashboard_is_cancelled(cli: Cli, tmp_path: Path) -> None:
    process = start(cli, "cancelled", tmp_path)
    study = cli.study("cancelled")
    study.tell(0, state=TrialState.FAIL)
    (tmp_path / "open").touch()
    output, _ = process.communicate()
    assert process.returncode == 0, output
    trials = cli.study("cancelled").trials
    assert [t.state for t in trials] == [TrialState.FAIL, TrialState.COMPLETE]
    assert list(trials[0].intermediate_values) == [0, 1]
    run = mlflow.MlflowClient(cli.stack.tracking_uri).get_run(trials[0].user_attrs["hpsearch:mlflow_run_id"])
    assert run.info.status == "KILLED"


def test_a_mistake_is_reported_before_the_study_is_created(cli: Cli) -> None:
    output = cli("run", BROKEN, "--name", "mistake", code=2, BREAK="everywhere")
    assert "broken.py:30: KeyError" in output.splitlines()[-1]
    assert "Traceback" not in output
    assert "no study 'mistake'" in cli("show", "mistake", code=2)


def test_a_bug_after_a_rung_ends_the_run_before_the_budget_is_spent(cli: Cli) -> None:
    """Trials pause at the rung, but each one that continues fails."""
    asha = ("--pruner", "asha", "--pruner-option", "min_resource=1", "--epochs", "9", "--trials", "24")
    output = cli("run", BROKEN, "--name", "late-bug", "--workers", "1", *asha, code=1, BREAK="after a rung")
    assert "no such epoch" in output
    states = [t.state for t in cli.study("late-bug").trials]
    assert states.count(TrialState.FAIL) == 3
    assert TrialState.COMPLETE not in states


def test_a_bug_ends_the_run_before_the_budget_is_spent(cli: Cli) -> None:
    output = cli("run", BROKEN, "--name", "bug", "--workers", "2", code=1, BREAK="in workers")
    assert "Traceback" not in output
    assert "no such layer" in output
    trials = cli.study("bug").trials
    assert {t.state for t in trials} == {TrialState.FAIL}
    assert len(trials) in {3, 4}, "the other worker may have begun one more"
    assert "no such layer" in trials[0].user_attrs["hpsearch:reason"]
    assert "no such layer [1, 2] [/red]" in cli("show", "bug")
    client = mlflow.MlflowClient(cli.stack.tracking_uri)
    for trial in trials:
        assert client.get_run(trial.user_attrs["hpsearch:mlflow_run_id"]).info.status == "FAILED"


def test_an_objective_that_exits_fails_only_its_trial(cli: Cli) -> None:
    cli("run", BROKEN, "--name", "exit", "--workers", "1", "--trials", "1", code=1, BREAK="exit")
    trial = cli.study("exit").trials[0]
    assert trial.state == TrialState.FAIL
    assert trial.user_attrs["hpsearch:reason"].endswith("broken.py:32: SystemExit: 3")


def test_a_diverging_trial_is_infeasible_with_a_reason(cli: Cli) -> None:
    output = cli("run", BROKEN, "--name", "diverging", "--workers", "1", "--trials", "2", code=1, BREAK="inf")
    assert "2 infeasible" in output
    study = cli.study("diverging")
    client = mlflow.MlflowClient(cli.stack.tracking_uri)
    for trial in study.trials:
        assert trial.state == TrialState.PRUNED
        assert trial.user_attrs["hpsearch:infeasible"] is True
        assert "step" in trial.user_attrs["hpsearch:reason"]
        run = client.get_run(trial.user_attrs["hpsearch:mlflow_run_id"])
        assert (run.info.status, run.data.tags["hpsearch.state"]) == ("FAILED", "infeasible")


@pytest.mark.soak
def test_killed_services_restart_without_losses(
    cli: Cli, own_stack: embedded.StackInfo, tmp_path: Path, undisturbed: optuna.Study
) -> None:
    broken = Cli(own_stack, cli.cwd, cli.zygote)
    process = start(broken, "killed-services", tmp_path)
    for service in embedded.read_status(own_stack.home):
        assert service.pid is not None
        for victim in [*psutil.Process(service.pid).children(recursive=True), psutil.Process(service.pid)]:
            with suppress(psutil.NoSuchProcess):  # possibly not its first attempt
                victim.kill()
    (tmp_path / "open").touch()
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "Traceback" not in output
    assert_as_undisturbed(broken, "killed-services", undisturbed)
