"""The study spec: all that a worker must know of a search, validated, versioned and stored with the study."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError, ValidationInfo, model_validator

from hpsearch.former_names import current_spec
from hpsearch.objectives.loading import normalize_reference
from hpsearch.objectives.model_metrics import get_metric_value
from hpsearch.search.errors import SearchError, suggest_names
from hpsearch.search.pruners import PrunerSpec
from hpsearch.search.pruners.stopping import Median
from hpsearch.search.samplers import SamplerSpec
from hpsearch.search.samplers.optuna import TPE
from hpsearch.search.spec.kinds import Number, Options, format_validation_error
from hpsearch.search.spec.multi_objective import (
    MULTI_OBJECTIVE_DEFAULTS,
    Bound,
    Direction,
    make_bounds,
    parse_constraints,
    parse_directions,
    resolve_metrics,
)
from hpsearch.storage.urls import Addresses

SPEC_VERSION: Literal[1] = 1

# What a user types for a setting is the flag of its name, but for these; messages speak of it.
FLAGS = {"n_trials": "--trials", "objective": "OBJECTIVE"}
KEYS = {flag: key for key, flag in FLAGS.items()}
BUDGETS = ("n_trials", "budget_epochs", "budget_seconds")
IN_FILES_ONLY = frozenset({"version", "retry_on", "finalists_of"})

MAX_TRIALS = 1_000_000  # of a study; with a budget in epochs or seconds alone, it is what `n_trials` is

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


# How the names of studies end that hold finalists, or the refit of their winner; of a later one with "-2" and so on.
FINALISTS, REFIT = ".finalists", ".refit"


def _study_names(given: Any) -> Any:
    """Names as a list: a flag has them with commas between, and none is no setting."""
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else given
    if names is None or names == []:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"--warm-start {given!r}: give names of studies, such as wine-a,wine-b")
    for place, name in enumerate(names):
        if not re.match(NAME_PATTERN, name):
            raise ValueError(f"--warm-start: {name!r} cannot name a study: give names with commas between them")
        if name in names[:place]:
            raise ValueError(f"--warm-start: {name} is named twice: leave one out")
    return names


def _folder(given: Any, info: ValidationInfo) -> Any:
    """A local folder as an absolute path: workers start in other folders."""
    if not isinstance(given, str | Path):
        return given
    folder = str(given)
    try:
        if not folder or "://" in folder:
            raise RuntimeError("an object store takes no files that grow" if folder else "it is empty")
        return os.path.normpath(Path(folder).expanduser().absolute())
    except RuntimeError as error:  # also ~user for a user that this machine does not have
        setting = get_option_name(str(info.field_name))
        raise ValueError(f"{setting} {folder!r}: give a folder that this machine sees ({error})") from None


def _project(given: Any) -> Any:
    """A project of Weights & Biases, with its entity or without."""
    if isinstance(given, str) and not re.fullmatch(r"([A-Za-z0-9_-]+/)?[^/\\#?%:\s]{1,128}", given):
        raise ValueError(f"--wandb {given!r}: give a project of Weights & Biases, or entity/project, such as me/wine")
    return given


def parse_parent_name(name: str) -> str | None:
    """Return the name of the study whose finalists a study of this name would hold; None if it is no such name."""
    match = re.fullmatch(rf"(.+){re.escape(FINALISTS)}(-\d+)?", name)
    return match[1] if match else None


class FinalistsOf(Options):
    """Makes a study the finalists of another: each of its best trials, trained anew on each of some fresh seeds.

    Or, with `refit`, the winner among them, trained on train and validation.

    Attributes:
        study: the other study's name.
        study_id: its number in the database: a study deleted and made again under its name is another.
        top: how many finalists were asked for; there may be fewer trials.
        trials: numbers of the finalists in the other study, the best one first.
        seeds: of the training, the same for all finalists; none is a seed of the search.
        divisions: whether each seed divides train and validation anew, and a run's score is cross-fitted; sets that
            were chosen before there was such a thing go on without.
        refit: epochs of a refit, which is trained on all but the test split; None for finalists.
    """

    study: str
    study_id: int
    top: int = Field(ge=1)
    trials: list[int] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)
    divisions: bool = False
    refit: int | None = Field(default=None, ge=1)

    @property
    def description(self) -> str:
        """What the study holds, for a person: ``the finalists of 'wine'``."""
        return f"the {'finalists' if self.refit is None else 'refit'} of {self.study!r}"

    def assignment(self, number: int) -> tuple[int, int]:
        """Return whose configuration trial `number` trains, and on which seed.

        All finalists come once before any comes twice, so that a table that is not yet whole compares like with like.
        """
        seed, finalist = divmod(number, len(self.trials))
        return self.trials[finalist], self.seeds[seed]


class StudySpec(Options):
    """One search. Sampler, pruner, seed, budget and metric come from here, never from a worker's flags.

    A field is all that a setting is: `run` has a flag for it, whose help is the field's description.
    """

    version: Literal[1] = SPEC_VERSION
    name: str = Field(pattern=NAME_PATTERN, max_length=100, description="Name of the study")
    objective: Annotated[str, BeforeValidator(normalize_reference)] = Field(
        min_length=1, description="digits or another built-in, package.module:Class or my_file.py"
    )
    metric: str = Field(min_length=1, description="Validation metric to optimize")
    direction: Direction = Field(description="maximize or minimize")
    directions: Annotated[dict[str, Direction] | None, BeforeValidator(parse_directions)] = Field(
        default=None,
        description="Several metrics instead of one, such as accuracy=maximize,latency_ms=minimize; the "
        "first one selects the best epoch of a trial",
    )
    constraints: Annotated[dict[str, str] | None, BeforeValidator(parse_constraints)] = Field(
        default=None, description="Bounds on a trial's metrics, such as model_mb<=10,accuracy>=0.9"
    )
    n_trials: int = Field(ge=1, le=MAX_TRIALS, description="Budget: number of trials")
    epochs: int = Field(ge=1, le=1_000_000, description="Epochs of a full trial")
    sampler: Annotated[SerializeAsAny[SamplerSpec], BeforeValidator(SamplerSpec.parse)] = TPE()
    warm_start: Annotated[list[str] | None, BeforeValidator(_study_names)] = Field(
        default=None,
        description="Earlier studies in this database, separated by commas, whose trials inform the sampler "
        "freeze_thaw",
    )
    pruner: Annotated[SerializeAsAny[PrunerSpec], BeforeValidator(PrunerSpec.parse)] = Median()
    default_first: bool = Field(
        default=True, description="Run the objective's default configuration, if it has one, as the first trial"
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="Seed of the data split and of every trial")
    retries: int = Field(
        default=2,
        ge=0,
        le=1000,
        description="Consecutive attempts without progress before a trial fails",
    )
    # Not the non-finite loss: a resume is exact, and diverges again.
    retry_on: list[Literal["lost", "error", "memory"]] = Field(
        default=["lost"],
        description="Ends of an attempt after which the trial is resumed from its last checkpoint: the "
        "worker died (`lost`), the objective raised (`error`), out of memory (`memory`)",
    )
    timeout: Number | None = Field(
        default=None,
        gt=0,
        description="Seconds after which no new trial starts",
    )
    budget_epochs: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        description="Budget: epochs reported by all trials together, each counted once",
    )
    budget_seconds: Number | None = Field(
        default=None,
        gt=0,
        le=1_000_000_000,
        description="Budget: seconds of training, summed over all trials, after which no epoch starts",
    )
    min_expected_gain: Number | None = Field(
        default=None,
        gt=0,
        description="Expected gain of the remaining budget, in units of the metric, below which the study stops early",
    )
    models: Literal["top", "complete", "all", "none"] = Field(
        default="top",
        description="Trials that keep a registrable model: `top`, `complete`, `all` or `none`; `promote` "
        "can make one from the best checkpoint of any complete trial",
    )
    top_models: int = Field(
        default=5,
        ge=1,
        le=MAX_TRIALS,
        description="With --models top: number of best trials that keep one, judged when a trial ends",
    )
    tensorboard: Annotated[str | None, BeforeValidator(_folder)] = Field(
        default=None,
        description="Folder for TensorBoard event files of all trials, in addition to MLflow",
    )
    wandb: Annotated[str | None, BeforeValidator(_project)] = Field(
        default=None,
        description="Project of Weights & Biases, or entity/project, for all trials, in addition to MLflow",
    )
    finalists_of: FinalistsOf | None = None  # set by `hpsearch finalists`, never by a user

    @property
    def maximize(self) -> bool:
        """Whether a higher value of the metric is better."""
        return self.direction == "maximize"

    @property
    def is_multi_objective(self) -> bool:
        """Whether more than one metric is optimised."""
        return self.directions is not None

    @property
    def direction_by_metric(self) -> dict[str, Direction]:
        """The metrics that are optimised, each with its direction, in the order of a trial's values."""
        return {self.metric: self.direction} if self.directions is None else self.directions

    @property
    def maximized(self) -> tuple[bool, ...]:
        """Of each of them, whether a higher value is better."""
        return tuple(way == "maximize" for way in self.direction_by_metric.values())

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """The constraints."""
        return make_bounds(self.constraints or {})

    def list_violations(self, values: Mapping[str, float]) -> list[str]:
        """Return a line for each constraint that values break: ``model_mb 12.5, not <= 10``."""
        return [
            bound.format_violation(values[bound.metric])
            for bound in self.bounds
            if bound.violation(values[bound.metric]) > 0
        ]

    @property
    def reported_metrics(self) -> tuple[str, ...]:
        """What a trial reports beside the metric: the others that are optimised, and those that have bounds."""
        named = dict.fromkeys([*self.direction_by_metric, *(bound.metric for bound in self.bounds)])
        return tuple(name for name in named if name != self.metric)

    def select_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an epoch's record that the study optimises or bounds, by name.

        Raises:
            KeyError: one is missing; its argument is the name.
        """
        return {name: get_metric_value(metrics, name) for name in (self.metric, *self.reported_metrics)}

    @property
    def refit(self) -> int | None:
        """The epochs after which its trials end, which are trained on train and validation; None of other studies."""
        return None if self.finalists_of is None else self.finalists_of.refit

    @property
    def budget_description(self) -> str:
        """All of them for a person: ``50 trials, 2000 epochs``."""
        bounded = self.n_trials < MAX_TRIALS or not self.has_epoch_or_time_budget
        parts = [f"{self.n_trials} trial{'s' if self.n_trials > 1 else ''}"] if bounded else []
        parts += [f"{self.budget_epochs} epochs"] if self.budget_epochs is not None else []
        return ", ".join(parts + ([f"{self.budget_seconds:g} s"] if self.budget_seconds is not None else []))

    @property
    def has_epoch_or_time_budget(self) -> bool:
        """Whether the study has a budget in epochs or seconds beside the one in trials."""
        return self.budget_epochs is not None or self.budget_seconds is not None

    @model_validator(mode="before")
    @classmethod
    def _usual(cls, given: Any) -> Any:
        """Name the first of several metrics as the metric, and the usual sampler and pruner where none is named."""
        if not isinstance(given, dict):
            return given
        given = resolve_metrics(given)
        usual = (
            MULTI_OBJECTIVE_DEFAULTS
            if given.get("directions")
            else {key: cls.model_fields[key].default.name for key in MULTI_OBJECTIVE_DEFAULTS}
        )
        kinds = {key: given.get(key, {}) for key in usual}
        return {**given, **{key: {"name": usual[key], **kinds[key]} for key in usual if isinstance(kinds[key], dict)}}

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Check the settings against each other, and complete the pruner."""
        if self.is_multi_objective:
            self.sampler.check_multi_objective()
            self.pruner.check_multi_objective()
            if self.min_expected_gain is not None:
                raise ValueError("--min-expected-gain: what several metrics gain is no one number: leave it out")
        known = [self.metric, *self.reported_metrics]
        if (named := self.pruner.get_metric_name()) is not None and named not in known:
            raise ValueError(
                f"pruner.metric {named!r} is none of the study's ({', '.join(known)}): name one of these, or add it to "
                "--constraints"
            )
        self.__dict__["pruner"] = self.pruner.for_epochs(self.epochs)
        if self.warm_start is not None:
            self._check_warm_start(self.warm_start)
        self.sampler.for_trials(self.n_trials)
        return self

    def _check_warm_start(self, earlier: list[str]) -> None:
        if not self.sampler.can_warm_start:
            can = " or ".join(sorted(name for name, kind in SamplerSpec.kinds.items() if kind.can_warm_start))
            raise ValueError(
                f"--warm-start: the sampler {self.sampler.name} learns from its own study alone: "
                f"use --sampler {can}, or leave --warm-start out"
            )
        if self.is_multi_objective:
            raise ValueError("--warm-start: earlier studies tell of one metric, and this one has several: leave it out")
        if self.name in earlier:
            raise ValueError(f"--warm-start: {self.name} is the study itself: name earlier ones")


