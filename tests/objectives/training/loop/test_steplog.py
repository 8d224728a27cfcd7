"""The log of steps within an epoch."""

import math

import pytest
import torch
from torch import nn

from hpsearch.objectives.training.loop.epoch import train_epoch
from tests.objectives.training.support import built, weights_of

ONE = torch.ones(1)


def test_every_nth_step_is_logged_with_the_gradient_norm_of_each_layer(wine, monkeypatch):
    monkeypatch.setattr("hpsearch.objectives.training.loop.steplog.DENSE_STEPS", 2)
    run = built(wine, batch_size=16, log_every=4, clip_grad_norm=1e-3)
    seen = {}

    def spy(note):
        def noted(point, loss):
            seen[point.step] = {name: p.grad.norm().item() for name, p in run.model.named_parameters()}
            note(point, loss)

        return noted

    run.steplog.record_step = spy(run.steplog.record_step)
    for epoch in range(2):
        train_epoch(run, epoch)
    records = run.steplog.drain()
    assert [record["step"] for record in records] == [0, 1, 4, 8]
    assert [record["epoch"] for record in records] == [0, 0, 0, 1]
    for record in records:
        norms = seen[record["step"]]
        assert set(record["layers"]) == {"1.0 Linear", "1.2 Linear"}, "the name has the layer's type"
        for layer, norm in record["layers"].items():
            name = layer.split()[0]
            assert norm == pytest.approx(math.hypot(norms[f"{name}.weight"], norms[f"{name}.bias"]), rel=1e-5)
        assert record["grad_norm"] == pytest.approx(math.hypot(*record["layers"].values()))
        assert record["grad_norm"] > 1e-3, "before clipping"
    assert run.steplog.drain() == []


def test_each_of_the_first_steps_is_logged_with_layer_names(objective_with):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.blocks, self.scale = nn.Linear(13, 8), nn.ModuleList([nn.Linear(8, 3)]), nn.Parameter(ONE)

        def forward(self, x):
            return self.blocks[0](self.first(x)) * self.scale

    run = built(objective_with(model=lambda *_: Named()), batch_size=4)
    train_epoch(run, 0)
    records = run.steplog.drain()
    assert [record["step"] for record in records] == list(range(20))
    assert set(records[0]["layers"]) == {"first", "blocks.0 Linear", "Named"}


def test_no_step_is_logged_by_default(wine):
    run = built(wine, batch_size=16, log_every=None)
    train_epoch(run, 0)
    assert run.steplog.drain() == []


def test_a_mid_epoch_validation_changes_no_result(wine):
    plain, watched = (built(wine, batch_size=16, validate_every=every) for every in (None, 4))
    scores = [train_epoch(run, 0) for run in (plain, watched)]
    assert scores[0].scores == scores[1].scores
    assert torch.equal(weights_of(plain), weights_of(watched))
    within = [record for record in watched.steplog.drain() if "val_loss" in record]
    assert [(record["epoch"], record["step"]) for record in within] == [(0, 4)]
    assert within[0]["val_accuracy"] > 0
