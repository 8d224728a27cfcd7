"""Folds that train as one vectorized model: equal to training in turns, resumed exactly, with a reason if not."""

from __future__ import annotations

import logging
import random
import signal

import pytest
import torch
from torch import nn

from hpsearch import LocalSession, Splits, Standardize, TrainConfig
from hpsearch.objectives.fit import fit
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.loop import fold_group_check
from hpsearch.objectives.training.loop.build import build_run
from hpsearch.objectives.training.loop.fold_group_check import build_fold_group
from hpsearch.objectives.training.loop.stacked_folds import StackedFolds
from hpsearch.objectives.training.reproducibility import checkpoint
from hpsearch.objectives.training.reproducibility.seeds import make_reproducible
from hpsearch.objectives.training.session import MidEpochAction
from tests.objectives.training.support import (
    TIMED,
    DiedError,
    Dying,
    Memory,
    StoppedWithin,
    Wine,
    raise_died,
    same_result,
)

FOLDS, EPOCHS = 3, 2
PLAN = RunPlan(EPOCHS, 0, 0, folds=FOLDS)
CONFIG = TrainConfig(lr=0.02, batch_size=32, ema_decay=0.9, schedule="plateau", drop_last=False)
STEPS = 3  # of an epoch: 94 or 95 samples in batches of 32; the last batches of the folds have 30 or 31 samples


