"""All trials of a study are evaluated on the same split, with different seeds."""

from __future__ import annotations

import mlflow
import pytest
import yaml

from hpsearch import load_objective
from tests.e2e.support import Search

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("search")]


def test_trials_share_the_split_of_the_study_and_have_different_seeds(search: Search) -> None:
    kept = []
    for trial in search.study.trials:
        run_id = trial.user_attrs["hpsearch:mlflow_run_id"]
        kept.append(yaml.safe_load(mlflow.artifacts.load_text(f"runs:/{run_id}/config.yaml")))
    seed = search.study.user_attrs["hpsearch:spec"]["seed"]
    assert {run["split_seed"] for run in kept} == {seed}
    assert {run["split_hash"] for run in kept} == {load_objective("digits").data(seed).hash()}
    assert len({run["seed"] for run in kept}) == len(kept)
