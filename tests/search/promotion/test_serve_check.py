"""Serving needs no packages of hpsearch, and finds the model by its name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from sklearn.datasets import load_wine
from torch import nn

from hpsearch import Batch, Objective, ObjectiveError, Splits, Step, TrainConfig
from hpsearch.search.errors import SearchError
from hpsearch.search.promotion import predict_isolated
from hpsearch.search.promotion.serve_check import _compare_outputs, _score_predictions, find_version, serve_check
from hpsearch.search.spec.spec import parse_spec
from hpsearch.storage.attributes import RUN_ID, SPEC
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.registry import Registry
from hpsearch.storage.records.promotions import find_trials_of_runs, select_tagged
from hpsearch.storage.study_storage.storage import open_storage
from tests.search.promotion.support import Tracked


def alone(code: str) -> str:
    """Return the output of code in an isolated Python that blocks hpsearch's packages, as for serving."""
    path = Path(predict_isolated.__file__)
    refusing = "sys.meta_path.insert(0, alone['ImportBlocker'](['hpsearch', 'json5']))"
    start = f"import runpy, sys; alone = runpy.run_path({str(path)!r}); {refusing}; "
    done = subprocess.run([sys.executable, "-I", "-c", start + code], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", ["hpsearch", "hpsearch.objectives.training", "hpsearch.storage.urls"])
def test_serving_blocks_installed_packages_of_hpsearch(name: str) -> None:
    assert f"the model imports {name.partition('.')[0]}, which a model server may lack" in alone(f"import {name}")


def test_serving_can_import_other_packages() -> None:
    assert alone("import yaml; print('fine')") == "fine\n"


@pytest.mark.parametrize(
    "reference", ["digits", "", "@champion", "digits@", "digits/", "digits/x", "digits/0", "a/b@c", "models:/a/1/2"]
)
def test_a_reference_without_a_version_is_an_error(reference: str) -> None:
    with pytest.raises(SearchError, match=r"is not a model version; give NAME@ALIAS \(digits@champion\) or NAME/VERSI"):
        find_version(None, reference)  # type: ignore[arg-type]


def test_versions_are_found_by_alias_and_number(tracked: Tracked) -> None:
    registry = Registry(tracked.client)
    version = registry.register(tracked.name, tracked.model_of(0), tracked.run_of(0), tags={})
    registry.set_alias(version, "champion")
    for reference in ("@champion", "/1"):
        assert find_version(registry, tracked.name + reference).run_id == tracked.run_of(0)
        assert find_version(registry, f"models:/{tracked.name}{reference}").model_id == tracked.model_of(0)
    for missing in ("@nobody", "/2"):
        with pytest.raises(SearchError, match=r"^models:/.*: MLflow has no "):
            find_version(registry, f"models:/{tracked.name}{missing}")


def test_a_served_model_is_evaluated_with_all_metrics_of_the_study(tracked: Tracked, owner_url: str) -> None:
    """A metric of the study that the objective lacks is an error, also if it is not the first one."""
    version = Registry(tracked.client).register(tracked.name, tracked.model_of(0), tracked.run_of(0), tags={})
    spec = parse_spec({**tracked.stored.spec.model_dump(), "constraints": "sparsity<=1"})
    owner = open_storage(owner_url, application_name="test owner")
    owner.set_study_user_attr(tracked.stored.study_id, SPEC, spec.model_dump())
    with pytest.raises(ObjectiveError, match="metric 'sparsity' is not reported with metric 'accuracy'"):
        serve_check(tracked.storage, tracked.tracking, f"{tracked.name}/{version.number}", allow_code=True)


def test_a_trial_of_another_study_cannot_take_the_place_of_the_promoted_one(tracked: Tracked) -> None:
    """A holder of a worker's role can write a study with any objective, and a trial with any MLflow run."""
    run = tracked.run_of(0)
    version = Registry(tracked.client).register(tracked.name, tracked.model_of(0), run, tags={})
    other = optuna.create_study(study_name=f"{tracked.name}-other", storage=tracked.storage)
    other.add_trial(optuna.trial.create_trial(value=0.5, user_attrs={RUN_ID: run}))
    with tracked.storage.engine.connect() as connection:
        found = find_trials_of_runs(connection, [run])[run]
    assert {each.study_name for each in found} == {tracked.name, other.study_name}
    tags = {tag_names.STUDY: tracked.name, tag_names.TRIAL: "0"}
    assert [each.study_name for each in select_tagged(found, tags)] == [tracked.name]
    with pytest.raises(SearchError, match=r"several trials name its run as theirs, of .*; delete the wrong study"):
        serve_check(tracked.storage, tracked.tracking, f"{tracked.name}/{version.number}", allow_code=True)


class Twice(Objective):
    """A step that cannot be evaluated from a served model's outputs."""

    def suggest(self, trial: Any) -> TrainConfig:
        return TrainConfig()

    def data(self, seed: int) -> Splits:
        return Splits.make(*load_wine(return_X_y=True), seed=seed)

    def model(self, config: TrainConfig, train: Any) -> nn.Module:
        return nn.Linear(13, 3)

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        outputs = (model(batch.x) + model(batch.x)) / 2
        return Step(nn.functional.cross_entropy(outputs, batch.y), outputs=outputs)


def test_a_step_that_calls_its_model_twice_cannot_be_evaluated() -> None:
    objective = Twice()
    with pytest.raises(
        ObjectiveError, match=r"^serve-check cannot score Twice: its step does not call the model exactly once"
    ):
        _score_predictions([torch.zeros(36, 3)], objective, objective.data(0), TrainConfig())


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda found: found, ""),
        (lambda found: found + 1e-7, ""),
        (
            lambda found: found + 1e3,
            r"the outputs of the exported model differ from those of the trial's weights \(rel",
        ),
        (lambda found: found * torch.nan, r"the outputs of .* \(relative difference nan, tolerance 0.0001\)"),
        (
            lambda found: found[:, :1],
            "the outputs of the exported model have other shapes than those of the trial's weights",
        ),
    ],
)
def test_predictions_are_compared_with_those_of_the_weights(change: Any, difference: str) -> None:
    own = [torch.randn(20, 3), torch.randn(16, 3)]
    assert re.match(difference or "$", _compare_outputs([own[0], change(own[1])], own))
    assert (
        _compare_outputs(own[1:], own)
        == "the outputs of the exported model have other shapes than those of the trial's weights"
    )
