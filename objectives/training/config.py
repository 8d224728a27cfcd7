"""The configuration of a training run: typed and validated plain values."""

from __future__ import annotations

import dataclasses
import json
import numbers
import reprlib
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self, get_args, get_origin

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from hpsearch.former_names import translate_training_config
from hpsearch.objectives.errors import ObjectiveError, suggest_names
from hpsearch.objectives.training.strategies.strategy_settings import check_strategy_settings

# `hpsearch.objectives.training.optimizers` builds them by these names.
BASE_OPTIMIZERS = ("sgd", "adam", "adamw", "nadam", "rmsprop", "adagrad", "lion", "lamb")
OPTIMIZERS = (*BASE_OPTIMIZERS, "muon", "lars", "ranger", "lookahead", "sam")
SCHEDULES = (
    *("constant", "cosine", "cosine_restarts", "linear", "polynomial", "exponential", "step"),
    *("one_cycle", "plateau"),
)
PRECISIONS = ("fp32", "bf16", "fp16")
WARMUPS = ("linear", "cosine")
MATMUL_PRECISIONS = ("highest", "high", "medium")
MAX_BATCH_SIZE = 2**31 - 1
_MAX_LOADERS = 1024  # a mistyped number could stop the machine
LR_SCALINGS = ("none", "linear", "sqrt")
STRATEGIES = ("ddp", "fsdp")

CHOICES_BY_SETTING = {
    "optimizer": OPTIMIZERS,
    "base_optimizer": BASE_OPTIMIZERS,
    "schedule": SCHEDULES,
    "warmup": WARMUPS,
    "precision": PRECISIONS,
    "matmul_precision": MATMUL_PRECISIONS,
    "strategy": STRATEGIES,
    "lr_scaling": LR_SCALINGS,
}


def field(text: str, **bounds: Any) -> Any:
    """Return the pydantic field of a setting with a description, and bounds of its value: `gt`, `ge`, `lt`, `le`."""
    return Field(description=text, **bounds)


