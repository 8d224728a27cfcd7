"""Hugging Face's Trainer in a trial: the guarantees of trials hold for its loop."""

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from hpsearch import LocalSession, LoopObjective, ObjectiveError, Verdict
from hpsearch.objectives.adapters.transformers import train, training_arguments
from tests.objectives.adapters.support import (
    assert_one_model,
    assert_resumed_exactly,
    assert_resumed_on_two_ranks,
    trained,
)
from tests.objectives.training.support import Memory


class Net(nn.Module):
    """A model for `Trainer`, which returns the loss with the outputs."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(seed, count):
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return [{"x": row, "labels": int(row.sum() > 0)} for row in x]


class Sums(LoopObjective):
    metric, epochs = "accuracy", 5

    def suggest(self, trial):
        return {"lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True)}

    def arguments(self, trial):
        settings = {"learning_rate": trial.config["lr"], "logging_strategy": "epoch", **getattr(self, "settings", {})}
        return training_arguments(trial, per_device_train_batch_size=16, **settings)

    def run(self, trial):
        def scores(found):
            return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}

        arguments = self.arguments(trial)
        parts = {"train_dataset": rows(0, 96), "eval_dataset": rows(1, 64)}
        train(trial, Trainer(Net(), arguments, compute_metrics=scores, **parts))


def made(**parts):
    return type("Sums", (Sums,), parts)()


@pytest.mark.slow
def test_a_resumed_run_is_bit_identical(tmp_path):
    whole = assert_resumed_exactly(made(), tmp_path)
    assert {"val_accuracy", "val_loss", "train_loss", "lr"} == set(whole.history[0].metrics) - {"epoch_seconds"}
    assert not list(tmp_path.glob("*/checkpoint-*")), "its checkpoints are in the trial's"


@pytest.mark.slow
def test_another_seed_is_another_order_of_the_same_data():
    orders = []

    class Seen(list):
        def __getitem__(self, row):
            orders[-1].append(row)
            return super().__getitem__(row)

    for seed in (7, 7, 8):
        orders.append([])

        def run(self, trial, seed=seed):
            trial.seed = seed
            arguments = self.arguments(trial)
            train(trial, Trainer(Net(), arguments, train_dataset=Seen(rows(0, 32)), eval_dataset=rows(1, 8)))

        trained(made(run=run, metric="loss", direction="minimize"), Memory(), epochs=1)
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


@pytest.mark.slow
@pytest.mark.parametrize(("verdict", "status"), [(Verdict.PRUNE, "pruned"), (Verdict.STOP, "stopped")])
def test_the_verdict_on_a_report_ends_the_loop(verdict, status, tmp_path):
    result = trained(made(), Memory({1: verdict}))
    assert (result.status, len(result.history)) == (status, 2)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"settings": {"num_train_epochs": 3}},
            r"training_arguments\(\): hpsearch sets 'num_train_epochs'",
        ),
        (
            {"arguments": lambda *_: TrainingArguments("out", use_cpu=True)},
            r"train\(\) needs a Trainer that was created with args=training_arguments\(trial, ...\)",
        ),
    ],
)
def test_mistakes_are_errors_of_one_line(parts, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ObjectiveError, match=message):
        trained(made(**parts), LocalSession(tmp_path))


class OnRanks(Sums):
    metric, direction = "loss", "minimize"

    def run(self, trial):
        trainer = Trainer(Net(), self.arguments(trial), train_dataset=rows(0, 96), eval_dataset=rows(1, 64))
        train(trial, trainer)
        assert_one_model(trainer.model)
        assert trainer.state.max_steps == 3 * 96 // 16 // 2


@pytest.mark.soak
@pytest.mark.slow
def test_a_run_resumes_on_two_ranks(tmp_path):
    assert_resumed_on_two_ranks(OnRanks(), tmp_path)
