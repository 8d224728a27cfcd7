"""Finalists and the sealed test set on real services: the commands after a search, with a worker that dies."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import mlflow
import optuna
import pytest
from optuna.trial import TrialState

from hpsearch.search.finalists import Finalists, read_finalists
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.storage.records.test_evaluations import read_test_evaluation
from hpsearch.storage.study_storage.storage import open_storage
from tests.faults.finalists.outcomes import outcomes
from tests.faults.harness import Arena
from tests.faults.orders import OUTSIDE, Order, write

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("faults")]

NAME, HELD, EPOCHS = "digits", "digits.finalists", 3
CHOICE = ("finalists", NAME, "--top", "2", "--seeds", "2")


@pytest.fixture
def study(arena: Arena, request: pytest.FixtureRequest) -> Iterator[StoredStudy]:
    """A search of digits; the test's parameter is the number of trials."""
    arena.name = NAME
    write(arena.orders, [])
    arena.home.mkdir()
    arena.home.chmod(0o755)
    few = ("--trials", str(request.param), "--epochs", str(EPOCHS), "--sampler", "random", "--pruner", "none")
    arena.run("run", "digits", "--workers", "0", *few)
    arena.work(1)
    storage = open_storage(arena.storage_url, application_name="test")
    yield load_study(storage, NAME)
    storage.engine.dispose()


def table(study: StoredStudy) -> Finalists:
    found = read_finalists(study)
    assert found is not None
    return found


def train(arena: Arena, *orders: Order) -> None:
    """Create the finalists and train them with two workers, which join by the study's name."""
    write(arena.orders, list(orders))
    said = arena.run(*CHOICE, "--workers", "0")
    assert f"hpsearch worker --study {HELD}" in said
    arena.name = HELD
    arena.work(2)


@pytest.mark.parametrize("study", [3], indirect=True)
def test_a_killed_worker_changes_no_bit_of_the_table_and_the_test_set_opens_once(
    arena: Arena, study: StoredStudy
) -> None:
    killed = Order("train epoch", "kill", trial=2, epoch=1)
    train(arena, killed)
    assert arena.has_obeyed(0)
    assert outcomes(study, HELD) == ["complete"] * 4 + ["lost"]
    found = table(study)
    assert_chosen(study, found)
    assert_printed(arena, found)
    assert_tracked(arena, study, found)

    arena.run("delete", HELD, "--yes")
    train(arena)
    assert outcomes(study, HELD) == ["complete"] * 4
    assert table(study) == found, "the same finalists on the same seeds, to the last bit"

    assert_opened_once(arena, study, found)


def assert_chosen(study: StoredStudy, found: Finalists) -> None:
    best = sorted(study.trials(), key=lambda t: (-(t.value or 0), t.number))[:2]
    assert [(row.trial, row.search_value) for row in found.rows] == [(t.number, t.value) for t in best]
    assert any(value != row.search_value for row in found.rows for value in row.values)
    assert found.winner == max(found.rows, key=lambda row: (row.mean, -row.trial)).trial


def assert_printed(arena: Arena, found: Finalists) -> None:
    said = arena.run(*CHOICE)
    assert found.winner is not None
    row = found.get_row(found.winner)
    assert f"winner: trial {row.trial}, val accuracy {row.mean:.4f} on 2 new splits" in said
    score = found.expected_score
    assert score is not None
    between = f"{score.low:.4f} to {score.high:.4f} (90% prediction interval)"
    assert (
        f"expected score on new data: {score.mean:.4f}, {between}; each seed has a new train/validation split" in said
    )
    assert re.search(rf"^ +1 +{row.trial} +{row.search_value:.4f} .* winner", said, re.MULTILINE)
    assert "worker logs" not in said, "there is nothing left to train"


def assert_tracked(arena: Arena, study: StoredStudy, found: Finalists) -> None:
    client = mlflow.MlflowClient(arena.tracking_uri)
    parent = client.get_run(study.attrs["hpsearch:mlflow_run_id"])
    assert (parent.info.status, parent.data.tags["hpsearch.trials"]) == ("FINISHED", "3 of 3")
    assert parent.data.tags["hpsearch.winner"] == str(found.winner)
    searched = study.trials()
    chosen = load_study(study.storage, HELD)
    for trial in chosen.trials():
        assert trial.state == TrialState.COMPLETE
        of, seed = trial.user_attrs["hpsearch:finalist_of"], trial.user_attrs["hpsearch:seed"]
        run = client.get_run(trial.user_attrs["hpsearch:mlflow_run_id"])
        tags = run.data.tags
        assert tags["mlflow.parentRunId"] == parent.info.run_id
        assert (tags["hpsearch.finalist_of"], tags["hpsearch.seed"]) == (str(of), str(seed))
        assert (run.info.status, tags["hpsearch.state"]) == ("FINISHED", "complete")
        points = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "val_accuracy")]
        assert sorted(points) == sorted(trial.intermediate_values.items())
        assert trial.params == searched[of].params
    query = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    assert len(client.search_runs([parent.info.experiment_id], query)) == 3 + 4
    for row in found.rows:
        run = client.get_run(searched[row.trial].user_attrs["hpsearch:mlflow_run_id"])
        assert run.data.metrics["finalist_mean"] == row.mean
        assert run.data.metrics["finalist_spread"] == row.spread
        assert run.data.tags["hpsearch.finalist"] == found.verdict(row)
        assert len(client.get_metric_history(run.info.run_id, "val_accuracy")) == EPOCHS, "it is as it was"
    path = mlflow.artifacts.download_artifacts(
        f"runs:/{parent.info.run_id}/finalists.json", tracking_uri=arena.tracking_uri
    )
    record = json.loads(Path(path).read_text())
    assert (record["winner"], record["seeds"]) == (found.winner, list(found.seeds))


