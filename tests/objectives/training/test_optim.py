from copy import deepcopy as copy_of

import pytest
import torch
from torch import nn

from objectives.training import TrainConfig
from objectives.training.optim import OPTIMIZERS, build_optimizer, parameter_groups

CPU = torch.device("cpu")


def test_biases_and_norms_are_not_decayed():
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


def test_a_layer_norm_over_images_is_told_by_its_type():
    model = nn.Sequential(nn.LayerNorm([2, 3, 3]), nn.Conv2d(2, 2, 3))
    groups = {g["name"]: [p.ndim for p in g["params"]] for g in parameter_groups(model, TrainConfig())}
    assert groups == {"decay": [4], "no_decay": [3, 3, 1]}


def test_a_shared_parameter_is_in_one_group():
    layer = nn.Linear(3, 3)
    (decay, plain) = parameter_groups(nn.Sequential(layer, nn.ReLU(), layer), TrainConfig())
    assert (len(decay["params"]), len(plain["params"])) == (1, 1)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_learns_and_its_state_makes_the_round_trip(name):
    config = TrainConfig(optimizer=name, lr=0.05, weight_decay=1e-3)

    def steps(model, optimizer, count):
        losses = []
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    x = torch.randn(32, 4)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0]])
    model = nn.Linear(4, 1)
    optimizer = build_optimizer(model, config, CPU)
    first = steps(model, optimizer, 10)
    assert first[-1] < first[0]
    copy = nn.Linear(4, 1)
    copy.load_state_dict(model.state_dict())
    resumed = build_optimizer(copy, config, CPU)
    resumed.load_state_dict(copy_of(optimizer.state_dict()))
    assert steps(copy, resumed, 5) == steps(model, optimizer, 5)


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
