"""Several metrics of an own loop: what it is asked to report, and what `trial.measure` gives it."""

import json
import math

import pytest
import torch
from torch import nn

from hpsearch import LoopObjective, NonFiniteError, ObjectiveError
from hpsearch.objectives.errors import MetricError
from hpsearch.objectives.fit import fit
from hpsearch.objectives.model_metrics import get_metric_value
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.loop.measure import measure_size
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


def test_what_is_measured_is_what_a_study_reads():
    metrics = done(asked(*ASKED), epochs=1).history[0].metrics
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    assert {name: get_metric_value(metrics, name) for name in ("model_mb", "parameters")} == measure_size(model)
    assert get_metric_value(metrics, "latency_ms") > 0
    assert get_metric_value(metrics, "latency_load") >= 0


def test_it_stays_in_a_trial_that_is_resumed(tmp_path):
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
def test_what_is_asked_for_and_not_reported_is_told(names, said):
    objective = asked(*names, measured=lambda self, trial, model: {"sparsity": 0.5})
    with pytest.raises(MetricError) as error:
        done(objective)
    assert str(error.value) == f"metric {names[0]!r} is required by the study but not reported; {said}"


def test_what_is_asked_for_has_to_be_finite():
    def measured(self, trial, model):
        return {"sparsity": math.nan}

    with pytest.raises(NonFiniteError, match="sparsity is nan at epoch 1"):
        done(asked("sparsity", measured=measured))
    assert done(asked(measured=measured)).status == "completed"


def test_what_is_reported_under_its_whole_name_is_found():
    objective = asked("train_loss", "extra", measured=lambda self, trial, model: {"train_loss": 2.0, "val_extra": 3.0})
    metrics = done(objective, epochs=1).history[0].metrics
    assert [get_metric_value(metrics, name) for name in objective.reported] == [2.0, 3.0]


def test_a_model_that_does_not_take_the_inputs():
    objective = asked(measured=lambda self, trial, model: trial.measure(model, torch.ones(1, 5)))
    with pytest.raises(ObjectiveError, match=r"Asked\.run: .*test_measure\.py:\d+: RuntimeError"):
        done(objective)


def _wrapped(ranks, folder):
    def measured(self, trial, model):
        return trial.measure(nn.parallel.DistributedDataParallel(model), torch.ones(1, 4))

    return trained(ranks, asked(*ASKED, measured=measured), folder)


@pytest.mark.slow
def test_ranks_measure_a_model_once(tmp_path):
    first, second = on_ranks(2, _wrapped, tmp_path)
    assert first == second
    assert len({get_metric_value(numbers, "latency_ms") for _, numbers in first[1]}) == 1
