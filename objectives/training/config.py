"""The configuration of one training run: typed, validated, plain."""

from __future__ import annotations

import copy
import dataclasses
import json
import numbers
import types
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Annotated, Any, Self, get_args, get_origin

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from hpsearch.former_names import current_training
from hpsearch.objectives.errors import ObjectiveError, suggest_names

# What builds them is in `hpsearch.objectives.training.optimizers`, under the same names.
BASE_OPTIMIZERS = ("sgd", "adam", "adamw", "nadam", "rmsprop", "adagrad", "lion", "lamb")
OPTIMIZERS = (*BASE_OPTIMIZERS, "muon", "lars", "ranger", "lookahead", "sam")
SCHEDULES = (
    *("constant", "cosine", "cosine_restarts", "linear", "polynomial", "exponential", "step"),
    *("one_cycle", "plateau"),
)
PRECISIONS = ("fp32", "bf16", "fp16")
WARMUPS = ("linear", "cosine")
MATMUL_PRECISIONS = ("highest", "high", "medium")
LR_SCALINGS = ("none", "linear", "sqrt")
STRATEGIES = ("ddp", "fsdp")
_UNSHARDABLE_OPTIMIZERS = ("lamb", "lars", "ranger", "lookahead", "sam")  # their kernels need weights that are whole

CHOICES = {
    "optimizer": OPTIMIZERS,
    "base_optimizer": BASE_OPTIMIZERS,
    "schedule": SCHEDULES,
    "warmup": WARMUPS,
    "precision": PRECISIONS,
    "matmul_precision": MATMUL_PRECISIONS,
    "strategy": STRATEGIES,
    "lr_scaling": LR_SCALINGS,
}


def about(text: str, **bounds: Any) -> Any:
    """What a setting does, and the bounds of its value: `gt`, `ge`, `lt`, `le`."""
    return Field(description=text, **bounds)


