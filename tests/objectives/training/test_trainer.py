import json
import logging
import random

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from objectives import ObjectiveError, load_objective
from objectives.training import (
    Dataset,
    DeviceMemoryError,
    EpochRecord,
    NonFiniteError,
    Splits,
    Standardize,
    TrainConfig,
    Trainer,
    Verdict,
    checkpoint,
    evaluate,
)
from objectives.training.build import build
from objectives.training.plots import curves


class Memory:
    """A session that keeps everything in memory and answers as told."""

    def __init__(self, answers=None):
        self.answers = answers or {}
        self.saved, self.reported, self.logged = [], [], []

    def restore(self):
        return None

    def save(self, state, *, best):
        self.saved.append((len(state["history"]) - 1, best))

    def report(self, record):
        self.reported.append(record)
        return self.answers.get(record.epoch, Verdict.CONTINUE)

    def log(self, path):
        self.logged.append(path)


def _fit(objective, config=None, **settings):
    config = config or TrainConfig(lr=0.02, batch_size=32)
    return Trainer(objective, config, **{"epochs": 5, "seed": 0, **settings}).fit()


def test_a_run_learns_and_keeps_its_records(wine, tmp_path):
    session = Memory()
    result = _fit(wine, session=session, run_dir=tmp_path, split_seed=4)
    assert result.status == "completed"
    assert result.best_value > 0.85
    assert [record.epoch for record in result.history] == list(range(5))
    assert session.reported == result.history
    expected = {"lr", "grad_norm", "epoch_seconds", "samples_per_second"}
    expected |= {f"{side}_{name}" for side in ("train", "val") for name in ("loss", "accuracy", "macro_f1")}
    for record in result.history:
        assert set(record.metrics) == expected
        assert all(type(value) is float for value in record.metrics.values())
    assert [r.timestamp for r in result.history] == sorted(r.timestamp for r in result.history)
    assert result.history[-1].metrics["train_loss"] < result.history[0].metrics["train_loss"]


def test_best_is_the_first_epoch_with_the_best_validation_metric(wine):
    session = Memory()
    result = _fit(wine, session=session, epochs=8)
    values = [record.metrics["val_accuracy"] for record in result.history]
    assert result.best_epoch == values.index(max(values))
    assert result.best_value == max(values)
    assert result.best_metrics == result.history[result.best_epoch].metrics
    best = [epoch for epoch, improved in session.saved if improved]
    assert best == [i for i, value in enumerate(values) if i == 0 or value > max(values[:i])]


def test_a_minimised_metric_is_minimised(objective_with):
    result = _fit(objective_with(metric="loss", direction="minimize"), epochs=8)
    losses = [record.metrics["val_loss"] for record in result.history]
    assert result.best_value == min(losses)
    assert result.best_epoch == losses.index(min(losses)) > 0


@pytest.mark.parametrize("ema", [None, 0.8])
def test_the_result_scores_what_was_recorded(wine, tmp_path, ema):
    config = TrainConfig(lr=0.05, batch_size=32, ema_decay=ema)
    result = _fit(wine, config, run_dir=tmp_path, epochs=6)
    loss, metrics = wine.loss(config, result.val), wine.metrics(result.val)
    scores = evaluate(result.model, result.val, loss, metrics, batch_size=7, device="cpu")
    for name, value in scores.items():
        assert value == pytest.approx(result.best_metrics[f"val_{name}"], abs=1e-6)
    assert not result.model.training
    best = checkpoint.read(result.best_path)
    assert (best["epoch"], best["value"]) == (result.best_epoch, result.best_value)
    assert all(torch.equal(tensor, best["model"][name]) for name, tensor in result.model.state_dict().items())
    assert TrainConfig.from_dict(best["config"]) == config
    assert result.example.shape == (4, 13)
    assert torch.equal(result.example, result.val.x[:4])


def test_the_best_weights_come_back_when_training_falls_apart_later(wine):
    config = TrainConfig(optimizer="sgd", lr=5.0, weight_decay=0.0, schedule="constant", warmup_fraction=0.9)
    result = _fit(wine, config, epochs=20)
    assert result.history[-1].metrics["val_accuracy"] < result.best_value
    scores = evaluate(
        result.model, result.val, wine.loss(config, result.val), wine.metrics(result.val), batch_size=99, device="cpu"
    )
    assert scores["accuracy"] == pytest.approx(result.best_value)


