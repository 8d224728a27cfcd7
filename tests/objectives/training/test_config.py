import dataclasses
import json
from typing import Annotated

import numpy as np
import pydantic.dataclasses
import pytest
from pydantic import Field

from hpsearch import ObjectiveError, TrainConfig
from hpsearch.objectives.training import config as config_module
from hpsearch.objectives.training.reports import report


def test_a_round_trip_through_json_keeps_every_field():
    config = TrainConfig(
        optimizer="sgd",
        nesterov=True,
        lr=0.3,
        warmup_steps=7,
        clip_grad_norm=None,
        ema_decay=0.99,
        patience=3,
        precision="bf16",
        model={"widths": [8, 16], "kind": "mlp", "bias": None},
    )
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert set(config.to_dict()) == {field.name for field in dataclasses.fields(TrainConfig)}


def test_numbers_become_plain_python_numbers():
    config = TrainConfig(lr=np.float32(0.5), batch_size=np.int64(8), weight_decay=0)
    assert (type(config.lr), type(config.batch_size), type(config.weight_decay)) == (float, int, float)
    values = {
        "rate": np.float64(0.1),
        "kind": np.str_("a"),
        "width": np.int64(8),
        "bias": np.bool_(1),
        "drop": np.float32(0.5),
        "long": np.longdouble(0.5),
    }
    model = TrainConfig(model={**values, "rates": [np.float64(0.2)]}).model
    types = {"rate": float, "kind": str, "width": int, "bias": bool, "drop": float, "long": float, "rates": list}
    assert {name: type(value) for name, value in model.items()} == types
    assert type(model["rates"][0]) is float


def test_the_model_settings_are_a_copy():
    settings = {"widths": [8]}
    config = TrainConfig(model=settings)
    settings["widths"].append(16)
    assert config.model == {"widths": [8]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": "adam_w"}, "unknown optimizer 'adam_w'; did you mean 'adamw' or 'adam'"),
        ({"schedule": "cosin"}, "unknown schedule 'cosin'; did you mean 'cosine'?"),
        ({"precision": "fp8"}, "unknown precision 'fp8'"),
        ({"lr": 0}, "lr must be above 0, not 0$"),
        ({"lr": float("nan")}, "lr must be a finite number, not nan"),
        ({"lr": "0.1"}, "lr must be a number, not '0.1'"),
        ({"lr": None}, "lr must be a number, not None"),
        ({"lr": True}, "lr must be a number, not True"),
        ({"batch_size": 0}, r"batch_size must be in \[1, 2147483647\], not 0"),
        ({"batch_size": 2.5}, "batch_size must be an integer, not 2.5"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1"),
        ({"accumulate": 2}, "unknown training setting 'accumulate'; it is now 'gradient_accumulation_steps'"),
        ({"shard_above": 1.0}, "unknown training setting 'shard_above'; it is now 'shard_checkpoint_above_gib'"),
        ({"patience": 0}, "patience must be at least 1, not 0"),
        ({"patience": 1.5}, "patience must be an integer or None, not 1.5"),
        ({"weight_decay": -1}, "weight_decay must be at least 0"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"warmup_fraction": 1.0}, "warmup_fraction must be in"),
        ({"min_lr_fraction": 1.1}, "min_lr_fraction must be in"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm must be above 0"),
        ({"deterministic": 1}, "deterministic must be True or False, not 1"),
        ({"nesterov": True}, "nesterov=True needs optimizer='sgd'"),
        ({"optimizer": "sam", "nesterov": True}, "nesterov=True needs"),
        ({"base_optimizer": "adamww"}, "unknown base_optimizer 'adamww'; did you mean 'adamw'"),
        ({"warmup": "cosin"}, "unknown warmup 'cosin'; did you mean 'cosine'?"),
        ({"matmul_precision": "hihg"}, "unknown matmul_precision 'hihg'; did you mean"),
        ({"clip_grad_value": 1.0}, "clip_grad_value cannot be combined with clip_grad_norm"),
        ({"ema_decay": 0.9, "swa_fraction": 0.5}, "ema_decay and swa_fraction cannot be combined"),
        ({"swa_fraction": 0.0}, r"swa_fraction must be in \(0, 1\], not 0.0"),
        ({"layer_decay": 0.0}, r"layer_decay must be in \(0, 1\], not 0.0"),
        ({"decay_factor": 1.0}, r"decay_factor must be in \(0, 1\), not 1.0"),
        ({"num_workers": -1}, r"num_workers must be in \[0, 1024\], not -1"),
        ({"cycles": 0}, "cycles must be at least 1, not 0"),
        ({"log_every": 0}, "log_every must be at least 1, not 0"),
        ({"sam_rho": 0.0}, "sam_rho must be above 0, not 0.0"),
        ({"model": {"width": object()}}, "model must be a dictionary of JSON values"),
        ({"model": {"width": float("inf")}}, "model must be a dictionary of JSON values"),
        ({"model": {1: 2}}, "model must be a dictionary of JSON values"),
        ({"model": [1]}, "model must be a dictionary"),
    ],
)
def test_a_bad_value_is_rejected_in_one_line(values, message):
    with pytest.raises(ObjectiveError, match=message) as caught:
        TrainConfig(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("made", [TrainConfig.from_dict, lambda values: TrainConfig(**values)])
def test_an_unknown_setting_is_rejected_with_the_nearest_name(made):
    with pytest.raises(ObjectiveError, match="unknown training setting 'batchsize'; did you mean 'batch_size'"):
        made({"batchsize": 8})


def test_former_names_of_stored_settings_are_read():
    named = TrainConfig(gradient_accumulation_steps=3, shard_checkpoint_above_gib=1.0)
    assert TrainConfig.from_dict({"accumulate": 3, "shard_above": 1.0}) == named
    with pytest.raises(ObjectiveError, match="unknown training setting 'accumulate'"):
        TrainConfig.from_dict({**named.to_dict(), "accumulate": 3})


def test_replacing_a_setting_validates_a_copy():
    config = TrainConfig(lr=0.3)
    assert dataclasses.replace(config, patience=4) == TrainConfig(lr=0.3, patience=4)
    with pytest.raises(ObjectiveError, match="lr must be above 0, not -1"):
        dataclasses.replace(config, lr=-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lr = 0.1


def test_a_custom_setting_is_validated_and_described(monkeypatch):
    """One definition has type, range, default and description. Messages and `objective show` use it."""

    @pydantic.dataclasses.dataclass(frozen=True)
    class More(TrainConfig):
        sparkle: Annotated[float | None, Field(ge=0, lt=1, description="how much it glitters")] = None

    monkeypatch.setattr(config_module, "FIELDS", vars(More)["__pydantic_fields__"])
    monkeypatch.setattr(report, "FIELDS", vars(More)["__pydantic_fields__"])
    with pytest.raises(ObjectiveError, match=r"^sparkle must be in \[0, 1\), not 1$"):
        More(sparkle=1)
    with pytest.raises(ObjectiveError, match=r"^sparkle must be a number or None, not 'much'$"):
        More(sparkle="much")
    shown = report.list_settings(More(sparkle=0.5))[-1]
    assert shown == ("sparkle", "float | None", 0.5, "how much it glitters")
    assert all(setting.help for setting in report.list_settings(More()))
