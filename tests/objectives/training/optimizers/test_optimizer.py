import sys
from copy import deepcopy as copy_of

import pytest
import torch
from torch import nn

from hpsearch import ObjectiveError, Standardize, TrainConfig
from hpsearch.objectives.training.config import BASE_OPTIMIZERS, OPTIMIZERS
from hpsearch.objectives.training.optimizers.optimizer import (
    FACTORIES,
    SAM,
    build_optimizer,
    parameter_groups,
)
from hpsearch.objectives.training.reproducibility import checkpoint

CPU = torch.device("cpu")


def test_biases_and_norms_have_no_weight_decay():
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.GroupNorm(2, 4), nn.Linear(4, 2)), attention
    )
    frozen = nn.Linear(2, 2)
    frozen.requires_grad_(False)
    model.append(frozen)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {g["name"]: {names[id(p)] for p in g["params"]} for g in parameter_groups(model, TrainConfig())}
    assert groups["decay"] == {
        "0.weight",
        "2.1.weight",
        "3.self_attn.in_proj_weight",
        "3.self_attn.out_proj.weight",
        "3.linear1.weight",
        "3.linear2.weight",
    }
    trained = {name for name in names.values() if not name.startswith("4.")}
    assert groups["no_decay"] == trained - groups["decay"]


def test_a_layer_norm_over_images_is_recognized_by_its_type():
    model = nn.Sequential(nn.LayerNorm([2, 3, 3]), nn.Conv2d(2, 2, 3))
    groups = {g["name"]: [p.ndim for p in g["params"]] for g in parameter_groups(model, TrainConfig())}
    assert groups == {"decay": [4], "no_decay": [3, 3, 1]}


def test_a_shared_parameter_is_in_one_group():
    """A layer that is used twice, and a weight in two layers, like a decoder that is tied to its embedding."""
    layer = nn.Linear(3, 3)
    (decay, plain) = parameter_groups(nn.Sequential(layer, nn.ReLU(), layer), TrainConfig())
    assert (len(decay["params"]), len(plain["params"])) == (1, 1)
    tied = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    tied[1].weight = tied[0].weight
    (decay, plain) = parameter_groups(tied, TrainConfig())
    assert (len(decay["params"]), len(plain["params"])) == (1, 1)


def _steps(model, optimizer, x, y, count):
    """Return the losses of steps like those of the training loop, with two passes for SAM."""
    sharpness = SAM(optimizer) if hasattr(optimizer, "first_step") else None
    losses = []

    def gradient():
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss.item()

    for _ in range(count):
        optimizer.zero_grad(set_to_none=True)
        losses.append(gradient())
        if sharpness is None:
            optimizer.step()
        else:
            with sharpness.perturbed_weights(model):
                gradient()
            sharpness.base.step()
    return losses


def _task():
    torch.manual_seed(0)
    x = torch.randn(32, 4)
    return x, (x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0]])).tanh()


def _net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def test_the_names_are_those_that_can_be_built():
    assert set(FACTORIES) == set(OPTIMIZERS)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("taken", [3, 7])  # within and past the first update of the slow weights
