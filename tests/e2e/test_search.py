"""A complete search on real services, read with Optuna's and MLflow's own clients."""

from __future__ import annotations

import re

import mlflow
import numpy as np
import pytest
from optuna.trial import FrozenTrial, TrialState

from hpsearch import load_objective
from hpsearch.search.study.ranking import rank_trials
from hpsearch.storage.embedded.stack import StackInfo
from tests.e2e.support import EPOCHS, TOP_MODELS, Cli, Search
from tests.web import open_url

# One pytest process runs all tests of this search.
pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("search")]


def run_of(search: Search, trial: FrozenTrial) -> mlflow.entities.Run:
    return search.client.get_run(trial.user_attrs["hpsearch:mlflow_run_id"])


def children(search: Search) -> list[mlflow.entities.Run]:
    experiment = search.client.get_run(search.parent).info.experiment_id
    return list(search.client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{search.parent}'"))


def test_the_budget_is_spent_exactly(search: Search) -> None:
    trials = search.study.trials
    assert [t.number for t in trials] == list(range(12))
    assert {t.state for t in trials} == {TrialState.COMPLETE, TrialState.PRUNED}
    assert len({t.user_attrs["hpsearch:worker"] for t in trials}) == 3


def test_everything_in_the_home_is_private(search: Search, stack: StackInfo) -> None:
    assert (stack.home / "runs").is_dir()
    open_to_others = {
        path.name: oct(path.stat().st_mode) for path in stack.home.iterdir() if path.stat().st_mode & 0o077
    }
    # Only the group of root's Postgres, which has no members, can enter its folder.
    assert open_to_others in ({}, {"postgres": oct(0o40710)})
    for path in (stack.home / "postgres").iterdir():
        assert path.stat().st_mode & 0o077 == 0 or path.name.startswith("binaries-"), path
    for path in (stack.home / "artifacts").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_mlflow_has_one_parent_run_with_a_child_for_each_trial(search: Search) -> None:
    runs = {run.info.run_id: run for run in children(search)}
    assert len(runs) == 12
    for trial in search.study.trials:
        run = runs[trial.user_attrs["hpsearch:mlflow_run_id"]]
        assert run.data.tags["hpsearch.trial"] == str(trial.number)
        assert run.info.run_name == f"{search.name}-{trial.number:04d}"
    experiment = search.client.get_run(search.parent).info.experiment_id
    same_name = search.client.search_runs([experiment], f"tags.`hpsearch.study` = '{search.name}'")
    assert len(same_name) == 13


def test_runs_have_the_states_and_reasons_of_their_trials(search: Search) -> None:
    status = {TrialState.COMPLETE: "FINISHED", TrialState.PRUNED: "FINISHED"}
    for trial in search.study.trials:
        run = run_of(search, trial)
        assert run.info.status == status[trial.state]
        assert run.data.tags["hpsearch.state"] == trial.state.name.lower()
        assert run.data.tags["hpsearch.reason"] == trial.user_attrs["hpsearch:reason"]
        best = {"best_val_accuracy", "best_val_loss", "best_epoch"} & set(run.data.metrics)
        assert len(best) == (3 if trial.state == TrialState.COMPLETE else 0), "a pruned trial has no best metrics"
        assert {k: run.data.params[k] for k in trial.params} == {k: str(v) for k, v in trial.params.items()}
    assert search.client.get_run(search.parent).info.status == "FINISHED"


def test_metrics_of_each_epoch_equal_the_intermediate_values(search: Search) -> None:
    for trial in search.study.trials:
        history = search.client.get_metric_history(run_of(search, trial).info.run_id, "val_accuracy")
        points = [(m.step, m.value) for m in history]
        assert sorted(points) == sorted(trial.intermediate_values.items())
        expected = EPOCHS if trial.state == TrialState.COMPLETE else len(points)
        assert sorted(step for step, _ in points) == list(range(expected))
        train = search.client.get_metric_history(run_of(search, trial).info.run_id, "train_loss")
        assert len(train) == len(points)


def test_the_value_of_a_trial_is_that_of_its_best_epoch(search: Search) -> None:
    for trial in search.study.get_trials(states=(TrialState.COMPLETE,)):
        assert trial.value == max(trial.intermediate_values.values())


def test_each_complete_run_has_artifacts_and_the_best_ones_have_models(search: Search) -> None:
    complete = search.study.get_trials(states=(TrialState.COMPLETE,))
    ranked = [trial.number for trial in rank_trials(complete, [True])]
    for trial in search.study.trials:
        run = run_of(search, trial)
        files = {f.path for f in search.client.list_artifacts(run.info.run_id)}
        models = run.outputs.model_outputs if run.outputs else []
        assert {"config.yaml", "metrics.jsonl", "report.md"} <= files
        if trial.state == TrialState.COMPLETE:
            checkpoints = [f.path for f in search.client.list_artifacts(run.info.run_id, "checkpoints")]
            assert checkpoints == ["checkpoints/best.pt"]
            assert {"curves.png", "gradients.png"} <= files
            ahead = [search.study.trials[number] for number in ranked[: ranked.index(trial.number)]]
            earlier = [t for t in ahead if t.datetime_complete <= trial.datetime_complete]
            assert len(models) == 1 or (not models and len(earlier) >= TOP_MODELS)
        else:
            assert "checkpoints" not in files
            assert not models


def test_the_best_model_registers_loads_and_reproduces_its_score(search: Search) -> None:
    best = search.study.best_trial
    run = run_of(search, best)
    version = mlflow.register_model(f"models:/{run.outputs.model_outputs[0].model_id}", "end-to-end-digits")
    model = mlflow.pytorch.load_model(f"models:/end-to-end-digits/{version.version}")
    val = load_objective("digits").data(0).val
    predicted = model(val.x).argmax(dim=1)
    assert abs(float((predicted == val.y).double().mean()) - best.value) < 1e-6
    assert abs(run.data.metrics["best_val_accuracy"] - best.value) < 1e-6
    served = mlflow.pyfunc.load_model(f"models:/end-to-end-digits/{version.version}")
    assert served.metadata.signature is not None
    assert np.array_equal(served.predict(val.x.numpy()).argmax(axis=1), predicted.numpy())


def test_the_summary_names_the_best_trial_and_its_links_work(search: Search) -> None:
    best = search.study.best_trial
    assert f"study {search.name}: 12 of 12 trials" in search.output
    assert f"best: trial {best.number}, val accuracy {best.value:.4f}" in search.output
    urls = re.findall(r"http://\S+", search.output)
    assert len(urls) == 4
    for url in urls:
        with open_url(url) as reply:
            assert reply.status == 200


def test_a_study_with_a_spent_budget_runs_no_more_trials(cli: Cli, search: Search) -> None:
    output = cli("run", "digits", "--name", search.name)
    assert "the budget is spent" in output
    assert len(cli.study(search.name).trials) == 12


def test_other_settings_are_rejected_with_the_difference(cli: Cli, search: Search) -> None:
    output = cli("run", "digits", "--name", search.name, "--trials", "50", "--pruner", "none", code=2)
    message = output.splitlines()[-1]
    assert message.startswith("hpsearch: ")
    assert "Traceback" not in output
    for words in ("n_trials: 12 -> 50", "pruner", "--name"):
        assert words in message


def test_show_and_studies_list_the_study(cli: Cli, search: Search) -> None:
    best = search.study.best_trial
    assert re.search(rf"{search.name} +digits +12/12 .*accuracy {best.value:.4f}", cli("studies"))
    shown = cli("show", search.name, "--all")
    assert "n_startup_trials=4" in shown
    assert re.search(r" pruned .* 0\.\d+ < 0\.\d+ at epoch \d$", shown, re.MULTILINE)
    assert f"best: trial {best.number}" in shown


def test_the_report_is_self_contained_and_logged(cli: Cli, search: Search) -> None:
    path = cli.cwd / "report.html"
    cli("report", search.name, "--output", str(path))
    page = path.read_text()
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=.https?:", page), "the page loads something from elsewhere"
    for title in ("Learning curves", "Optimization history", "Parameter importances", "Parallel coordinates", "Trials"):
        assert f"<h2>{title}" in page
    assert len(page) < 100_000, "it is to be mailed"
    assert f"{search.study.best_value:.4f}" in page
    artifacts = {f.path for f in search.client.list_artifacts(search.parent)}
    assert {f"{search.name}.html", "report.html"} <= artifacts


def test_the_note_in_the_dashboard_has_a_working_link_to_mlflow(cli: Cli, search: Search) -> None:
    study = cli.study(search.name)
    attrs = study._storage.get_study_system_attrs(study._study_id)
    note = "".join(value for key, value in sorted(attrs.items()) if key.startswith("dashboard:note_str"))
    assert search.parent in note
    assert search.study.best_trial.user_attrs["hpsearch:mlflow_run_id"] in note