@pytest.fixture(autouse=True)
def always_vectorized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept short trainings."""
    vectorize_always(monkeypatch.setattr)


def vectorize_always(set_value=setattr) -> None:
    set_value(fold_group_check, "MIN_STEPS", 0)


class Noisy(Wine):
    """Dropout draws from the random generators at each step."""

    def model(self, config, train):
        net = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
        return nn.Sequential(Standardize.fit(train.x), net)


class Augmented(Wine):
    def augment(self, config):
        return lambda x: x + 0.1 * torch.randn_like(x)


class Images(Wine):
    def data(self, seed):
        generator = torch.Generator().manual_seed(0)
        y = torch.arange(120) % 3
        return Splits.make(torch.randn(120, 1, 6, 6, generator=generator) + y[:, None, None, None], y, seed=seed)

    def model(self, config, train):
        convolutions = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 2)
        return nn.Sequential(*convolutions, nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(6, 3))


class Words(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, ids):
        return self.last(self.block(self.embedding(ids)).mean(dim=1))


class Texts(Wine):
    dropout = 0.0

    def data(self, seed):
        generator = torch.Generator().manual_seed(0)
        y = torch.arange(120) % 3
        return Splits.make(torch.randint(0, 20, (120, 6), generator=generator) + 4 * y[:, None], y, seed=seed)

    def model(self, config, train):
        return Words(self.dropout)


class NoisyTexts(Texts):
    dropout = 0.2


class SparseTexts(Texts):
    def model(self, config, train):
        return nn.Sequential(nn.Embedding(30, 8, sparse=True), nn.Flatten(), nn.Linear(48, 3))


class Weighted(Wine):
    """Each fold has other class weights, and its mean loss another divisor."""

    def loss(self, config, train):
        return nn.CrossEntropyLoss(weight=1 / torch.bincount(train.y).float())


def soak(*values):
    return pytest.param(*values, marks=pytest.mark.soak)


EQUAL = [
    (Wine(), {"ema_decay": 0.9, "schedule": "plateau", "drop_last": False}),
    (Wine(), {"batch_size": 47, "drop_last": False, "optimizer": "nadam"}),  # folds with two and with three steps
    (Wine(), {"optimizer": "sgd", "momentum": 0.0, "clip_grad_norm": None, "swa_fraction": 0.5}),
    (Wine(), {"optimizer": "rmsprop", "clip_grad_norm": None, "clip_grad_value": 0.01, "layer_decay": 0.7}),
    soak(Wine(), {"optimizer": "adagrad", "clip_grad_norm": 0.1, "label_smoothing": 0.1}),
    soak(Weighted(), {"optimizer": "sgd", "nesterov": True}),
    (Images(), {"optimizer": "adam", "batch_size": 16}),
    (Texts(), {"batch_size": 16, "drop_last": False}),
]


@pytest.mark.parametrize(("objective", "settings"), EQUAL)
def test_the_folds_have_the_metrics_of_training_in_turns(caplog, objective, settings) -> None:
    config = {"lr": 0.01, "batch_size": 32, **settings}
    with caplog.at_level(logging.INFO):
        together, in_turns = (
            fit(objective, TrainConfig(**config, vectorize_folds=vectorize), PLAN, device="cpu")
            for vectorize in (True, False)
        )
    assert "folds train as one vectorized model: its gradients are equal" in caplog.text
    assert "folds train in turns: vectorize_folds=False" in caplog.text
    for one, other in zip(together.history, in_turns.history, strict=True):
        expected = {name: value for name, value in other.metrics.items() if name not in TIMED}
        assert {name: one.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    x = together.val.inputs(slice(0, 20))
    with torch.inference_mode():
        torch.testing.assert_close(together.model(x), in_turns.model(x), rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        vectorize_always(patch.setattr)
        return fit(Noisy(), CONFIG, PLAN, run_dir=tmp_path_factory.mktemp("undisturbed"), device="cpu")


@pytest.mark.parametrize("after", [1, soak(2), soak(3), soak(4), 5])
def test_a_run_that_is_stopped_within_an_epoch_resumes_exactly(tmp_path, undisturbed, after) -> None:
    first = fit(Noisy(), CONFIG, PLAN, session=StoppedWithin(tmp_path, after), device="cpu")
    assert (first.status, len(first.history)) == ("stopped", (after - 1) // STEPS)
    session = StoppedWithin(tmp_path, 0)
    resumed = fit(Noisy(), CONFIG, PLAN, session=session, device="cpu")
    assert session.steps == EPOCHS * STEPS - after
    same_result(resumed, undisturbed)


def test_a_run_keeps_the_path_on_which_it_began(tmp_path, undisturbed, monkeypatch) -> None:
    with pytest.raises(DiedError):
        fit(Noisy(), CONFIG, PLAN, session=Dying(tmp_path, 0, "unreported", raise_died), device="cpu")
    monkeypatch.setattr(fold_group_check, "MIN_STEPS", 10**9)
    same_result(fit(Noisy(), CONFIG, PLAN, session=LocalSession(tmp_path), device="cpu"), undisturbed)
    in_turns = fit(Noisy(), CONFIG, PLAN, run_dir=tmp_path / "whole", device="cpu")
    with pytest.raises(DiedError):
        fit(Noisy(), CONFIG, PLAN, session=Dying(tmp_path / "died", 0, "reported", raise_died), device="cpu")
    monkeypatch.setattr(fold_group_check, "MIN_STEPS", 0)
    same_result(fit(Noisy(), CONFIG, PLAN, session=LocalSession(tmp_path / "died"), device="cpu"), in_turns)


def test_a_checkpoint_of_a_vectorized_epoch_can_be_trained_in_turns(tmp_path, caplog) -> None:
    config = TrainConfig(lr=0.02, batch_size=32, drop_last=False)
    fit(Wine(), config, PLAN, session=StoppedWithin(tmp_path, 2), device="cpu")
    state = checkpoint.read(tmp_path / "last.pt")
    assert state["is_vectorized"]
    assert [fold["within"]["sums"]["steps"] for fold in state["fold_states"]] == [2] * FOLDS
    checkpoint.write(tmp_path / "last.pt", {**state, "is_vectorized": False})
    with caplog.at_level(logging.INFO):
        resumed = fit(Wine(), config, PLAN, session=LocalSession(tmp_path), device="cpu")
    assert "folds train in turns: as before the interruption" in caplog.text
    expected = fit(Wine(), config, PLAN, device="cpu")
    assert resumed.best_value == pytest.approx(expected.best_value, abs=1e-6)
    assert resumed.history[-1].metrics["train_loss"] == pytest.approx(expected.history[-1].metrics["train_loss"], 1e-4)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from hpsearch.objectives.fit import fit
from tests.objectives.training.loop.test_fold_group import CONFIG, PLAN, Dying, KilledWithin, Noisy, vectorize_always
torch.set_num_threads(int(sys.argv[3]))
vectorize_always()
kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
folder, point = Path(sys.argv[1]), sys.argv[2]
session = KilledWithin(folder, 5, kill) if point == "within" else Dying(folder, 1, point, kill)
fit(Noisy(), CONFIG, PLAN, session=session, device="cpu")
"""