def test_every_optimizer_learns_and_resumes_exactly_from_a_checkpoint(name, taken, tmp_path):
    lr = 1.0 if name == "lars" else 0.01
    config = TrainConfig(optimizer=name, lr=lr, weight_decay=1e-3, layer_decay=0.9)
    x, y = _task()
    model = _net()
    optimizer = build_optimizer(model, config, CPU)
    first = _steps(model, optimizer, x, y, taken)
    checkpoint.write(tmp_path / "a.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    rest = _steps(model, optimizer, x, y, 40)
    assert rest[-1] < 0.9 * first[0]
    kept = checkpoint.read(tmp_path / "a.pt")
    again = _net()
    again.load_state_dict(kept["model"])
    resumed = build_optimizer(again, config, CPU)
    resumed.load_state_dict(kept["optimizer"])
    assert _steps(again, resumed, x, y, 40) == rest


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_the_first_steps_of_every_optimizer_lower_the_loss(name):
    x, y = _task()
    model = _net()
    optimizer = build_optimizer(model, TrainConfig(optimizer=name, lr=0.01 if name == "lars" else 1e-3), CPU)
    losses = _steps(model, optimizer, x, y, 5)
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_optimizers_with_fused_kernels_train_complex_parameters(name):
    """The spectral weights of a Fourier neural operator are complex; the fused kernels reject them."""

    class Spectral(nn.Linear):
        def forward(self, x):
            return super().forward(x.to(torch.complex64)).real

    x, y = _task()
    torch.manual_seed(0)
    model = Spectral(4, 1, dtype=torch.complex64)
    losses = _steps(model, build_optimizer(model, TrainConfig(optimizer=name, lr=0.01), CPU), x, y, 40)
    assert losses[-1] < losses[0]
    with pytest.raises(ObjectiveError, match="muon does not support complex parameters; use another optimizer"):
        build_optimizer(model, TrainConfig(optimizer="muon"), CPU)


@pytest.mark.parametrize("base", sorted(BASE_OPTIMIZERS))
@pytest.mark.parametrize("name", ["sam", "lookahead"])
def test_optimizer_wrappers_use_the_named_base_optimizer(name, base):
    model = nn.Linear(2, 2)
    config = TrainConfig(optimizer=name, base_optimizer=base, lr=0.5, sam_rho=0.2, lookahead_alpha=0.3)
    optimizer = build_optimizer(model, config, CPU)
    inner = optimizer.base_optimizer if name == "sam" else optimizer.optimizer
    assert type(inner) is type(build_optimizer(model, TrainConfig(optimizer=base), CPU))
    assert [(group["lr"], group["weight_decay"]) for group in inner.param_groups] == [(0.5, 0.01), (0.5, 0.0)]
    if name == "sam":
        assert {group["rho"] for group in optimizer.param_groups} == {0.2}
    else:
        assert optimizer.alpha == 0.3


def test_sam_takes_the_gradient_at_perturbed_weights_and_restores_them():
    """One step by hand: w -> w + rho g / |g|, the gradient there, a step of SGD from w."""
    x, y = _task()
    model = nn.Linear(4, 1)
    config = TrainConfig(optimizer="sam", base_optimizer="sgd", momentum=0.0, weight_decay=0.0, lr=0.1, sam_rho=0.5)
    start = copy_of(model)

    def gradient(module):
        module.zero_grad()
        (module(x) - y).square().mean().backward()
        return [p.grad.clone() for p in module.parameters()]

    first = gradient(start)
    norm = torch.stack([g.square().sum() for g in first]).sum().sqrt()
    uphill = copy_of(start)
    with torch.no_grad():
        for p, g in zip(uphill.parameters(), first, strict=True):
            p.add_(0.5 * g / norm)
    second = gradient(uphill)
    _steps(model, build_optimizer(model, config, CPU), x, y, 1)
    for p, q, g in zip(model.parameters(), start.parameters(), second, strict=True):
        torch.testing.assert_close(p, q - 0.1 * g)


def test_muon_optimizes_only_hidden_matrices():
    model = nn.Sequential(
        nn.Embedding(9, 4), nn.Linear(4, 6), nn.LayerNorm([6, 6]), nn.Conv1d(6, 6, 3), nn.Linear(6, 2)
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, TrainConfig(optimizer="muon", weight_decay=0.3))
    assert {g["name"]: {names[id(p)] for p in g["params"]} for g in groups} == {
        "muon": {"1.weight", "3.weight"},
        "decay": {"0.weight", "4.weight"},
        "no_decay": {"1.bias", "2.weight", "2.bias", "3.bias", "4.bias"},
    }
    assert [g["weight_decay"] for g in groups] == [0.3, 0.3, 0.0]


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.norm = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), nn.LayerNorm(4)


class _Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 4))
        self.embed = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.head = nn.Linear(4, 2)


def test_layer_decay_lowers_the_rate_of_early_layers():
    """By depth: a block is one layer however many parameters it has, and a norm belongs to the layer before it."""
    model = nn.Sequential(Standardize(torch.zeros(3), torch.ones(3)), _Encoder())
    config = TrainConfig(lr=1.0, layer_decay=0.5, weight_decay=0.1)
    rates = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, config)
    for group in groups:
        for parameter in group["params"]:
            rates[names[id(parameter)].removeprefix("1.")] = group["lr"]
    assert rates == {
        "token": 0.125,
        "embed.weight": 0.125,
        "embed.bias": 0.125,
        "norm.weight": 0.125,
        "norm.bias": 0.125,
        **{name: 0.25 for name in rates if name.startswith("blocks.0")},
        **{name: 0.5 for name in rates if name.startswith("blocks.1")},
        "head.weight": 1.0,
        "head.bias": 1.0,
    }
    assert len([name for name in rates if name.startswith("blocks.0")]) == 6
    assert [g["name"] for g in groups][-2:] == ["decay/3", "no_decay/3"]
    assert {g["lr"] for g in build_optimizer(model, config, CPU).param_groups} == {0.125, 0.25, 0.5, 1.0}


