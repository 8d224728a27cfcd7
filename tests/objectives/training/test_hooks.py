"""Optional hooks of an objective: parameter groups, samplers, `on_epoch` and `prepare`."""

import itertools
import math
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
import torch
from torch.nn.utils import prune
from torch.utils.data import Sampler, WeightedRandomSampler

from hpsearch import LocalSession, ObjectiveError, TrainConfig, Trainer, Verdict
from hpsearch.objectives.training.data.samplers import EpochOrder, LengthGroupedSampler
from tests.objectives.training.support import Memory, Wine, built, fit, same_result

CPU = torch.device("cpu")


def _order(sampler, epoch=0, samples=100, **settings):
    return list(EpochOrder(samples, TrainConfig(batch_size=10, **settings), 0, sampler).iterate_steps(epoch, CPU))


def test_a_weighted_sampler_draws_by_its_weights_in_each_epoch():
    weights = torch.cat([torch.zeros(50), torch.ones(50)])
    found = [_order(WeightedRandomSampler(weights, 100), epoch) for epoch in (0, 0, 1)]
    rows = [torch.cat([row for window in order for row in window]) for order in found]
    assert int(rows[0].min()) >= 50
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    assert (
        len(found[0]) == EpochOrder(100, TrainConfig(batch_size=10), 0, WeightedRandomSampler(weights, 100)).steps == 10
    )


def test_length_batches_have_little_padding_and_each_sample_once():
    lengths = torch.randint(1, 500, (1000,), generator=torch.Generator().manual_seed(0))
    found = _order(LengthGroupedSampler(lengths, 10), samples=1000, gradient_accumulation_steps=3)
    batches = [rows for window in found for rows in window]
    assert sorted(torch.cat(batches).tolist()) == list(range(1000))
    spread = torch.stack([lengths[rows].max() - lengths[rows].min() for rows in batches]).float()
    assert spread.mean() < 25
    config = TrainConfig(gradient_accumulation_steps=3)
    assert len(found) == 34 == EpochOrder(1000, config, 0, LengthGroupedSampler(lengths, 10)).steps
    assert [len(window) for window in found[:-1]] == [3] * 33


def test_a_run_is_trained_in_the_order_of_its_sampler(objective_with):
    def sampler(_self, config, train):
        return WeightedRandomSampler((train.y == 1).double(), len(train))

    result = fit(objective_with(sampler=sampler), epochs=3)
    assert result.history[-1].metrics["train_accuracy"] == 1.0, "only one class was seen"
    assert result.best_metrics["val_accuracy"] < 0.6


def test_parameters_that_on_epoch_adds_are_an_error(objective_with):
    def halve(_self, model, epoch, config):
        layer = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
        prune.l1_unstructured(layer, "weight", amount=0.5)

    with pytest.raises(ObjectiveError, match=r"\.on_epoch added or removed the parameter or buffer '.*weight"):
        fit(objective_with(on_epoch=halve), epochs=2)


def test_an_endless_sampler_is_an_error():
    class Endless(Sampler):
        def __iter__(self):
            return itertools.count()

        def __len__(self):
            return 100

    with pytest.raises(ObjectiveError, match="yields more samples or batches than its length, 100"):
        _order(Endless())


def test_custom_parameter_groups_are_trained_at_their_rates(objective_with):
    def groups(_self, model, config):
        return [
            {"params": model[1][0].parameters(), "lr": np.float64(0.1) * config.lr},
            {"params": model[1][2].parameters()},
        ]

    run = built(objective_with(parameter_groups=groups), lr=0.02, weight_decay=0.3)
    rates = [(group["lr"], group["weight_decay"]) for group in run.optimizer.param_groups]
    assert rates == [(pytest.approx(0.002), 0.3), (pytest.approx(0.02), 0.3)]
    assert [type(rate) for rate, _ in rates] == [float, float], "a checkpoint cannot hold NumPy's numbers"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda model: [{"params": model[1][0].parameters()}],
            r"no parameter group has 1.2.weight, 1.2.bias; add one, or set requires_grad=False",
        ),
        (
            lambda model: [{"params": [*model.parameters(), *model.parameters()]}],
            "a parameter occurs twice in the parameter groups",
        ),
        *(
            (lambda model, make=make: make(model), r"parameter_groups\(\) must return a list such as \[\{'params'")
            for make in (
                lambda model: model.parameters(),
                lambda model: {"params": model.parameters()},
                lambda _: [{"lr": 0.1}],
                lambda model: [{"params": model.named_parameters()}],
                lambda _: 5,
            )
        ),
        *(
            (
                lambda model, setting=setting, value=value: [{"params": model.parameters(), setting: value}],
                rf"^parameter group 'group0' has {setting}=.*; give a number of at least 0$",
            )
            for setting, value in (
                ("lr", "1e-3"),
                ("lr", None),
                ("lr", torch.tensor([1.0, 2.0])),
                ("lr", -1),
                ("lr", 10**400),
                ("lr", math.nan),
                ("weight_decay", "0.1"),
            )
        ),
        *(
            (
                lambda model, setting=setting, value=value: [{"params": model.parameters(), setting: value}],
                rf"^parameter group 'group0': {setting}=.* is invalid \([^\n]+\); change or remove it$",
            )
            for setting, value in (("betas", None), ("betas", (2, 2)), ("eps", "1e-8"), ("eps", -1))
        ),
    ],
)
def test_invalid_parameter_groups_are_an_error(objective_with, make, message):
    with pytest.raises(ObjectiveError, match=message):
        fit(objective_with(parameter_groups=lambda _self, model, _config: make(model)))