class Settings(Addresses, total=False):
    """Settings of a study, as docs/reference/settings.md explains them, and its addresses."""

    name: str | None
    n_trials: int | None
    epochs: int | None
    metric: str | None
    direction: str | None
    directions: Mapping[str, str] | str | None
    constraints: Mapping[str, str] | str | None
    sampler: str | Mapping[str, Any] | None
    warm_start: str | list[str] | None
    pruner: str | Mapping[str, Any] | None
    default_first: bool | None
    seed: int | None
    retries: int | None
    retry_on: list[str] | None
    timeout: float | None
    budget_epochs: int | None
    budget_seconds: float | None
    min_expected_gain: float | None
    models: str | None
    top_models: int | None
    tensorboard: Path | str | None
    wandb: str | None


def get_option_name(setting: str) -> str:
    """Return what a user types for a setting: its flag, the argument's name, or its key in a spec file."""
    is_flag = setting in StudySpec.model_fields and setting not in IN_FILES_ONLY
    return FLAGS.get(setting, f"--{setting.replace('_', '-')}") if is_flag else setting


def parse_spec(values: dict[str, Any]) -> StudySpec:
    """Validate `values` (plain types, as from TOML, YAML, JSON or flags).

    Raises:
        SearchError: naming the first setting that is wrong, its value and what is allowed.
    """
    known = set(StudySpec.model_fields)
    for key in map(str, values):
        if key not in known:
            raise SearchError(f"unknown setting {key!r} in the study spec{suggest_names(key, known)}")
    version = values.get("version", SPEC_VERSION)
    if version != SPEC_VERSION:
        raise SearchError(
            f"version: this study spec is of version {version!r}, this hpsearch reads version {SPEC_VERSION}; "
            "use the hpsearch that made it"
        )
    try:
        return StudySpec.model_validate(values)
    except ValidationError as error:
        raise SearchError(_first_line(error)) from None


def parse_stored_spec(values: Mapping[str, Any]) -> StudySpec:
    """Validate a spec as a database has it, which an earlier version may have written.

    Raises:
        SearchError: a setting is invalid.
    """
    return parse_spec(current_spec(values))


def _first_line(error: ValidationError) -> str:
    """Return pydantic's first error as one line that names the setting and its value."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    setting, value = get_option_name(where), first["input"]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "missing":
        return f"{setting} is not set: give it in the spec file or as a flag"
    if where == "name":
        return (
            f"--name {value!r} cannot name a study: use up to 100 letters, digits, '.', '_' and '-', "
            "a letter or digit first"
        )
    if where.startswith("retry_on"):
        return f"retry_on: {value!r} is no list of 'lost', 'error', 'memory', such as [\"lost\", \"memory\"]"
    return format_validation_error(setting, first)
