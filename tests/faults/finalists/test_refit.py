"""A refit on real services: search, finalists, a refit whose worker dies, its promotion and the served model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import mlflow
import pytest

from hpsearch.search.finalists import read_finalists
from hpsearch.search.finalists.refit import Refit, read_refit
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.storage.records.promotions import read_promotions
from hpsearch.storage.records.test_evaluations import read_test_evaluation
from hpsearch.storage.study_storage.storage import open_storage
from tests.faults.finalists.outcomes import outcomes
from tests.faults.harness import Arena
from tests.faults.orders import Order, write

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("faults")]

NAME, EPOCHS = "digits-refit", 3
MADE = f"{NAME}.refit"


@pytest.fixture
def study(arena: Arena) -> Iterator[StoredStudy]:
    """A search of two trials of digits whose finalists have a winner."""
    arena.name, arena.models = NAME, None
    write(arena.orders, [])
    arena.home.mkdir()
    arena.home.chmod(0o755)
    few = ("--trials", "2", "--epochs", str(EPOCHS), "--sampler", "random", "--pruner", "none")
    arena.run("run", "digits", "--name", NAME, "--workers", "0", *few)
    arena.work(1)
    arena.run("finalists", NAME, "--top", "2", "--seeds", "1", "--workers", "1")
    storage = open_storage(arena.storage_url, application_name="test")
    yield load_study(storage, NAME)
    storage.engine.dispose()


def train(arena: Arena, *orders: Order) -> None:
    """Create the refit and train it with two workers, which join by the study's name."""
    write(arena.orders, list(orders))
    assert f"hpsearch worker --study {MADE}" in arena.run("promote", NAME, "--refit", "--workers", "0")
    arena.name = MADE
    arena.work(2)


def found(study: StoredStudy) -> Refit:
    return read_refit(study)[1]


@pytest.mark.soak  # tests/search/finalists/test_refit.py and tests/search/promotion test the parts
def test_the_winner_is_refit_promoted_and_served(arena: Arena, study: StoredStudy) -> None:
    train(arena, Order("report", "kill", trial=1, when="after"))
    assert arena.has_obeyed(0)
    assert outcomes(study, MADE) == ["complete"] * 3 + ["lost"]
    refit, finalists = found(study), read_finalists(study)
    assert finalists is not None
    assert (refit.search_trial, refit.pending, len(refit.losses)) == (finalists.winner, 0, 3)
    assert sorted(loss for loss in refit.losses if loss is not None)[1] == refit.losses[refit.selected_trial or 0]

    arena.run("delete", MADE, "--yes")
    train(arena)
    assert outcomes(study, MADE) == ["complete"] * 3
    assert found(study) == refit, "the killed worker changed no bit"

    assert_promoted(arena, study, refit)
    assert_served(arena, study, refit)
    assert_kept_apart(arena, study, refit)
    assert_tested_once(arena, study, refit)


def assert_promoted(arena: Arena, study: StoredStudy, refit: Refit) -> None:
    said = arena.run("promote", NAME, "--refit")
    assert "worker logs" not in said, "there is nothing left to train"
    assert f"the refit (trial {refit.selected_trial} of {MADE}) is now models:/{NAME}@champion (version " in said
    assert "is marked as unconfirmed: the model was not evaluated on the test set yet" in said
    made = load_study(study.storage, MADE)
    (promotion,) = read_promotions(study.engine, made.study_id)
    assert (promotion.trial_number, promotion.alias) == (refit.selected_trial, "champion")
    evidence = promotion.evidence["refit"]
    assert (evidence["search"], evidence["of"], evidence["epochs"]) == (NAME, refit.search_trial, refit.epochs)
    assert (tuple(evidence["losses"]), evidence["taken"]) == (refit.losses, refit.selected_trial)
    assert promotion.evidence["finalists"]["winner"] == refit.search_trial
    version = mlflow.MlflowClient(arena.tracking_uri).get_model_version_by_alias(NAME, "champion")
    assert json.loads(version.tags["hpsearch.refit"])["losses"] == list(refit.losses)
    for words in (
        f"A refit: the configuration of trial {refit.search_trial} of study **{NAME}**",
        "**Not evaluated on the test set**",
    ):
        assert words in version.description
    assert f"promoted: the refit of trial {refit.search_trial} is {NAME}@champion" in arena.run("show", NAME)


def assert_served(arena: Arena, study: StoredStudy, refit: Refit) -> None:
    said = arena.run("serve-check", f"{NAME}@champion")
    values = dict(re.findall(r"^(recorded|recomputed) score +val accuracy (\S+)", said, re.MULTILINE))
    assert refit.selected_trial is not None
    recorded = load_study(study.storage, MADE).trials()[refit.selected_trial].value
    assert abs(float(values["recorded"]) - (recorded or 0)) < 1e-6
    assert abs(float(values["recomputed"]) - (recorded or 0)) < 1e-6
    assert "score reproduced in a process without the code of hpsearch and the objective" in said


def assert_kept_apart(arena: Arena, study: StoredStudy, refit: Refit) -> None:
    """Check that neither the runs with a best value nor the finalists include a refit."""
    client = mlflow.MlflowClient(arena.tracking_uri)
    for trial in load_study(study.storage, MADE).trials():
        data = client.get_run(trial.user_attrs["hpsearch:mlflow_run_id"]).data
        assert "best_val_accuracy" not in data.metrics
        assert data.tags["hpsearch.refit_of"] == str(refit.search_trial)
        assert len(trial.intermediate_values) == refit.epochs
    other = 1 - refit.search_trial
    assert f"--trial {other} differs from the winner {refit.search_trial} of {NAME!r}; remove --trial" in arena.run(
        "promote", NAME, "--refit", "--trial", str(other), code=2
    )


def assert_tested_once(arena: Arena, study: StoredStudy, refit: Refit) -> None:
    """Check that the test set opens for the refit, and then for no other model."""
    said = arena.run("evaluate-test", NAME, "--refit", "--yes")
    opening = read_test_evaluation(study.engine, study.study_id)
    assert opening is not None
    assert (opening.trial_number, opening.finalists, opening.refit) == (refit.search_trial, f"{NAME}.finalists", MADE)
    assert opening.scores is not None
    assert f"test accuracy {opening.scores['accuracy']:.6g}\n" in said
    again = arena.run("evaluate-test", NAME, "--yes", code=2)
    assert re.search(
        rf"evaluated on .* for the refit of trial {refit.search_trial}; it can be evaluated only once", again
    )
    client = mlflow.MlflowClient(arena.tracking_uri)
    version = client.get_model_version_by_alias(NAME, "champion")
    assert (version.tags["hpsearch.confirmed"], version.tags["hpsearch.unconfirmed"]) == ("true", "")
    assert json.loads(version.tags["hpsearch.test"])["scores"] == opening.scores
    assert client.get_run(version.run_id).data.metrics["test_accuracy"] == opening.scores["accuracy"]
    said = arena.run("promote", NAME, "--alias", "searched")
    assert f"is marked as unconfirmed: the test set was evaluated with the refit of trial {refit.search_trial}" in said
