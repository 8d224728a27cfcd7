"""Helpers for tests of the training loop."""

import itertools

import numpy as np
import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.utils import data as torch_data

from hpsearch import (
    Dataset,
    LocalSession,
    Objective,
    Splits,
    Standardize,
    TrainConfig,
    Trainer,
    Verdict,
    classification,
)
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.evaluation.running_metrics import RunningMetrics
from hpsearch.objectives.training.loop.build import build_run
from hpsearch.objectives.training.loop.epoch import train_step
from hpsearch.objectives.training.loop.guards import StepPosition
from hpsearch.objectives.training.reproducibility.seeds import set_seed
from hpsearch.objectives.training.session import MidEpochAction


class Wine(Objective):
    """178 wines, 13 features, three classes; without dropout and batch norm, so that gradients are comparable."""

    metric = "accuracy"
    epochs = 4

    def suggest(self, trial):
        return TrainConfig(lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True))

    def data(self, seed):
        x, y = load_wine(return_X_y=True)
        return Splits.make(x, y, seed=seed)

    def model(self, config, train):
        net = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 3))
        return nn.Sequential(Standardize.fit(train.x), net)


def started(objective, config, *, epochs=3, seed=0):
    """Return a run on the CPU, built and seeded as for its first epoch."""
    run, _ = build_run(objective, config, RunPlan(epochs, seed, 0), device=torch.device("cpu"))
    set_seed(seed, "epoch", 0)
    return run


TIMED = ("epoch_seconds", "samples_per_second", "peak_memory_bytes")


def exact(history):
    """Return the parts of a history that are bit-identical in equal runs."""
    return [(r.epoch, {k: v for k, v in r.metrics.items() if k not in TIMED}) for r in history]


def same_result(found, expected):
    """Assert that two runs have bit-identical metrics and weights."""
    assert exact(found.history) == exact(expected.history)
    assert (found.best_epoch, found.best_value) == (expected.best_epoch, expected.best_value)
    weights = expected.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found.model.state_dict().items())


POINT = StepPosition(epoch=0, step=0, batch=0, lr=0.1)


def built(objective, epochs=3, **settings):
    """Return a run on the CPU with a constant rate."""
    settings = {"warmup_fraction": 0.0, "schedule": "constant", **settings}
    config = TrainConfig(**settings)
    return build_run(objective, config, RunPlan(epochs, 0, 0), device=torch.device("cpu"))[0]


def take_step(run, *window):
    """Take one optimizer step over the training rows of each micro-batch."""
    batches = [run.batch_source.batch(torch.tensor(rows)) for rows in window]
    step = train_step(run, batches, POINT, RunningMetrics(run.metrics))
    return step.loss, step.grad_norm


def weights_of(run):
    """Return a flat copy of all trained parameters."""
    return nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()


class Memory:
    """A session that keeps everything in memory and returns the given verdicts."""

    run_dir = shards = curve = None

    def __init__(self, answers=None):
        self.answers = answers or {}
        self.saved, self.reported, self.logged = [], [], []

    def restore(self):
        return None

    def save(self, state, *, best):
        self.saved.append((len(state["history"]) - 1, best))

    def mid_epoch_action(self, left):
        return MidEpochAction.NONE

    def save_mid_epoch(self, state):
        raise AssertionError("nothing was due")

    def report(self, record):
        self.reported.append(record)
        return self.answers.get(record.epoch, Verdict.CONTINUE)

    def log(self, path):
        self.logged.append(path)


def fit(objective, config=None, **settings):
    config = config or TrainConfig(lr=0.02, batch_size=32)
    return Trainer(objective, config, **{"epochs": 5, "seed": 0, **settings}).fit()


class Stopped(LocalSession):
    """Stops a run after the epoch `after`; earlier runs may have reported the epochs before it."""

    def __init__(self, folder, after):
        super().__init__(folder)
        self._after = after

    def report(self, record):
        return Verdict.STOP if record.epoch == self._after else Verdict.CONTINUE


class DiedError(Exception):
    pass


class Dying(LocalSession):
    """Dies at a point of an epoch: before the save, between save and report, or after the report."""

    def __init__(self, run_dir, epoch, point, die):
        super().__init__(run_dir)
        self.at, self.die = (epoch, point), die

    def save(self, state, *, best):
        epoch = len(state["history"]) - 1
        if self.at == (epoch, "unsaved"):
            self.die()
        super().save(state, best=best)
        if self.at == (epoch, "unreported"):
            self.die()

    def report(self, record):
        verdict = super().report(record)
        if self.at == (record.epoch, "reported"):
            self.die()
        return verdict


def raise_died():
    raise DiedError


class Numbers(torch_data.IterableDataset):
    """Rows of four numbers and whether their sum is positive, drawn by numpy's generator at each iteration."""

    def __init__(self, count=None):
        self.count, self.begun, self.epochs = count, 0, []

    def __iter__(self):
        self.begun += 1
        for _ in range(self.count) if self.count else itertools.count():
            x = np.random.randn(4).astype("float32")
            yield x, int(x.sum() > 0)

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class Sums(Objective):
    epochs = 4

    def suggest(self, trial):
        return TrainConfig(lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True))

    def data(self, seed):
        self.source = Numbers()
        return Splits(*(Dataset.of(self.source, length=n, fingerprint=f"sums-{n}") for n in (200, 60, 61)))

    def metrics(self, train):
        return classification(2)

    def model(self, config, train):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class StoppedWithin(LocalSession):
    """Stops after an optimizer step, counted over all folds."""

    def __init__(self, folder, after):
        super().__init__(folder)
        self.steps, self._after = 0, after

    def mid_epoch_action(self, left):
        assert left() >= 0
        self.steps += 1
        return MidEpochAction.SAVE_AND_STOP if self.steps == self._after else MidEpochAction.NONE