def one_of(names: tuple[str, ...], text: str = "") -> Any:
    """What a setting does that is a name."""
    return about(f"one of {', '.join(names)}" + (f": {text}" if text else ""))


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
class TrainConfig:
    """How one run trains. Every field has a default; a search space sets those that it searches.

    What each does is in its description, which `hpsearch objective show` prints. A value that is not valid raises an
    ObjectiveError that names the setting, the value and what it must be.
    """

    optimizer: Annotated[str, one_of(OPTIMIZERS)] = "adamw"
    base_optimizer: Annotated[str, one_of(BASE_OPTIMIZERS, "what lookahead and sam are wrapped around")] = "adamw"
    lr: Annotated[float, about("the peak learning rate", gt=0)] = 1e-3
    weight_decay: Annotated[
        float, about("decoupled if the optimizer decouples it; never on biases and norm layers", ge=0)
    ] = 0.01
    layer_decay: Annotated[float, about("rate of each layer as a share of the next layer's", gt=0, le=1)] = 1.0
    momentum: Annotated[float, about("of SGD, RMSprop, Muon and LARS", ge=0, lt=1)] = 0.9
    nesterov: Annotated[bool, about("Nesterov's momentum, of SGD and LARS")] = False
    beta1: Annotated[float, about("of the Adam family, Lion and LAMB", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, about("of the Adam family, Lion and LAMB", ge=0, lt=1)] = 0.999
    lookahead_steps: Annotated[int, about('of "lookahead": steps between two moves of its slow weights', ge=1)] = 5
    lookahead_alpha: Annotated[float, about('of "lookahead": share of the way to the fast weights', gt=0, le=1)] = 0.5
    sam_rho: Annotated[float, about("how far SAM looks for the worst loss around the weights", gt=0)] = 0.05
    batch_size: Annotated[int, about("samples in one micro-batch, over all devices together", ge=1)] = 64
    gradient_accumulation_steps: Annotated[
        int, about("micro-batches per optimizer step; the loss is the mean of all samples", ge=1)
    ] = 1
    drop_last: Annotated[bool, about("omit the short last micro-batch of an epoch, unless it is the only one")] = True
    num_workers: Annotated[
        int | None, about("loader processes; 0 loads in this one; None keeps the data on the device", ge=0)
    ] = None
    schedule: Annotated[str, one_of(SCHEDULES)] = "cosine"
    warmup: Annotated[str, one_of(WARMUPS, "the shape of the climb")] = "linear"
    warmup_fraction: Annotated[float, about("share of the optimizer steps in which the rate climbs", ge=0, lt=1)] = 0.05
    warmup_steps: Annotated[int | None, about("steps in which the rate climbs; None uses the fraction", ge=0)] = None
    min_lr_fraction: Annotated[float, about("rate at the end of a decay as a share of the peak", ge=0, le=1)] = 0.0
    decay_factor: Annotated[float, about('what "step" and "plateau" multiply the rate by', gt=0, lt=1)] = 0.1
    decay_epochs: Annotated[
        int | None, about('of "step": epochs between reductions; None is a third of the run', ge=1)
    ] = None
    plateau_patience: Annotated[int, about('of "plateau": epochs without improvement before the rate falls', ge=0)] = 3
    cycles: Annotated[int, about('of "cosine_restarts": how many', ge=1)] = 3
    power: Annotated[float, about('of "polynomial"', gt=0)] = 1.0
    clip_grad_norm: Annotated[
        float | None, about("largest norm of the gradient of one step; None does not clip", gt=0)
    ] = 1.0
    clip_grad_value: Annotated[float | None, about("largest value in the gradient; None does not clip", gt=0)] = None
    label_smoothing: Annotated[float, about("of the default loss", ge=0, lt=1)] = 0.0
    ema_decay: Annotated[
        float | None, about("decay of the evaluated moving average of weights (EMA); None for none", ge=0, lt=1)
    ] = None
    swa_fraction: Annotated[
        float | None, about("last share of epochs whose mean weights are evaluated (SWA); None for none", gt=0, le=1)
    ] = None
    patience: Annotated[
        int | None, about("epochs without improvement that end the run; None leaves it to the pruner", ge=1)
    ] = None
    precision: Annotated[str, one_of(PRECISIONS, "by autocast; fp16 with loss scaling")] = "fp32"
    matmul_precision: Annotated[str, one_of(MATMUL_PRECISIONS, "of fp32 matrix products")] = "high"
    deterministic: Annotated[bool, about("only deterministic kernels; torch raises where an operation has none")] = True
    compile: Annotated[bool, about("use torch.compile; if it fails, the run goes on without and says so")] = False
    channels_last: Annotated[bool, about("store images [n, c, h, w] channels last, which is faster on GPUs")] = False
    activation_checkpointing: Annotated[bool, about("recompute activations in backward to save memory")] = False
    eval_batch_size: Annotated[
        int | None, about("rows in a batch of an evaluation; None is four times `batch_size`", ge=1)
    ] = None
    log_every: Annotated[
        int | None, about("steps between records of loss and gradient norms after step 20; None keeps none", ge=1)
    ] = 50
    validate_every: Annotated[int | None, about("optimizer steps between validations; None is each epoch", ge=1)] = None
    strategy: Annotated[str, one_of(STRATEGIES, "how several devices train one model; one device needs none")] = "ddp"
    lr_scaling: Annotated[str, one_of(LR_SCALINGS, "factor on `lr`: number of devices, or its root")] = "none"
    cpu_offload: Annotated[bool, about('of "fsdp": keep weights, gradients and optimizer state in CPU memory')] = False
    shard_checkpoint_above_gib: Annotated[
        float, about('of "fsdp": GiB of state above which devices write checkpoints in parts', ge=0)
    ] = 4.0
    model: Annotated[
        dict[str, Any], about("hyperparameters of the model: JSON values, by names that the objective chooses")
    ] = field(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_line(cls, values: Any, validate: Callable[[Any], Self]) -> Self:
        try:
            return validate(values)
        except ValidationError as error:
            raise ObjectiveError(_complaint(error)) from None

    @field_validator("*", mode="before")
    @classmethod
    def _plain_number(cls, value: Any) -> Any:
        """Makes numpy's scalars plain."""
        if isinstance(value, (bool, int, float)) or not isinstance(value, numbers.Real):
            return value
        return int(value) if isinstance(value, numbers.Integral) else float(value)

    @field_validator("model", mode="before")
    @classmethod
    def _kept_by_json(cls, value: Any) -> Any:
        """Copies the model's settings, which are refused unless JSON keeps them as they are."""
        if not isinstance(value, Mapping):
            return value
        copied = copy.deepcopy(dict(value))
        try:
            same = json.loads(json.dumps(copied, allow_nan=False)) == copied
        except (TypeError, ValueError):
            same = False
        if not same:
            raise ObjectiveError(f"model must hold plain JSON values (numbers, words, lists, None), not {value!r}")
        return copied

    @field_validator(*CHOICES)
    @classmethod
    def _known(cls, name: str, info: ValidationInfo) -> str:
        known = CHOICES[str(info.field_name)]
        if name not in known:
            raise ObjectiveError(f"unknown {info.field_name} {name!r}: {suggest_names(name, list(known))}")
        return name

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        used = self.base_optimizer if self.optimizer in ("lookahead", "sam") else self.optimizer
        if self.nesterov and not (used in ("sgd", "lars") and self.momentum > 0):
            raise ObjectiveError("nesterov=True needs optimizer='sgd' or 'lars' and a momentum above 0")
        if self.clip_grad_value is not None and self.clip_grad_norm is not None:
            raise ObjectiveError("clip_grad_value needs clip_grad_norm=None: a gradient is clipped one way")
        if self.ema_decay is not None and self.swa_fraction is not None:
            raise ObjectiveError("ema_decay and swa_fraction exclude each other: set one of them to None")
        if self.cpu_offload and self.strategy != "fsdp":
            raise ObjectiveError(f"cpu_offload=True needs strategy='fsdp', not {self.strategy!r}")
        if self.strategy == "fsdp":
            self._check_fsdp()
        return self

    def _check_fsdp(self) -> None:
        if self.optimizer in _UNSHARDABLE_OPTIMIZERS:
            raise ObjectiveError(
                f"optimizer={self.optimizer!r} needs whole weights, and strategy='fsdp' spreads them: use 'adamw', "
                "'muon' or another, or strategy='ddp'"
            )
        if self.channels_last:
            raise ObjectiveError("channels_last=True does not go with strategy='fsdp': set it to False")
        if self.precision == "fp16":
            raise ObjectiveError("precision='fp16' does not go with strategy='fsdp': use 'bf16', or strategy='ddp'")

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The configuration that `to_dict` wrote; fields left out keep their defaults.

        Raises:
            ObjectiveError: an unknown field (with the nearest name) or a value that is not valid.
        """
        return cls(**current_training({str(name): value for name, value in values.items()}))


FIELDS: dict[str, FieldInfo] = vars(TrainConfig)["__pydantic_fields__"]

_TYPES = {float: "a number", int: "a whole number", bool: "True or False", str: "a name", dict: "a dictionary"}


def _complaint(error: ValidationError) -> str:
    """Pydantic's first complaint as a line that names the setting, what it must be and its value."""
    first = error.errors(include_url=False)[0]
    name, value, kind = str(first["loc"][0]), first["input"], first["type"]
    if name not in FIELDS:
        return f"unknown training setting {name!r}: {suggest_names(name, list(FIELDS))}"
    if kind == "finite_number":
        must = "a finite number"
    elif kind in {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}:
        must = _range(FIELDS[name])
    else:
        plain, optional = _type_of(FIELDS[name])
        must = _TYPES[plain] + (" or None" if optional else "")
    return f"{name} must be {must}, not {value!r}"


def _type_of(field: FieldInfo) -> tuple[type, bool]:
    """The plain type of a setting, and whether it may be None."""
    annotation: Any = field.annotation
    kinds = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return get_origin(kinds[0]) or kinds[0], types.NoneType in kinds


def type_name(field: FieldInfo) -> str:
    """The type of a setting for a person: `int | None`."""
    plain, optional = _type_of(field)
    return f"{plain.__name__}{' | None' if optional else ''}"


def _range(field: FieldInfo) -> str:
    """The bounds of a number: `above 0`, `at least 1`, `in [0, 1)`."""
    bounds = {name: value for item in field.metadata for name, value in dataclasses.asdict(item).items()}
    low, high = bounds.get("gt", bounds.get("ge")), bounds.get("lt", bounds.get("le"))
    if high is None:
        return f"{'above' if 'gt' in bounds else 'at least'} {low}"
    return f"in {'(' if 'gt' in bounds else '['}{low}, {high}{')' if 'lt' in bounds else ']'}"


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """How long a configuration is trained, with which seeds, and on which part of the data.

    Attributes:
        epochs: length of the run; schedules are laid out over it.
        seed: of initial weights, order and dropout.
        split_seed: of the data's split, the same for a whole study.
        division: seed by which train and validation are divided again, apart from the test split, where the data
            allow it; the run then has a score of its own, `FitResult.fresh`. None keeps the study's division.
        refit: epochs after which a run on train and validation ends; None is any other run.

    Raises:
        ObjectiveError: the numbers are out of range or contradict each other.
    """

    epochs: int
    seed: int
    split_seed: int
    division: int | None = None
    refit: int | None = None

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ObjectiveError(f"epochs must be at least 1, not {self.epochs}")
        if self.refit is not None and not 1 <= self.refit <= self.epochs:
            raise ObjectiveError(f"refit must be from 1 to the {self.epochs} epochs, not {self.refit}")
        if self.refit is not None and self.division is not None:
            raise ObjectiveError("a refit is trained on train and validation: leave the division out")

    @property
    def identity(self) -> dict[str, int]:
        """The keys of a checkpoint's identity that the plan decides."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