def choice(names: tuple[str, ...], text: str = "") -> Any:
    """Return the pydantic field of a setting whose value is one of `names`."""
    return field(f"one of {', '.join(names)}" + (f": {text}" if text else ""))


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
class TrainConfig:
    """The settings of a training run. Every field has a default, and a search space sets the fields that it searches.

    `hpsearch objective show` prints the descriptions of the fields.

    Raises:
        ObjectiveError: a value is invalid; the message has the setting, the value and the valid values.
    """

    optimizer: Annotated[str, choice(OPTIMIZERS)] = "adamw"
    base_optimizer: Annotated[str, choice(BASE_OPTIMIZERS, "optimizer that lookahead and sam wrap")] = "adamw"
    lr: Annotated[float, field("peak learning rate", gt=0)] = 1e-3
    weight_decay: Annotated[float, field("weight decay, decoupled if possible; not for biases and norms", ge=0)] = 0.01
    layer_decay: Annotated[float, field("learning rate of each layer, relative to the next layer's", gt=0, le=1)] = 1.0
    momentum: Annotated[float, field("momentum of SGD, RMSprop, Muon and LARS", ge=0, lt=1)] = 0.9
    nesterov: Annotated[bool, field("Nesterov momentum of SGD and LARS")] = False
    beta1: Annotated[float, field("first beta of the Adam family, Lion and LAMB", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, field("second beta of the Adam family, Lion and LAMB", ge=0, lt=1)] = 0.999
    lookahead_steps: Annotated[int, field('with "lookahead": steps between updates of the slow weights', ge=1)] = 5
    lookahead_alpha: Annotated[float, field('with "lookahead": step size of the slow weights', gt=0, le=1)] = 0.5
    sam_rho: Annotated[float, field("radius of the neighborhood in which SAM maximizes the loss", gt=0)] = 0.05
    batch_size: Annotated[int, field("samples per micro-batch, summed over all devices", ge=1, le=MAX_BATCH_SIZE)] = 64
    gradient_accumulation_steps: Annotated[
        int, field("micro-batches per optimizer step; the loss is the mean over all samples", ge=1)
    ] = 1
    drop_last: Annotated[bool, field("omit the short last micro-batch of an epoch, unless it is the only one")] = True
    num_workers: Annotated[
        int | None,
        field(
            "loader processes per device; 0 loads in the training process; None keeps the data on the device",
            ge=0,
            le=_MAX_LOADERS,
        ),
    ] = None
    schedule: Annotated[str, choice(SCHEDULES)] = "cosine"
    warmup: Annotated[str, choice(WARMUPS, "shape of the warm-up")] = "linear"
    warmup_fraction: Annotated[float, field("warm-up as a share of all optimizer steps", ge=0, lt=1)] = 0.05
    warmup_steps: Annotated[int | None, field("warm-up in optimizer steps; None uses `warmup_fraction`", ge=0)] = None
    min_lr_fraction: Annotated[float, field("final learning rate of a decay, relative to the peak", ge=0, le=1)] = 0.0
    decay_factor: Annotated[
        float, field('factor of each reduction of the learning rate by "step" and "plateau"', gt=0, lt=1)
    ] = 0.1
    decay_epochs: Annotated[int | None, field('with "step": epochs per reduction; None is 1/3 of the run', ge=1)] = None
    plateau_patience: Annotated[int, field('with "plateau": epochs without improvement before a reduction', ge=0)] = 3
    cycles: Annotated[int, field('with "cosine_restarts": number of cycles', ge=1)] = 3
    power: Annotated[float, field('with "polynomial": exponent of the decay', gt=0)] = 1.0
    clip_grad_norm: Annotated[float | None, field("maximum gradient norm of a step; None does not clip", gt=0)] = 1.0
    clip_grad_value: Annotated[float | None, field("maximum absolute gradient value; None does not clip", gt=0)] = None
    label_smoothing: Annotated[float, field("label smoothing of the default loss", ge=0, lt=1)] = 0.0
    ema_decay: Annotated[float | None, field("decay of the evaluated weight average (EMA), or None", ge=0, lt=1)] = None
    swa_fraction: Annotated[float | None, field("share of last epochs to average (SWA), or None", gt=0, le=1)] = None
    patience: Annotated[int | None, field("early stopping: maximum epochs without improvement, or None", ge=1)] = None
    precision: Annotated[str, choice(PRECISIONS, "autocast type; fp16 uses loss scaling")] = "fp32"
    matmul_precision: Annotated[str, choice(MATMUL_PRECISIONS, "precision of fp32 matrix products")] = "high"
    deterministic: Annotated[bool, field("use deterministic kernels only; an operation without one fails")] = True
    compile: Annotated[bool, field("use torch.compile; if it fails, log the reason and continue without it")] = False
    vectorize_folds: Annotated[
        bool, field("train the folds of a trial as one vectorized model if it is equal and faster; else in turns")
    ] = True
    channels_last: Annotated[bool, field("use channels-last memory format for [n, c, h, w], faster on GPUs")] = False
    activation_checkpointing: Annotated[bool, field("recompute activations in backward passes to save memory")] = False
    eval_batch_size: Annotated[
        int | None, field("samples per evaluation batch; None is 4 * `batch_size`", ge=1, le=MAX_BATCH_SIZE)
    ] = None
    log_every: Annotated[
        int | None, field("steps between records of loss and gradient norms after step 20; None for no records", ge=1)
    ] = 50
    validate_every: Annotated[int | None, field("steps between validations in an epoch; None for none", ge=1)] = None
    strategy: Annotated[str, choice(STRATEGIES, "distribution of a model over several devices")] = "ddp"
    find_unused_parameters: Annotated[
        bool | None,
        field('with "ddp": search each step for parameters without gradient; None decides by the first micro-batch'),
    ] = None
    static_graph: Annotated[
        bool,
        field(
            'with "ddp": all steps use the same parameters, so that DDP searches only the first step for unused ones'
        ),
    ] = False
    bucket_cap_mb: Annotated[
        int | None, field('with "ddp": MiB of gradients per reduction; None is the default of PyTorch', ge=1)
    ] = None
    lr_scaling: Annotated[str, choice(LR_SCALINGS, "scaling of `lr` by the number of devices")] = "none"
    cpu_offload: Annotated[bool, field('with "fsdp": keep weights, gradients and optimizer state on the CPU')] = False
    reshard_after_forward: Annotated[
        bool, field('with "fsdp": free unsharded weights after the forward pass; False saves time, not memory')
    ] = True
    shard_mesh_size: Annotated[
        int | None,
        field(
            'with "fsdp": number of devices that share one copy of the weights (HSDP); None shares it among all', ge=2
        ),
    ] = None
    sync_each_micro_batch: Annotated[
        bool, field('with "fsdp": reduce gradients after each micro-batch; slower, but needs less memory')
    ] = False
    shard_checkpoint_above_gib: Annotated[
        float, field('with "fsdp": GiB of state above which checkpoints are sharded', ge=0)
    ] = 4.0
    model: Annotated[
        dict[str, Any], field("hyperparameters that the objective passes to its model: a dictionary of JSON values")
    ] = dataclasses.field(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _raise_one_line_errors(cls, values: Any, validate: Callable[[Any], Self]) -> Self:
        try:
            return validate(values)
        except ValidationError as error:
            raise ObjectiveError(_format_error(error)) from None

    @field_validator("*", mode="before")
    @classmethod
    def _convert_numpy_scalar(cls, value: Any) -> Any:
        """Convert NumPy scalars to Python numbers."""
        if isinstance(value, (bool, int, float)) or not isinstance(value, numbers.Real):
            return value
        return int(value) if isinstance(value, numbers.Integral) else float(value)

    @field_validator("model", mode="before")
    @classmethod
    def _copy_json_values(cls, value: Any) -> Any:
        """Copy the dictionary `model`, and reject values that a JSON round trip would change."""
        if not isinstance(value, Mapping):
            return value
        try:
            copied = json.loads(json.dumps(dict(value), allow_nan=False, default=_convert_scalar))
        except (TypeError, ValueError):
            copied = None
        if copied != value:
            raise ObjectiveError(
                f"model must be a dictionary of JSON values with string keys, not {reprlib.repr(value)}"
            )
        return copied

    @field_validator(*CHOICES_BY_SETTING)
    @classmethod
    def _check_name(cls, name: str, info: ValidationInfo) -> str:
        known = CHOICES_BY_SETTING[str(info.field_name)]
        if name not in known:
            raise ObjectiveError(f"unknown {info.field_name} {name!r}; {suggest_names(name, list(known))}")
        return name

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        used = self.base_optimizer if self.optimizer in ("lookahead", "sam") else self.optimizer
        if self.nesterov and not (used in ("sgd", "lars") and self.momentum > 0):
            raise ObjectiveError("nesterov=True needs optimizer='sgd' or 'lars', and a momentum above 0")
        if self.clip_grad_value is not None and self.clip_grad_norm is not None:
            raise ObjectiveError("clip_grad_value cannot be combined with clip_grad_norm; set clip_grad_norm=None")
        if self.ema_decay is not None and self.swa_fraction is not None:
            raise ObjectiveError("ema_decay and swa_fraction cannot be combined; set one of the two to None")
        check_strategy_settings(self)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Create a configuration from a result of `to_dict`; missing fields get their defaults.

        Raises:
            ObjectiveError: a field is unknown (the message has similar names), or a value is invalid.
        """
        if not isinstance(values, Mapping):
            raise ObjectiveError(f"a configuration is a dictionary, not {values!r}")
        return cls(**translate_training_config({str(name): value for name, value in values.items()}))


FIELDS: dict[str, FieldInfo] = vars(TrainConfig)["__pydantic_fields__"]

_TYPES = {float: "a number", int: "an integer", bool: "True or False", str: "a string", dict: "a dictionary"}


def _convert_scalar(value: Any) -> Any:
    """Convert a scalar of NumPy to a Python value.

    Raises:
        TypeError: the value has another type.
    """
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    kind = f"{type(value).__module__}.{type(value).__name__}"
    if kind in ("numpy.bool", "numpy.bool_"):  # not registered as numbers.Number
        return bool(value)
    raise TypeError


def _format_error(error: ValidationError) -> str:
    """Format the first validation error as one line with the setting, its valid values and the given value."""
    first = error.errors(include_url=False)[0]
    name, value, kind = str(first["loc"][0]), first["input"], first["type"]
    if name not in FIELDS:
        return f"unknown training setting {name!r}; {suggest_names(name, list(FIELDS))}"
    if kind == "finite_number":
        must = "a finite number"
    elif kind in {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}:
        must = _format_bounds(FIELDS[name])
    else:
        plain, optional = _type_of(FIELDS[name])
        must = _TYPES[plain] + (" or None" if optional else "")
    return f"{name} must be {must}, not {value!r}"


def _type_of(field: FieldInfo) -> tuple[type, bool]:
    """Return the type of a setting without None, and whether the setting may be None."""
    annotation: Any = field.annotation
    kinds = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return get_origin(kinds[0]) or kinds[0], types.NoneType in kinds


def format_type(field: FieldInfo) -> str:
    """Return the type of a setting as text, such as `int | None`."""
    plain, optional = _type_of(field)
    return f"{plain.__name__}{' | None' if optional else ''}"


def _format_bounds(field: FieldInfo) -> str:
    """Return the bounds of a number as text: `above 0`, `at least 1`, `in [0, 1)`."""
    bounds = {name: value for item in field.metadata for name, value in dataclasses.asdict(item).items()}
    low, high = bounds.get("gt", bounds.get("ge")), bounds.get("lt", bounds.get("le"))
    if high is None:
        return f"{'above' if 'gt' in bounds else 'at least'} {low}"
    return f"in {'(' if 'gt' in bounds else '['}{low}, {high}{')' if 'lt' in bounds else ']'}"


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """The epochs, seeds and data splits of a run.

    Attributes:
        epochs: planned number of epochs, over which schedules extend.
        seed: seed of initial weights, sample order and dropout.
        split_seed: seed of the data split, the same for all trials of a study.
        resplit_seed: seed of a new train/validation split with an unchanged test split, if `data()` allows it. The run
            then has a `FitResult.resplit_score`. None uses the study's split.
        refit: number of epochs to train in a refit, a run on training and validation data; None for other runs.
        folds: number of folds of a cross-validation, in which the run trains one model per fold; None for one model.
        fold: index of the fold that the run validates on; None for a run on one split, or on all folds.
        config_by_epoch: the configurations of a run whose configuration changes, by the first epoch that each trains,
            from 0; empty for a run with one configuration.
        seed_by_epoch: the seeds that take the place of `seed` in such a run, by the same epochs; empty to use `seed`.

    Raises:
        ObjectiveError: a number is out of range, or the numbers contradict each other.
    """

    epochs: int
    seed: int
    split_seed: int
    resplit_seed: int | None = None
    refit: int | None = None
    folds: int | None = None
    fold: int | None = None
    config_by_epoch: Mapping[int, TrainConfig] = dataclasses.field(default_factory=dict)
    seed_by_epoch: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.epochs, int):
            raise ObjectiveError(f"epochs must be an integer, not {self.epochs!r}")
        if self.epochs < 1:
            raise ObjectiveError(f"epochs must be at least 1, not {self.epochs}")
        if self.refit is not None and not 1 <= self.refit <= self.epochs:
            raise ObjectiveError(f"refit must be in [1, epochs={self.epochs}], not {self.refit}")
        if self.refit is not None and self.resplit_seed is not None:
            raise ObjectiveError("a refit trains on both splits and cannot have a resplit_seed; set resplit_seed=None")
        if self.refit is not None and self.folds is not None:
            raise ObjectiveError("a refit trains one model and cannot have folds; set folds=None")
        if self.folds is not None and self.folds < 2:
            raise ObjectiveError(f"folds must be at least 2, not {self.folds}")
        if self.fold is not None and (self.folds is None or not 0 <= self.fold < self.folds):
            raise ObjectiveError(f"fold must be from 0 to folds - 1 with folds={self.folds}, not {self.fold}")
        if self.config_by_epoch and min(self.config_by_epoch) != 0:
            raise ObjectiveError(f"config_by_epoch must begin with epoch 0, not {min(self.config_by_epoch)}")
        if self.seed_by_epoch and self.seed_by_epoch.keys() != self.config_by_epoch.keys():
            raise ObjectiveError(f"seed_by_epoch must have the epochs of config_by_epoch, not {[*self.seed_by_epoch]}")

    def get_config(self, epoch: int) -> TrainConfig | None:
        """Return the configuration that trains an epoch, from 0; None for a run with one configuration."""
        begun = [first for first in self.config_by_epoch if first <= epoch]
        return self.config_by_epoch[max(begun)] if begun else None

    def get_seed(self, epoch: int) -> int:
        """Return the seed of an epoch, from 0."""
        begun = [first for first in self.seed_by_epoch if first <= epoch]
        return self.seed_by_epoch[max(begun)] if begun else self.seed

    @property
    def identity(self) -> dict[str, int]:
        """Entries of the plan that identify the run in a checkpoint, where `resplit_seed` has the key "division"."""
        own = {name: value for name, value in vars(self).items() if not name.endswith("_by_epoch")}
        stored = {**own, "division": self.resplit_seed, "resplit_seed": None}
        return {name: value for name, value in stored.items() if value is not None}
