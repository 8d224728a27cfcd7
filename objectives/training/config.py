"""The configuration of one training run: typed, validated, plain."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from objectives.errors import ObjectiveError, nearest
from objectives.training.optim import OPTIMIZERS
from objectives.training.schedules import SCHEDULES

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class TrainConfig:
    """How one run trains. Every field has a default; a search space sets those that it searches.

    Attributes:
        optimizer: a name in `objectives.training.optim.OPTIMIZERS`.
        lr: the peak learning rate.
        weight_decay: decoupled where the optimizer decouples it; never on biases and norm layers.
        momentum: of SGD and RMSprop.
        nesterov: Nesterov's momentum, SGD only.
        beta1, beta2: of the Adam family.
        batch_size: samples in one micro-batch.
        accumulate: micro-batches in one optimizer step; the loss is averaged over all their samples.
        drop_last: leave out the short last micro-batch of an epoch, unless it is the only one.
        schedule: a name in `objectives.training.schedules.SCHEDULES`.
        warmup_fraction: share of all optimizer steps over which the rate climbs; or `warmup_steps`, their number.
        min_lr_fraction: the rate at the end of a decaying schedule, as a share of the peak.
        clip_grad_norm: largest norm of the gradient of one step; None leaves it alone.
        label_smoothing: of the default loss.
        ema_decay: average the weights over steps with this decay, and judge the average; None does not.
        patience: epochs without improvement after which the run ends; None leaves stopping to the pruner.
        precision: "fp32", "bf16" or "fp16" (with loss scaling), by autocast.
        deterministic: only deterministic kernels; torch raises where an operation has none.
        eval_batch_size: rows in one batch of an evaluation; None is four times `batch_size`.
        model: hyperparameters of the model: JSON values, by names that the objective chooses.
    """

    optimizer: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.01
    momentum: float = 0.9
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    batch_size: int = 64
    accumulate: int = 1
    drop_last: bool = True
    schedule: str = "cosine"
    warmup_fraction: float = 0.05
    warmup_steps: int | None = None
    min_lr_fraction: float = 0.0
    clip_grad_norm: float | None = 1.0
    label_smoothing: float = 0.0
    ema_decay: float | None = None
    patience: int | None = None
    precision: str = "fp32"
    deterministic: bool = True
    eval_batch_size: int | None = None
    model: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            object.__setattr__(self, item.name, _typed(item.name, str(item.type), getattr(self, item.name)))
        self._check_names()
        self._check_ranges()

    def _check_names(self) -> None:
        for what, known in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("precision", PRECISIONS)):
            name = getattr(self, what)
            if name not in known:
                raise ObjectiveError(f"unknown {what} {name!r}: {nearest(name, list(known))}")

    def _check_ranges(self) -> None:
        for name in ("lr", "clip_grad_norm"):
            _require(self, name, lambda value: value > 0, "above 0")
        for name in ("batch_size", "accumulate", "patience", "eval_batch_size"):
            _require(self, name, lambda value: value >= 1, "at least 1")
        for name in ("weight_decay", "warmup_steps"):
            _require(self, name, lambda value: value >= 0, "at least 0")
        for name in ("momentum", "beta1", "beta2", "warmup_fraction", "label_smoothing", "ema_decay"):
            _require(self, name, lambda value: 0 <= value < 1, "in [0, 1)")
        _require(self, "min_lr_fraction", lambda value: 0 <= value <= 1, "in [0, 1]")
        if self.nesterov and not (self.optimizer == "sgd" and self.momentum > 0):
            raise ObjectiveError("nesterov=True needs optimizer='sgd' and a momentum above 0")

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The configuration that `to_dict` wrote; fields left out keep their defaults.

        Raises:
            ObjectiveError: an unknown field (with the nearest name) or a value that is not valid.
        """
        known = [item.name for item in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise ObjectiveError(f"unknown training setting {name!r}: {nearest(name, known)}")
        return cls(**values)


def _require(config: TrainConfig, name: str, holds: Any, must: str) -> None:
    value = getattr(config, name)
    if value is not None and not holds(value):
        raise ObjectiveError(f"{name} must be {must}, not {value!r}")


def _typed(name: str, annotation: str, value: Any) -> Any:
    """`value` as the field's type, with numpy's scalars made plain."""
    kind, _, optional = annotation.partition(" | ")
    if value is None and optional:
        return None
    if isinstance(value, bool) or kind == "bool":  # a bool is an int to Python
        if isinstance(value, bool) and kind == "bool":
            return value
    elif kind == "str" and isinstance(value, str):
        return value
    elif kind == "int" and isinstance(value, numbers.Integral):
        return int(value)
    elif kind == "float" and isinstance(value, numbers.Real):
        if math.isfinite(value):
            return float(value)
        raise ObjectiveError(f"{name} must be a finite number, not {value!r}")
    elif kind.startswith("dict") and isinstance(value, Mapping):
        return _plain(name, value)
    raise ObjectiveError(f"{name} must be {_article(kind)}{' or None' if optional else ''}, not {value!r}")


def _article(kind: str) -> str:
    words = {"float": "a number", "int": "a whole number", "bool": "True or False", "str": "a name"}
    return words.get(kind, "a dictionary")


def _plain(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `value`, refused unless JSON keeps it as it is."""
    copied = copy.deepcopy(dict(value))
    try:
        same = json.loads(json.dumps(copied, allow_nan=False)) == copied
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ObjectiveError(f"{name} must hold plain JSON values (numbers, words, lists, None), not {value!r}")
    return copied
