"""Several metrics of a custom loop: requested metrics, and model metrics from `trial.measure`."""

import json
import math

import pytest
import torch
from torch import nn

from hpsearch import LoopObjective, NonFiniteError, ObjectiveError
from hpsearch.objectives.errors import MetricError
from hpsearch.objectives.fit import fit
from hpsearch.objectives.model_metric_names import get_metric_value
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.loop.measure_model import measure_size
from tests.objectives.custom_loop.support import trained
from tests.objectives.training.ranks.support import on_ranks
from tests.objectives.training.support import Stopped

ASKED = ("score", "latency_ms", "model_mb", "parameters")


class Loop(LoopObjective):
    """Reports the given metrics and measures a model with batch norm and dropout."""

    metric, direction = "score", "maximize"

    def suggest(self, trial):
        return {"lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True)}

    def run(self, trial):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        for epoch in trial.epochs():
            model.train()
            before, drawn = model.state_dict(), torch.get_rng_state()
            measured = self.measured(trial, model)
            assert model.training
            assert torch.equal(drawn, torch.get_rng_state())
            assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
            trial.report({"score": float(epoch), **measured}, state={"epoch": epoch})

    def measured(self, trial, model):
        return trial.measure(model, torch.ones(1, 4))


def asked(*names, **attributes):
    objective = type("Asked", (Loop,), attributes)()
    objective.set_reported_metrics(names)
    return objective


def done(objective, epochs=3, **settings):
    return fit(objective, objective.default_config(), RunPlan(epochs, 7, 7), device="cpu", **settings)


def test_size_and_latency_of_a_model_are_measured():
    metrics = done(asked(*ASKED), epochs=1).history[0].metrics
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    assert {name: get_metric_value(metrics, name) for name in ("model_mb", "parameters")} == measure_size(model)
    assert get_metric_value(metrics, "latency_ms") > 0
    assert get_metric_value(metrics, "latency_load") >= 0


def test_measured_metrics_are_kept_when_a_trial_resumes(tmp_path):
    objective = asked(*ASKED)
    assert done(objective, session=Stopped(tmp_path, 0)).status == "stopped"
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    history = done(objective, run_dir=tmp_path).history
    assert len(history) == 3
    for name in ("latency_ms", "latency_load", "model_mb"):
        assert {get_metric_value(record.metrics, name) for record in history} == {first[f"val_{name}"]}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("latency_ms",), "report the result of trial.measure(model, inputs)"),
        (("sparsty",), "did you mean 'sparsity'?"),
        (("peak_memory_mb",), "known: score, sparsity"),
    ],
)
def test_a_requested_metric_that_is_not_reported_is_an_error(names, said):
    objective = asked(*names, measured=lambda self, trial, model: {"sparsity": 0.5})
    with pytest.raises(MetricError) as error:
        done(objective)
    assert str(error.value) == f"metric {names[0]!r} is required by the study but not reported; {said}"


def test_a_requested_metric_must_be_finite():
    def measured(self, trial, model):
        return {"sparsity": math.nan}

    with pytest.raises(NonFiniteError, match="sparsity is nan at epoch 1"):
        done(asked("sparsity", measured=measured))
    assert done(asked(measured=measured)).status == "completed"


def test_a_metric_reported_under_its_full_name_is_found():
    objective = asked("train_loss", "extra", measured=lambda self, trial, model: {"train_loss": 2.0, "val_extra": 3.0})
    metrics = done(objective, epochs=1).history[0].metrics
    assert [get_metric_value(metrics, name) for name in objective.reported] == [2.0, 3.0]


def test_measuring_a_model_that_rejects_the_inputs_is_an_error():
    objective = asked(measured=lambda self, trial, model: trial.measure(model, torch.ones(1, 5)))
    with pytest.raises(ObjectiveError, match=r"Asked\.run: .*test_measure\.py:\d+: RuntimeError"):
        done(objective)


def _wrapped(ranks, folder):
    def measured(self, trial, model):
        return trial.measure(nn.parallel.DistributedDataParallel(model), torch.ones(1, 4))

    return trained(ranks, asked(*ASKED, measured=measured), folder)


@pytest.mark.slow
def test_only_one_rank_measures_a_model(tmp_path):
    first, second = on_ranks(2, _wrapped, tmp_path)
    assert first == second
    assert len({get_metric_value(numbers, "latency_ms") for _, numbers in first[1]}) == 1
