"""A backup of a running search, restored in another home, continues there and gives the results without a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import mlflow
import optuna
import pytest
from optuna.trial import TrialState

from hpsearch.search.services import DASHBOARD_COMMAND
from hpsearch.storage.embedded import stack as embedded
from hpsearch.storage.home import FOLDERS
from tests.e2e.support import GATED, Cli, values
from tests.faults.harness import Zygote
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.xdist_group("backup")]

TRIALS = 12
PLAIN = ("--trials", str(TRIALS), "--sampler", "random", "--pruner", "none")
NAME = "searched"


@pytest.fixture(scope="module")
def homes(guarded_homes: Callable[[], AbstractContextManager[Path]]) -> Iterator[tuple[Path, Path]]:
    """Return two home folders: that of a search, and one for the restored search."""
    with ExitStack() as opened:
        yield opened.enter_context(guarded_homes()), opened.enter_context(guarded_homes())


@pytest.fixture(scope="module")
def here(homes: tuple[Path, Path], zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return Cli(embedded.up(homes[0], dashboard=DASHBOARD_COMMAND), tmp_path_factory.mktemp("cwd"), zygote)


@pytest.fixture(scope="module")
def undisturbed(here: Cli) -> optuna.Study:
    here("run", GATED, "--name", "undisturbed", "--workers", "2", "--models", "none", *PLAIN)
    return here.study("undisturbed")


def two_running_in_their_third_epoch(study: optuna.Study) -> bool:
    running = study.get_trials(states=(TrialState.RUNNING,))
    return [list(trial.intermediate_values) for trial in running] == [[0, 1]] * 2


def as_undisturbed(study: optuna.Study, undisturbed: optuna.Study) -> bool:
    trials = study.trials
    assert [trial.number for trial in trials] == list(range(TRIALS)), "the budget is exact"
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    return values(study) == values(undisturbed)


def test_a_search_continues_elsewhere_from_a_backup_of_the_running_search(
    here: Cli, undisturbed: optuna.Study, homes: tuple[Path, Path], tmp_path: Path
) -> None:
    gate, file = tmp_path / "gate", tmp_path / "backup.tar"
    gate.mkdir()
    for number in range(3):
        (gate / f"pass-{number}").touch()
    process = here.start("run", GATED, "--name", NAME, "--workers", "2", *PLAIN, GATE=str(gate))
    wait_for(lambda: NAME in optuna.get_all_study_names(here.stack.storage_url), "the study")
    searched = here.study(NAME)
    wait_for(lambda: len(searched.get_trials(states=(TrialState.COMPLETE,))) == 3, "some trials")
    wait_for(lambda: two_running_in_their_third_epoch(searched), "two trials at the gate")
    before = searched.trials

    said = here("backup", str(file)).splitlines()[-1]
    assert said.startswith(f"wrote {file}: 2 studies, {TRIALS + len(before)} trials, "), said
    assert ", 0 registered models, " in said
    assert file.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup.tar", "gate"], "nothing else is left"
    assert f"{str(file)!r} already exists; give another path, or --force" in here("backup", str(file), code=2)

    elsewhere = homes[1]
    said = here("restore", str(file), HPSEARCH_HOME=str(elsewhere))
    assert f"restored 2 studies, {TRIALS + len(before)} trials, " in said
    there = Cli(embedded.up(elsewhere, dashboard=DASHBOARD_COMMAND), here.cwd, here.zygote)
    assert there.stack.tracking_uri != here.stack.tracking_uri
    moved = there.study(NAME)
    assert [trial.params for trial in moved.trials] == [trial.params for trial in before]
    waiting = moved.get_trials(states=(TrialState.WAITING,))
    assert [list(trial.intermediate_values) for trial in waiting] == [[0, 1]] * 2, "given back where they were"
    refused = there("restore", str(file), code=2)
    assert "is not empty (studies: 2, " in refused
    assert refused.count("\n") == 1

    there("run", GATED, "--name", NAME, "--workers", "2")
    assert as_undisturbed(there.study(NAME), undisturbed), "identical to the last bit"
    attempts = {trial.number: trial.user_attrs["hpsearch:attempt"] for trial in there.study(NAME).trials}
    resumed = {trial.number for trial in waiting}
    assert attempts == {number: 2 if number in resumed else 1 for number in range(TRIALS)}
    assert "no unsent records are left" in there("sync", NAME), (
        "it rebuilds trials that were not in MLflow at the backup"
    )
    assert_runs_are_whole(there, before)
    promoted = there("promote", NAME)
    assert f"models:/{NAME}@champion (version 1)" in promoted
    assert "score reproduced in a process without the code of hpsearch and the objective" in there(
        "serve-check", f"{NAME}@champion"
    )

    (gate / "open").touch()
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert as_undisturbed(here.study(NAME), undisturbed), "the search that was backed up did not feel it"


def assert_runs_are_whole(there: Cli, before: list[optuna.trial.FrozenTrial]) -> None:
    """Check that each trial has one run on the server of the new home, with each point once and its files."""
    study, uri = there.study(NAME), there.stack.tracking_uri
    client = mlflow.MlflowClient(uri)
    parent = client.get_run(study.user_attrs["hpsearch:mlflow_run_id"])
    assert study.user_attrs["hpsearch:mlflow_url"].startswith(f"{uri}/#/")
    runs = client.search_runs([parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    mine = [run for run in runs if run.data.tags["hpsearch.study"] == NAME]
    assert sorted(int(run.data.tags["hpsearch.trial"]) for run in mine) == list(range(TRIALS))
    assert {run.info.status for run in mine} == {"FINISHED"}
    for trial in study.trials:
        run_id = trial.user_attrs["hpsearch:mlflow_run_id"]
        points = [(m.step, m.value) for m in client.get_metric_history(run_id, "val_accuracy")]
        assert sorted(points) == sorted(trial.intermediate_values.items())
        assert trial.user_attrs["hpsearch:mlflow_url"].startswith(f"{uri}/#/")
    finished = next(trial for trial in before if trial.state == TrialState.COMPLETE)
    names = {file.path for file in client.list_artifacts(finished.user_attrs["hpsearch:mlflow_run_id"])}
    assert {"report.md", "config.yaml", "checkpoints"} <= names


def test_a_damaged_backup_is_an_error_of_one_line_and_changes_nothing(
    here: Cli, homes: tuple[Path, Path], tmp_path: Path
) -> None:
    file, home = tmp_path / "backup.tar", tmp_path / "home"
    here("backup", str(file), "--studies-only")
    file.write_bytes(file.read_bytes()[:-20_000])
    said = here("restore", str(file), code=2, HPSEARCH_HOME=str(home))
    assert said.splitlines()[-1].startswith(f"hpsearch: {str(file)!r} is damaged (")
    assert "Traceback" not in said
    assert sorted(path.name for path in home.rglob("*")) == sorted(FOLDERS)
