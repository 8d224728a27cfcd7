"""Lightning in a trial: the guarantees of trials hold for Lightning's loop."""

import os
import signal

import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from sklearn.datasets import load_wine
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from hpsearch import LocalSession, LoopObjective, ObjectiveError, Verdict
from hpsearch.objectives.adapters import lightning
from tests.objectives.adapters.support import (
    assert_one_model,
    assert_resumed_exactly,
    assert_resumed_on_two_ranks,
    trained,
)
from tests.objectives.training.support import Memory


class Noisy(Dataset):
    """Wine samples with noise from torch's generator in the loading process."""

    def __init__(self, rows):
        x, y = load_wine(return_X_y=True)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[rows]
        self.x, self.y = torch.tensor(x, dtype=torch.float32)[order], torch.tensor(y)[order]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, row):
        return self.x[row] + 0.1 * torch.randn(13), self.y[row]


class Net(LightningModule):
    scheduler = "plateau"

    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.BatchNorm1d(13), nn.Linear(13, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))

    def training_step(self, batch, _):
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_start(self):
        torch.rand(3)  # the user's own random numbers

    def validation_step(self, batch, _):
        scores = self.net(batch[0])
        self.log("val/loss", functional.cross_entropy(scores, batch[1]))
        self.log("val_accuracy", (scores.argmax(1) == batch[1]).float().mean())

    def test_step(self, batch, _):  # noqa: PT019 Lightning's
        self.log("test/accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        adam = torch.optim.AdamW(self.parameters(), self.hparams.lr)
        made = {
            "plateau": lambda: {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(adam, "max", patience=0, threshold=0.1),
                "monitor": "val_accuracy",
            },
            "cycle": lambda: {
                "scheduler": torch.optim.lr_scheduler.OneCycleLR(adam, 0.1, total_steps=35),
                "interval": "step",
            },
        }
        return {"optimizer": adam, "lr_scheduler": made[self.scheduler]()}


class Wines(LoopObjective):
    metric, epochs = "accuracy", 5
    workers, scheduler = 0, "plateau"

    def suggest(self, trial):
        return {"lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True)}

    def run(self, trial):
        net = Net(trial.config["lr"])
        net.scheduler = self.scheduler
        loaders = (
            DataLoader(Noisy(slice(0, 110)), batch_size=16, shuffle=True, num_workers=self.workers),
            DataLoader(Noisy(slice(110, 140)), batch_size=64),
        )
        lightning.fit(trial, net, loaders, **getattr(self, "trainer", {}))

    def test(self, best, config, device, seed):
        return lightning.test(Net(config["lr"]), best, DataLoader(Noisy(slice(140, 178)), batch_size=64))


def made(**parts):
    return type("Wines", (Wines,), parts)()


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({}, id="plateau"),
        pytest.param({"workers": 1}, id="loader", marks=pytest.mark.soak),
        pytest.param({"scheduler": "cycle"}, id="cycle"),
    ],
)
def test_a_resumed_run_is_bit_identical(parts, tmp_path):
    whole = assert_resumed_exactly(made(**parts), tmp_path)
    rates = [record.metrics["lr"] for record in whole.history]
    assert rates[-1] < rates[0], "the rate followed its schedule"


def test_each_epoch_is_reported_with_the_names_of_its_metrics():
    result = trained(made(), Memory())
    assert {"val_accuracy", "val_loss", "train_loss", "lr"} <= set(result.history[0].metrics)
    assert len(result.history) == 5
    assert set(result.objective.test(result.best, result.config, torch.device("cpu"), 0)) == {"accuracy"}


@pytest.mark.parametrize(("verdict", "status"), [(Verdict.PRUNE, "pruned"), (Verdict.STOP, "stopped")])
def test_the_verdict_on_a_report_ends_the_loop(verdict, status):
    result = trained(made(), Memory({1: verdict}))
    assert (result.status, len(result.history)) == (status, 2)


def test_a_loop_that_lightning_ends_early_is_complete():
    stops = EarlyStopping("val_accuracy", mode="max", patience=1, min_delta=1.0)
    result = trained(made(trainer={"callbacks": [stops]}), Memory())
    assert (result.status, len(result.history)) == ("completed", 2)


def test_lightning_does_not_handle_sigterm(monkeypatch):
    """Lightning would stop in the middle of the epoch."""
    received = []

    def validation_step(self, batch, _):
        if self.current_epoch == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        self.log("val_accuracy", 0.5)

    monkeypatch.setattr(Net, "validation_step", validation_step)
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        result = trained(made(), Memory())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (received, len(result.history)) == ([1], 5)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"trainer": {"max_epochs": 3}}, r"fit\(\): hpsearch sets the Trainer argument 'max_epochs'"),
        ({"metric": "acuracy"}, "'acuracy' is not reported; did you mean 'accuracy'"),
        (
            {"run": lambda _, trial: lightning.fit(trial, Net(0.1), [1, 2])},
            r"fit\(\): data must be a LightningDataModule or \(train, validation\) loaders, not list",
        ),
    ],
)
def test_mistakes_are_errors_of_one_line(parts, message, tmp_path):
    with pytest.raises(ObjectiveError, match=message):
        trained(made(**parts), LocalSession(tmp_path))


class OnRanks(Wines):
    def run(self, trial):
        net, rows = Net(trial.config["lr"]), (slice(0, 110), slice(110, 141))
        net.scheduler = "cycle"
        loaders = [DataLoader(Noisy(part), batch_size=16, shuffle=part.start == 0) for part in rows]
        lightning.fit(trial, net, tuple(loaders))
        assert_one_model(net)
        assert net.trainer.world_size == 2
        validated = torch.tensor(len(list(net.trainer.val_dataloaders.sampler)))
        torch.distributed.all_reduce(validated)
        assert validated == 31, "each sample once"


@pytest.mark.soak
@pytest.mark.slow
def test_a_run_resumes_on_two_ranks(tmp_path):
    assert_resumed_on_two_ranks(OnRanks(), tmp_path)
