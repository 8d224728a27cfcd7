"""A generator of points, whose metric needs a whole split and random inputs of its own."""

import torch
from torch import nn
from torch.nn import functional

from hpsearch import Objective, Splits, Step, TrainConfig


class Generator(Objective):
    metric, direction, loss_floor, epochs = "distance", "minimize", None, 3

    def suggest(self, trial):
        return TrainConfig(lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True), batch_size=32)

    def data(self, seed):
        generator = torch.Generator().manual_seed(7)
        points = torch.randn(400, 2, generator=generator) * torch.tensor([1.0, 3.0]) + 2
        return Splits.make(torch.randn(400, 4, generator=generator), points, seed=seed, stratify=False)

    def model(self, config, train):
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))

    def step(self, model, batch, config):
        made = model(batch.x)
        return Step(2 * torch.cdist(made, batch.y).mean(1) - torch.cdist(made, made).mean(1))

    def evaluate(self, model, part, config):
        return {"distance": distance(model(torch.linspace(-2, 2, 4 * len(part)).reshape(-1, 4)), part.y)}

    def export(self, model, config):
        return Doubled(model), torch.zeros(2, 4)


class Doubled(nn.Module):
    """The points in another unit, for a served model that differs from the trained one."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, noise):
        return 2 * self.model(noise)


def distance(made, points):
    """Return the sliced Wasserstein distance of two sets with the same number of points."""
    directions = functional.normalize(torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]), dim=0)
    ours, theirs = ((part @ directions).sort(0).values for part in (made, points))
    return float((ours - theirs).abs().mean())