class KilledWithin(LocalSession):
    """Saves after each step, and dies after a step."""

    def __init__(self, folder, after, die):
        super().__init__(folder)
        self._left, self._die = after, die

    def mid_epoch_action(self, left):
        self._left -= 1
        return MidEpochAction.SAVE

    def save_mid_epoch(self, state):
        super().save_mid_epoch(state)
        if self._left == 0:
            self._die()


@pytest.mark.parametrize("point", ["within", soak("unsaved")])
def test_a_run_killed_by_sigkill_resumes_exactly_in_another_process(zygote, tmp_path, undisturbed, point) -> None:
    said, _ = (done := zygote.python(KILLED, tmp_path, point, str(torch.get_num_threads()))).communicate()
    assert done.returncode == -signal.SIGKILL, said
    session = StoppedWithin(tmp_path, 0)
    same_result(fit(Noisy(), CONFIG, PLAN, session=session, device="cpu"), undisturbed)
    assert session.steps == {"within": 1, "unsaved": STEPS}[point]


@pytest.mark.parametrize("objective", [Augmented(), soak(NoisyTexts())])
def test_random_numbers_are_reproducible(objective) -> None:
    config = TrainConfig(lr=0.02, batch_size=16)
    one, other = (fit(objective, config, RunPlan(1, 0, 0, folds=2), device="cpu") for _ in range(2))
    same_result(one, other)


def make_runs(objective, count=2, **settings):
    config = TrainConfig(**{"batch_size": 32, **settings})
    plans = [RunPlan(EPOCHS, 0, 0, folds=count, fold=index) for index in range(count)]
    return config, [build_run(objective, config, plan, device=torch.device("cpu"))[0] for plan in plans]


def test_dropout_differs_between_folds_with_equal_weights_and_batches() -> None:
    _, runs = make_runs(Noisy())
    runs[1].model.load_state_dict(runs[0].model.state_dict())
    batch = next(runs[0].batch_source.iterate_steps(0))[0].load()
    stacked = StackedFolds(runs, [batch, batch])
    with torch.no_grad():
        outputs = stacked.compute(*stacked.stack([batch, batch])).outputs
    assert not torch.equal(outputs[0], outputs[1])


def test_the_patience_counts_epochs_of_the_mean() -> None:
    config = TrainConfig(lr=1e-9, batch_size=32, patience=2, warmup_fraction=0.0)
    found = fit(Wine(), config, RunPlan(20, 0, 0, folds=2), session=Memory(), device="cpu")
    assert (found.status, len(found.history)) == ("completed", found.best_epoch + 3)


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class Odd(nn.Module):
    """A network whose forward pass also calls `extra(self, h)`."""

    def __init__(self, extra):
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(13, 8), nn.Linear(8, 3), nn.Linear(1, 1)
        self.unused.requires_grad_(False)
        self.extra, self.calls, self.factor, self.shift = extra, 0, 1.0, torch.ones(8)

    def forward(self, x):
        return self.last(self.extra(self, self.first(x / 100)))

    def count(self, h):
        self.calls += 1
        return h

    def keep_state(self, h):
        self.state = h.detach()
        return h


class OddWine(Wine):
    def __init__(self, extra, change=lambda net, train: None):
        self.extra, self.change = extra, change

    def model(self, config, train):
        self.change(net := Odd(self.extra), train)
        return net