def assert_opened_once(arena: Arena, stored: StoredStudy, found: Finalists) -> None:
    said = arena.run("evaluate-test", NAME, "--yes")
    opening = read_test_evaluation(stored.storage.engine, stored.study_id)
    assert opening is not None
    assert (opening.trial_number, opening.finalists) == (found.winner, HELD)
    assert opening.scores is not None
    assert f"test accuracy {opening.scores['accuracy']:.6g}\n" in said
    assert "unconfirmed" not in said
    again = arena.run("evaluate-test", NAME, "--yes", "--unconfirmed", "--trial", "0", code=2)
    assert re.search(
        rf"was evaluated on \S+ at \S+ UTC by \S+ for trial {found.winner}; it can be evaluated only once", again
    )
    run_id = stored.trials()[opening.trial_number].user_attrs["hpsearch:mlflow_run_id"]
    metrics = mlflow.MlflowClient(arena.tracking_uri).get_run(run_id).data.metrics
    assert {f"test_{name}": value for name, value in opening.scores.items()}.items() <= metrics.items()
    study = optuna.load_study(study_name=NAME, storage=stored.storage)
    attrs = study._storage.get_study_system_attrs(study._study_id)
    note = "".join(value for key, value in sorted(attrs.items()) if key.startswith("dashboard:note_str"))
    assert f"Winner: trial {found.winner}" in note
    assert f"Test set: accuracy {opening.scores['accuracy']:.4f}" in note


@pytest.mark.parametrize("study", [1], indirect=True)
def test_the_command_finalists_starts_its_own_workers(arena: Arena, study: StoredStudy) -> None:
    said = arena.run("finalists", NAME, "--top", "1", "--seeds", "1", "--workers", "1")
    found = table(study)
    assert (found.pending, len(found.rows)) == (0, 1)
    assert f"winner: trial {found.winner}, val accuracy" in said
    assert "no prediction interval: with one seed, the standard deviation is unknown" in said


@pytest.mark.parametrize("study", [2], indirect=True)
def test_other_weights_do_not_open_the_test_set(arena: Arena, study: StoredStudy, tmp_path: Path) -> None:
    client = mlflow.MlflowClient(arena.tracking_uri)
    runs = [trial.user_attrs["hpsearch:mlflow_run_id"] for trial in study.trials()]
    opening = ("evaluate-test", NAME, "--yes", "--unconfirmed", "--trial", "0")
    other = client.download_artifacts(runs[1], "checkpoints/best.pt", str(tmp_path))
    client.log_artifact(runs[0], other, "checkpoints")
    assert "belongs to another training run (seed" in arena.run(*opening, code=2)
    Path(other).write_bytes(Path(other).read_bytes()[:-9])
    client.log_artifact(runs[0], other, "checkpoints")
    assert "its checksum differs; the test set was not evaluated" in arena.run(*opening, code=2)
    assert read_test_evaluation(study.storage.engine, study.study_id) is None
    said = arena.run("evaluate-test", NAME, "--yes", "--unconfirmed", "--trial", "1")
    assert "not confirmed by finalists" in said


@pytest.mark.parametrize("study", [2], indirect=True)
def test_an_evaluation_that_died_before_its_scores_can_be_completed(arena: Arena, study: StoredStudy) -> None:
    write(arena.orders, [Order("evaluate test set", "kill", trial=OUTSIDE, attempt=0)])
    arena.run("evaluate-test", NAME, "--yes", "--unconfirmed", code=-signal.SIGKILL)
    write(arena.orders, [])
    opening = read_test_evaluation(study.storage.engine, study.study_id)
    assert opening is not None
    assert opening.scores is None
    other = next(t.number for t in study.trials() if t.number != opening.trial_number)
    assert "was evaluated" in arena.run("evaluate-test", NAME, "--yes", "--unconfirmed", "--trial", str(other), code=2)
    arena.run("evaluate-test", NAME, "--yes")
    again = read_test_evaluation(study.storage.engine, study.study_id)
    assert again is not None
    assert (again.opened_at, again.trial_number) == (opening.opened_at, opening.trial_number)
    assert again.scores is not None
