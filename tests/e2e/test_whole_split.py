"""A study of a metric that needs a whole split, from the search to the served module, which is not the model."""

from __future__ import annotations

import re
from pathlib import Path

import mlflow
import pytest
import torch

from tests.e2e import generator
from tests.e2e.support import Cli

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("search")]


@pytest.mark.soak  # tests/objectives/training/evaluation tests the parts
def test_all_commands_agree_on_a_metric_of_a_whole_split(cli: Cli) -> None:
    name, model = "whole-split", "whole-split-model"
    cli(
        "run", str(Path(generator.__file__)), "--name", name, "--trials", "3", "--sampler", "random", "--pruner", "none"
    )
    found = cli("finalists", name, "--top", "2", "--seeds", "2")
    assert re.search(r"expected score on new data: \d\.\d+, \d\.\d+ to \d\.\d+ \(90% prediction interval\)", found)
    tested = re.search(r"test set: distance (\S+), .* for trial (\d+)", cli("evaluate-test", name, "--yes"))
    assert tested is not None
    value = cli.study(name).trials[int(tested[2])].value
    cli("promote", name, "--model", model)
    served = cli("serve-check", f"{model}@champion")
    assert re.findall(r"score +val distance (\S+)", served) == [f"{value:.9g}"] * 2
    assert (
        "outputs of the exported model reproduced in a process without the code of hpsearch and the objective" in served
    )

    mlflow.set_tracking_uri(cli.stack.tracking_uri)
    loaded = mlflow.pyfunc.load_model(f"models:/{model}@champion")
    splits = generator.Generator().data(0)
    inputs = torch.linspace(-2, 2, 4 * len(splits.val)).reshape(-1, 4)
    made = torch.as_tensor(loaded.predict(inputs.numpy())) / 2
    assert generator.distance(made, splits.val.y) == pytest.approx(value, abs=1e-6)
    assert generator.distance(made, splits.test.y) == pytest.approx(float(tested[1]), abs=1e-4)