def test_the_files_of_a_run(wine, tmp_path):
    session = Memory()
    config = TrainConfig(lr=0.02, model={"width": 4})
    result = _fit(wine, config, session=session, run_dir=tmp_path, split_seed=3)
    names = ["config.yaml", "curves.png", "gradients.png", "metrics.jsonl", "report.md", "steps.jsonl", "train.log"]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "changes.diff") == names
    assert sorted(p.name for p in session.logged if p.name != "changes.diff") == names
    kept = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert TrainConfig.from_dict(kept["config"]) == config
    assert (kept["epochs"], kept["seed"], kept["split_seed"]) == (5, 0, 3)
    assert kept["split_hash"] == result.split_hash == wine.data(3).hash()
    assert kept["environment"]["torch"] == torch.__version__
    assert kept["environment"]["threads"] == 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [EpochRecord(d.pop("epoch"), d.pop("timestamp"), d) for d in lines] == result.history
    log = (tmp_path / "train.log").read_text()
    assert "untrained: loss=" in log
    assert log.count("epoch ") >= 5
    assert "completed: best epoch" in log


def test_a_local_run_keeps_checkpoints_in_its_directory(wine, tmp_path):
    result = _fit(wine, run_dir=tmp_path)
    assert (result.best_path, result.last_path) == (tmp_path / "best.pt", tmp_path / "last.pt")
    state = checkpoint.read(result.last_path)
    for part in ("model", "optimizer", "schedule", "scaler", "step", "skipped", "best", "history", "config", "seed"):
        assert part in state


def test_a_new_run_in_an_old_directory_keeps_no_old_numbers(wine, tmp_path):
    for lr in (0.1, 0.001):  # these sessions restore nothing
        result = _fit(wine, TrainConfig(lr=lr), session=Memory(), run_dir=tmp_path, epochs=2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["val_loss"] for line in lines] == [record.metrics["val_loss"] for record in result.history]
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["config"]["lr"] == 0.001