def test_settings_of_groups_that_pytorch_accepts_are_kept(objective_with):
    settings = {"sgd": {"momentum": 0.5, "nesterov": True}, "adamw": {"betas": [0.5, 0.9], "amsgrad": True, "own": "x"}}
    settings["adam"] = {"foreach": False, "eps": 1e-7}
    for optimizer, given in settings.items():
        run = built(
            objective_with(
                parameter_groups=lambda _, model, __, given=given: [{"params": model.parameters(), **given}]
            ),
            optimizer=optimizer,
        )
        assert {name: run.optimizer.param_groups[0][name] for name in given} == given


class Thawing(Wine):
    """The first layer is frozen until the third epoch."""

    def model(self, config, train):
        model = super().model(config, train)
        model[1][0].requires_grad_(False)
        return model

    def on_epoch(self, model, epoch, config):
        if epoch == 2:
            model[1][0].requires_grad_(True)


def test_parameters_of_integers_stay_frozen():
    class Quantized(Thawing):
        def model(self, config, train):
            model = super().model(config, train)
            model.scale = torch.nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
            return model

    config = TrainConfig(lr=0.02, batch_size=32)
    assert Trainer(Quantized(), config, epochs=1, seed=0, session=Memory()).fit().status == "completed"


def test_layers_are_unfrozen_also_in_a_resumed_run(tmp_path):
    config, firsts = TrainConfig(lr=0.02, batch_size=32), []

    class Watched(Memory):
        def save(self, state, *, best):
            firsts.append(state["model"]["1.0.weight"].clone())

    whole = Trainer(Thawing(), config, epochs=4, seed=0, session=Watched()).fit()
    assert torch.equal(firsts[0], firsts[1])
    assert not torch.equal(firsts[1], firsts[2])

    class Stopped(LocalSession):
        def report(self, record):
            return Verdict.STOP if record.epoch == 2 else Verdict.CONTINUE

    assert Trainer(Thawing(), config, epochs=4, seed=0, session=Stopped(tmp_path)).fit().status == "stopped"
    same_result(Trainer(Thawing(), config, epochs=4, seed=0, session=LocalSession(tmp_path)).fit(), whole)


class Prepared(Wine):
    """Logs each call of `prepare`; waits in the middle while a certain file exists."""

    def prepare(self, folder):
        (folder / "half").touch()
        home = folder.parents[1]
        with (home / "calls").open("a") as calls:
            calls.write(f"{os.getpid()}\n")
        while (home / "wait").exists():
            time.sleep(0.01)
        (folder / "whole").touch()


def _ask():
    assert (Prepared().prepared / "whole").exists()


def test_prepare_completes_once_per_machine_also_after_kills(tmp_path, monkeypatch):
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path))
    (tmp_path / "wait").touch()
    fork = multiprocessing.get_context("fork")
    askers = [fork.Process(target=_ask) for _ in range(3)]
    askers[0].start()
    _until(lambda: (tmp_path / "calls").exists() and (tmp_path / "calls").read_text())
    os.kill(askers[0].pid, signal.SIGKILL)
    askers[0].join()
    for asker in askers[1:]:
        asker.start()
    _until(lambda: len((tmp_path / "calls").read_text().split()) == 2)
    (tmp_path / "wait").unlink()
    for asker in askers[1:]:
        asker.join()
    assert [asker.exitcode for asker in askers] == [-signal.SIGKILL, 0, 0]
    assert (Prepared().prepared / "whole").exists()
    assert len((tmp_path / "calls").read_text().split()) == 2, "the killed one, and one for all others"


def _until(holds):
    deadline = time.monotonic() + 600
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_error_in_prepare_is_reported(objective_with, tmp_path, monkeypatch):
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path))
    objective = objective_with(prepare=lambda *_: 1 / 0)
    with pytest.raises(ObjectiveError, match=r"Changed.prepare: .*test_hooks.py:\d+: ZeroDivisionError"):
        _ = objective.prepared