def test_a_missing_optimizer_package_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ObjectiveError, match="needs pytorch-optimizer; run pip install pytorch-optimizer"):
        build_optimizer(nn.Linear(2, 2), TrainConfig(optimizer="lion"), CPU)
    build_optimizer(nn.Linear(2, 2), TrainConfig(optimizer="adamw"), CPU)


def test_the_settings_reach_the_optimizer():
    model = nn.Linear(2, 2)
    sgd = build_optimizer(
        model, TrainConfig(optimizer="sgd", lr=0.5, momentum=0.7, nesterov=True, weight_decay=0.1), CPU
    )
    assert [(g["lr"], g["momentum"], g["nesterov"], g["weight_decay"]) for g in sgd.param_groups] == [
        (0.5, 0.7, True, 0.1),
        (0.5, 0.7, True, 0.0),
    ]
    adamw = build_optimizer(model, TrainConfig(beta1=0.8, beta2=0.9), CPU)
    assert adamw.param_groups[0]["betas"] == (0.8, 0.9)


NAMED = {
    "sgd": "torch.SGD",
    "adam": "torch.Adam",
    "adamw": "torch.AdamW",
    "nadam": "torch.NAdam",
    "rmsprop": "torch.RMSprop",
    "adagrad": "torch.Adagrad",
    "muon": "pytorch_optimizer.Muon",
    "lion": "pytorch_optimizer.Lion",
    "lamb": "pytorch_optimizer.Lamb",
    "lars": "pytorch_optimizer.LARS",
    "ranger": "pytorch_optimizer.Ranger",
    "lookahead": "pytorch_optimizer.Lookahead",
    "sam": "pytorch_optimizer.SAM",
}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_each_name_builds_the_optimizer_of_that_name(name):
    kind = type(build_optimizer(_net(), TrainConfig(optimizer=name), CPU))
    assert f"{kind.__module__.partition('.')[0]}.{kind.__name__}" == NAMED[name]


@pytest.mark.parametrize(
    ("names", "setting", "expected"),
    [
        ("sgd rmsprop lars", {"momentum": 0.7}, {"momentum": 0.7}),
        ("adam adamw nadam lion lamb ranger", {"beta1": 0.8, "beta2": 0.95}, {"betas": (0.8, 0.95)}),
        ("sgd lars", {"nesterov": True}, {"nesterov": True}),
        (" ".join(sorted(set(OPTIMIZERS))), {"weight_decay": 0.3, "lr": 0.02}, {"weight_decay": 0.3, "lr": 0.02}),
    ],
)
def test_the_settings_reach_every_optimizer_that_has_them(names, setting, expected):
    for name in names.split():
        group = build_optimizer(_net(), TrainConfig(optimizer=name, **setting), CPU).param_groups[0]
        assert {key: group[key] for key in expected} == expected, name


def test_muon_passes_its_settings_to_both_of_its_parts():
    config = TrainConfig(optimizer="muon", momentum=0.7, beta1=0.8, beta2=0.95, lr=0.02)
    groups = {group["name"]: group for group in build_optimizer(_net(), config, CPU).param_groups}
    assert (groups["muon"]["use_muon"], groups["muon"]["momentum"]) == (True, 0.7)
    assert (groups["decay"]["use_muon"], groups["decay"]["betas"]) == (False, (0.8, 0.95))
    assert {group["lr"] for group in groups.values()} == {0.02}


def test_lookahead_synchronizes_every_k_steps():
    config = TrainConfig(optimizer="lookahead", base_optimizer="sgd", lookahead_steps=3, lookahead_alpha=0.25, lr=0.1)
    fast = TrainConfig(optimizer="sgd", lr=0.1)
    x, y = _task()
    models = [_net(), _net()]
    optimizers = [build_optimizer(model, each, CPU) for model, each in zip(models, (config, fast), strict=True)]
    start = [p.detach().clone() for p in models[0].parameters()]
    for model, optimizer in zip(models, optimizers, strict=True):
        _steps(model, optimizer, x, y, 3)
    for slow, quick, first in zip(models[0].parameters(), models[1].parameters(), start, strict=True):
        torch.testing.assert_close(slow, first + 0.25 * (quick - first))


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("sgd", "fused"),
        ("adam", "fused"),
        ("adamw", "fused"),
        ("nadam", "foreach"),
        ("rmsprop", "foreach"),
        ("adagrad", "foreach"),
    ],
)
def test_optimizers_of_torch_use_fused_or_foreach_kernels(name, kernel):
    optimizer = build_optimizer(_net(), TrainConfig(optimizer=name), CPU)
    assert {group[kernel] for group in optimizer.param_groups} == {True}