def test_nothing_is_written_without_a_place(wine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = _fit(wine)
    assert list(tmp_path.iterdir()) == []
    assert (result.best_path, result.last_path) == (None, None)


def test_a_command_line_is_kept_without_its_passwords(wine, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["run", "--storage-url", "postgresql://bob:hunter2@db/optuna"])
    _fit(wine, run_dir=tmp_path, epochs=1)
    text = (tmp_path / "config.yaml").read_text()
    assert "hunter2" not in text
    assert "postgresql://bob:***@db/optuna" in text


def test_a_pruned_run_ends_at_once_with_its_best(wine, tmp_path):
    session = Memory({2: Verdict.PRUNE})
    result = _fit(wine, session=session, run_dir=tmp_path)
    assert result.status == "pruned"
    assert len(result.history) == 3
    assert session.saved[-1][0] == 2
    assert (tmp_path / "curves.png").exists()
    assert result.best_value == max(r.metrics["val_accuracy"] for r in result.history)


def test_an_error_of_the_session_ends_the_run(wine):
    class LostError(Exception):
        pass

    class Losing(Memory):
        def report(self, record):
            raise LostError

    with pytest.raises(LostError):
        _fit(wine, session=Losing())


def test_the_same_seed_gives_the_same_run_and_another_does_not(wine):
    def losses(**settings):
        return [record.metrics["val_loss"] for record in _fit(wine, **settings).history]

    first = losses()
    torch.manual_seed(5)
    assert losses() == first
    assert losses(seed=1) != first
    assert losses(seed=1, split_seed=0) != first
    assert _fit(wine, seed=1, split_seed=0).split_hash == _fit(wine).split_hash != _fit(wine, seed=1).split_hash


def test_initial_weights_follow_the_seed_and_the_split_the_study(wine):
    def built(seed, split_seed):
        config, cpu = TrainConfig(), torch.device("cpu")
        run, _ = build(wine, config, epochs=1, seed=seed, split_seed=split_seed, device=cpu)
        return run.model[1][0].weight, run.identity["split_hash"]

    def same(one, other):
        return torch.equal(one[0], other[0]), one[1] == other[1]

    assert same(built(0, 0), built(0, 0)) == (True, True)
    assert same(built(0, 0), built(0, 1)) == (True, False)
    assert same(built(0, 0), built(1, 0)) == (False, True)


def test_data_that_draws_from_a_global_generator_is_split_the_same(objective_with):
    def data(_self, _seed):
        order = torch.randperm(60).numpy() + np.random.permutation(60)
        return Splits.make(np.zeros((60, 13)) + order[:, None], np.arange(60) % 3, seed=random.randrange(1000))

    objective = objective_with(data=data)
    first = _fit(objective, epochs=1, split_seed=2)
    torch.rand(1), np.random.rand(), random.random()
    assert _fit(objective, epochs=1, split_seed=2, seed=9).split_hash == first.split_hash


def test_the_process_keeps_its_random_state_and_switches(wine):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    _fit(wine)
    assert not torch.are_deterministic_algorithms_enabled()
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    assert not logging.getLogger("objectives.training").handlers


def test_deterministic_kernels_are_on_while_training(objective_with):
    seen = []

    def model(_self, _config, _train):
        net = nn.Linear(13, 3)
        net.register_forward_hook(lambda *_: seen.append(torch.are_deterministic_algorithms_enabled()))
        return net

    _fit(objective_with(model=model), epochs=1)
    assert set(seen) == {True}
    seen.clear()
    _fit(objective_with(model=model), TrainConfig(deterministic=False), epochs=1)
    assert set(seen) == {False}


def test_the_model_sees_training_data_alone(objective_with):
    seen = []

    def model(_self, _config, train):
        seen.append(train)
        return nn.Sequential(Standardize.fit(train.x), nn.Linear(13, 3))

    objective = objective_with(model=model)
    result = _fit(objective, epochs=1)
    assert torch.equal(seen[0].x, objective.data(0).train.x)
    torch.testing.assert_close(result.model[0].mean, seen[0].x.mean(0))


def test_a_divergence_is_an_error_with_its_place_never_a_number(objective_with, tmp_path):
    def model(_self, _config, _train):
        return nn.Sequential(nn.Linear(13, 16), nn.Linear(16, 3))  # raw inputs, up to 1,680

    session = Memory()
    config = TrainConfig(optimizer="sgd", lr=1e6, momentum=0.0, clip_grad_norm=None, weight_decay=0.0, batch_size=8)
    loss = objective_with(model=model, loss=lambda *_: nn.CrossEntropyLoss(label_smoothing=0.1))
    with pytest.raises(NonFiniteError, match=r"(loss|gradient norm) is (nan|inf) at epoch \d+, step \d+, batch") as e:
        _fit(loss, config, session=session, run_dir=tmp_path, epochs=30)
    assert e.value.lr > 0
    assert all(np.isfinite(record.metrics["val_loss"]) for record in session.reported)


def test_a_validation_loss_that_is_not_finite_is_a_divergence_too(objective_with):
    class Loss(nn.CrossEntropyLoss):
        trained = False

        def forward(self, output, target):
            self.trained = self.trained or output.requires_grad
            loss = super().forward(output, target)
            return loss * torch.inf if self.trained and not output.requires_grad else loss

    with pytest.raises(NonFiniteError, match="val_loss is inf at epoch 0, step 2"):
        _fit(objective_with(loss=lambda *_: Loss()))


def test_too_little_memory_is_told_apart_with_the_configuration(objective_with):
    def model(_self, _config, _train):
        return nn.Sequential(nn.Linear(13, 1 << 40), nn.Linear(1 << 40, 3))

    config = TrainConfig(batch_size=16, model={"width": 1 << 40})
    with pytest.raises(DeviceMemoryError, match="out of memory on cpu with batch_size 16 and model") as caught:
        _fit(objective_with(model=model), config)
    assert caught.value.config is config


def test_an_operation_without_a_deterministic_kernel_is_told_with_the_setting(objective_with):
    class Puts(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            if self.training:  # evaluation runs first and would name it as well
                output.clone().put_(torch.tensor([0]), torch.tensor([0.0]))
            return output

    objective = objective_with(model=lambda *_: Puts(13, 3))
    with pytest.raises(ObjectiveError, match=r"^put_ does not have .*: set deterministic=False in the TrainConfig$"):
        _fit(objective)
    assert _fit(objective, TrainConfig(deterministic=False)).status == "completed"


def test_a_model_is_trained_in_training_mode_however_it_came(objective_with):
    modes = []

    def model(_self, _config, _train):
        net = nn.Linear(13, 3).eval()
        net.register_forward_hook(lambda module, *_: modes.append((module.training, torch.is_grad_enabled())))
        return net

    _fit(objective_with(model=model), epochs=2)
    epoch = [(True, True)] * 3 + [(False, False)]
    assert modes == [(False, False)] * 2 + epoch * 2  # two looks at it before training


def _wine_but(**parts):
    def data(_self, seed):
        good = load_objective("breast_cancer").data(seed)
        return Splits(**{"train": good.train, "val": good.val, "test": good.test, **parts})

    return data


NET = nn.Linear(13, 3)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"data": lambda *_: (1, 2)}, "Changed.data must return Splits, not tuple"),
        ({"data": _wine_but(val=Dataset(torch.zeros(0, 30), torch.zeros(0).long()))}, "validation split is empty"),
        ({"data": lambda *_: 1 / 0}, r"Changed.data: .*test_trainer.py:\d+: ZeroDivisionError: division by zero"),
        ({"model": lambda *_: "net"}, "model\\(\\) must return a torch.nn.Module, not str"),
        ({"model": lambda *_: nn.Flatten()}, "has no parameters to train"),
        ({"model": lambda *_: nn.Linear(12, 3)}, "Changed on the validation split: RuntimeError: .*shapes cannot be"),
        ({"model": lambda *_: nn.Linear(13, 2)}, r"gives \[2\] outputs a sample, but labels go up to 2"),
        ({"model": lambda *_: nn.Sequential(NET, nn.Flatten(0))}, r"gives \[6\] for 2 inputs: keep the first dim"),
        ({"model": lambda *_: nn.LSTM(13, 3)}, "the model must return one tensor, not tuple"),
        ({"loss": lambda *_: nn.MSELoss(reduction="sum")}, "MSELoss must not use reduction='sum'"),
        ({"metric": "acuracy"}, "no built-in metric 'acuracy': did you mean 'accuracy'"),
        ({"metric": "recall", "metrics": lambda s, t: type(s).__mro__[1]().metrics(t)}, "which metrics\\(\\) does not"),
        ({"metric": "loss"}, "loss is to minimize, so set direction = 'minimize'"),
        ({"direction": "minimize"}, "accuracy is to maximize, so set direction = 'maximize'"),
    ],
)
def test_a_mistake_in_the_objective_is_told_before_training(objective_with, tmp_path, replaced, message):
    session = Memory()
    with pytest.raises(ObjectiveError, match=message) as caught:
        _fit(objective_with(**replaced), session=session)
    assert "\n" not in str(caught.value)
    assert not session.saved
    assert not session.reported


def test_auroc_on_a_split_of_one_class_is_refused_before_training():
    good = load_objective("breast_cancer")

    class OneClass(type(good)):
        def data(self, seed):
            splits = super().data(seed)
            only = (splits.val.y == 1).nonzero()[:, 0]
            return Splits(splits.train, splits.val.take(only), splits.test)

    with pytest.raises(ObjectiveError, match="auroc needs both classes, but all 43 labels of a split are 1"):
        _fit(OneClass(), good.default_config())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, not 0"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used"),
        ({"device": "toaster"}, "device 'toaster' cannot be used"),
    ],
)
def test_bad_settings_of_a_run_are_refused(wine, settings, message):
    with pytest.raises(ObjectiveError, match=message):
        _fit(wine, **settings)


def test_a_configuration_must_be_one(wine):
    with pytest.raises(ObjectiveError, match="must be a TrainConfig, not dict"):
        Trainer(wine, {"lr": 0.1}, epochs=1, seed=0)


def test_curves_mark_the_best_epoch(wine, tmp_path):
    history = _fit(wine).history
    path = curves(history, tmp_path / "deep" / "a.png", metric="accuracy", best_epoch=2)
    plain = curves(history, tmp_path / "b.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.read_bytes() != plain.read_bytes()
