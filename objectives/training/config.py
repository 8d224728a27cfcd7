"""The configuration of one training run: typed, validated, plain."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from objectives.errors import ObjectiveError, nearest

# What builds them is in `objectives.training.optimizers`, under the same names.
BASES = ("sgd", "adam", "adamw", "nadam", "rmsprop", "adagrad", "lion", "lamb")
OPTIMIZERS = (*BASES, "muon", "lars", "ranger", "lookahead", "sam")
SCHEDULES = (
    *("constant", "cosine", "cosine_restarts", "linear", "polynomial", "exponential", "step"),
    *("one_cycle", "plateau"),
)
PRECISIONS = ("fp32", "bf16", "fp16")
WARMUPS = ("linear", "cosine")
MATMUL_PRECISIONS = ("highest", "high", "medium")


@dataclass(frozen=True)
class TrainConfig:
    """How one run trains. Every field has a default; a search space sets those that it searches.

    Attributes:
        optimizer: a name in `OPTIMIZERS`.
        base_optimizer: what "lookahead" and "sam" are wrapped around.
        lr: the peak learning rate.
        weight_decay: decoupled where the optimizer decouples it; never on biases and norm layers.
        layer_decay: each layer below the last learns this much slower than the one above it; 1 is no difference.
        momentum: of SGD, RMSprop, Muon and LARS.
        nesterov: Nesterov's momentum, of SGD and LARS.
        beta1, beta2: of the Adam family, Lion and LAMB.
        lookahead_steps: of "lookahead": steps between two moves of its slow weights.
        lookahead_alpha: of "lookahead": what share of the way to the fast weights they move.
        sam_rho: how far SAM looks for the worst loss around the weights.
        batch_size: samples in one micro-batch.
        accumulate: micro-batches in one optimizer step; the loss is averaged over all their samples.
        drop_last: leave out the short last micro-batch of an epoch, unless it is the only one.
        num_workers: processes that load and augment batches; 0 loads in this one; None keeps the data on the device.
        schedule: a name in `SCHEDULES`.
        warmup: "linear" or "cosine", the shape of the climb.
        warmup_fraction: share of all optimizer steps over which the rate climbs.
        warmup_steps: their number, in place of the share; None goes by the share.
        min_lr_fraction: the rate at the end of a decaying schedule, as a share of the peak.
        decay_factor: what "step" and "plateau" multiply the rate by.
        decay_epochs: of "step": epochs between two falls; None is a third of the run.
        plateau_patience: of "plateau": epochs without improvement before the rate falls.
        cycles: of "cosine_restarts": how many.
        power: of "polynomial".
        clip_grad_norm: largest norm of the gradient of one step; None leaves it alone.
        clip_grad_value: largest value in the gradient; None leaves it alone.
        label_smoothing: of the default loss.
        ema_decay: average the weights over steps with this decay, and judge the average; None does not.
        swa_fraction: average the weights at the ends of the last epochs, this share of the run, evenly, and judge the
            average (SWA); None does not.
        patience: epochs without improvement after which the run ends; None leaves stopping to the pruner.
        precision: "fp32", "bf16" or "fp16" (with loss scaling), by autocast.
        matmul_precision: of fp32 matrix products: "highest", or "high" or "medium" where the device is faster so.
        deterministic: only deterministic kernels; torch raises where an operation has none.
        compile: compile the model by torch.compile; where that fails the run goes on without, and says so.
        channels_last: keep images [n, c, h, w] channels last in memory, which convolutions on GPUs prefer.
        activation_checkpointing: recompute the layers' activations in the backward pass: less memory, more time.
        eval_batch_size: rows in one batch of an evaluation; None is four times `batch_size`.
        log_every: optimizer steps between two records of loss and gradient norms by layer; None keeps none.
        validate_every: optimizer steps between two validations within an epoch, for large data; None is each epoch.
        model: hyperparameters of the model: JSON values, by names that the objective chooses.
    """

    optimizer: str = "adamw"
    base_optimizer: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.01
    layer_decay: float = 1.0
    momentum: float = 0.9
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    lookahead_steps: int = 5
    lookahead_alpha: float = 0.5
    sam_rho: float = 0.05
    batch_size: int = 64
    accumulate: int = 1
    drop_last: bool = True
    num_workers: int | None = None
    schedule: str = "cosine"
    warmup: str = "linear"
    warmup_fraction: float = 0.05
    warmup_steps: int | None = None
    min_lr_fraction: float = 0.0
    decay_factor: float = 0.1
    decay_epochs: int | None = None
    plateau_patience: int = 3
    cycles: int = 3
    power: float = 1.0
    clip_grad_norm: float | None = 1.0
    clip_grad_value: float | None = None
    label_smoothing: float = 0.0
    ema_decay: float | None = None
    swa_fraction: float | None = None
    patience: int | None = None
    precision: str = "fp32"
    matmul_precision: str = "high"
    deterministic: bool = True
    compile: bool = False
    channels_last: bool = False
    activation_checkpointing: bool = False
    eval_batch_size: int | None = None
    log_every: int | None = 50
    validate_every: int | None = None
    model: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            object.__setattr__(self, item.name, _typed(item.name, str(item.type), getattr(self, item.name)))
        self._check_names()
        self._check_ranges()
        self._check_pairs()

    def _check_names(self) -> None:
        for what, known in NAMES.items():
            name = getattr(self, what)
            if name not in known:
                raise ObjectiveError(f"unknown {what} {name!r}: {nearest(name, list(known))}")

    def _check_ranges(self) -> None:
        for must, (holds, names) in _RANGES.items():
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not holds(value):
                    raise ObjectiveError(f"{name} must be {must}, not {value!r}")

    def _check_pairs(self) -> None:
        takers = ("sgd", "lars")
        used = self.base_optimizer if self.optimizer in ("lookahead", "sam") else self.optimizer
        if self.nesterov and not (used in takers and self.momentum > 0):
            raise ObjectiveError("nesterov=True needs optimizer='sgd' or 'lars' and a momentum above 0")
        if self.clip_grad_value is not None and self.clip_grad_norm is not None:
            raise ObjectiveError("clip_grad_value needs clip_grad_norm=None: a gradient is clipped one way")
        if self.ema_decay is not None and self.swa_fraction is not None:
            raise ObjectiveError("ema_decay and swa_fraction exclude each other: set one of them to None")

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


NAMES = {
    "optimizer": OPTIMIZERS,
    "base_optimizer": BASES,
    "schedule": SCHEDULES,
    "warmup": WARMUPS,
    "precision": PRECISIONS,
    "matmul_precision": MATMUL_PRECISIONS,
}
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "above 0": (lambda value: value > 0, "lr sam_rho power clip_grad_norm clip_grad_value"),
    "at least 0": (lambda value: value >= 0, "weight_decay warmup_steps num_workers plateau_patience"),
    "at least 1": (
        lambda value: value >= 1,
        "batch_size accumulate patience eval_batch_size lookahead_steps decay_epochs cycles log_every validate_every",
    ),
    "in [0, 1)": (lambda value: 0 <= value < 1, "momentum beta1 beta2 warmup_fraction label_smoothing ema_decay"),
    "in (0, 1)": (lambda value: 0 < value < 1, "decay_factor"),
    "in (0, 1]": (lambda value: 0 < value <= 1, "layer_decay lookahead_alpha swa_fraction"),
    "in [0, 1]": (lambda value: 0 <= value <= 1, "min_lr_fraction"),
}


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