class Epochs(Wine):
    def on_epoch(self, model, epoch, config):
        pass


class Item(nn.Module):
    def forward(self, output, target):
        return nn.functional.cross_entropy(output, target) * min(float(output.detach().sum()), 1.0)


class ItemLoss(Wine):
    def loss(self, config, train):
        return Item()


class BatchNorm(Wine):
    def model(self, config, train):
        return nn.Sequential(nn.BatchNorm1d(13), nn.Linear(13, 3))


def keep(_, h):
    return h


FALLBACKS = [
    (Wine(), {"vectorize_folds": False}, "vectorize_folds=False"),
    (Wine(), {"optimizer": "lamb"}, "optimizer='lamb'"),
    (Wine(), {"precision": "bf16"}, "precision='bf16'"),
    (Wine(), {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
    (Wine(), {"num_workers": 0}, "the samples are not in memory"),
    (Epochs(), {}, "on_epoch() may change the models"),
    (BatchNorm(), {}, "the forward pass changes 0.running_mean"),
    (ItemLoss(), {}, "the model or its loss cannot be vectorized: "),
    (OddWine(lambda _, h: h if h.sum() > 0 else -h), {}, "the model or its loss cannot be vectorized: "),
    (OddWine(lambda _, h: Squares.apply(h)), {}, "the model or its loss cannot be vectorized: "),
    (SparseTexts(), {"optimizer": "adagrad"}, "the model or its loss cannot be vectorized: "),
    (OddWine(Odd.count), {}, "the forward pass changes attributes of modules"),
    (OddWine(Odd.keep_state), {}, "the forward pass changes attributes of modules"),
    (OddWine(lambda _, h: h * (1 + random.random())), {}, "the forward pass changes attributes of modules or draws"),
    (OddWine(lambda net, h: h * net.shift), {}, "the forward pass uses a tensor that is neither a parameter"),
    (OddWine(lambda _, h: h + torch.randn_like(h)), {}, "the outputs of one batch differ by"),
    (OddWine(keep, lambda net, _: net.unused.requires_grad_()), {}, "some parameters have no gradient"),
    (
        OddWine(lambda net, h: h * net.factor, lambda net, train: setattr(net, "factor", float(train.x.std()))),
        {},
        "the folds have different attributes of model",
    ),
]


@pytest.mark.parametrize(("objective", "settings", "said"), FALLBACKS)
def test_everything_else_trains_in_turns_with_a_reason(objective, settings, said) -> None:
    with make_reproducible(deterministic=True):
        config, runs = make_runs(objective, **settings)
        before = [{name: tensor.clone() for name, tensor in run.model.state_dict().items()} for run in runs]
        group, reason = build_fold_group(objective, config, runs, is_resumed=False)
    assert group is None
    assert reason.startswith(said)
    assert "\n" not in reason
    for run, state in zip(runs, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in run.model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MIN_STEPS", 10**9, "the training has only "),
        ("MAX_PARAMETERS", 1, "the model is large: "),
        ("MAX_OPERATIONS", 1, "the model is large: "),
    ],
)
def test_folds_train_in_turns_if_that_is_faster(monkeypatch, name, value, said) -> None:
    monkeypatch.setattr(fold_group_check, name, value)
    config, runs = make_runs(Wine())
    group, reason = build_fold_group(Wine(), config, runs, is_resumed=False)
    assert (group, reason[: len(said)]) == (None, said)


def test_a_resumed_run_stays_one_model_where_rounding_errors_are_relatively_large(monkeypatch) -> None:
    """They are, if the loss or the gradient of the trained model is small."""
    monkeypatch.setattr(fold_group_check, "_TOLERANCE", 0.0)
    config, runs = make_runs(Wine())
    assert build_fold_group(Wine(), config, runs, is_resumed=False)[0] is None
    assert build_fold_group(Wine(), config, runs, is_resumed=True)[0] is not None
