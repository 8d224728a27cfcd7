"""The study spec: all settings of a search, which are validated and stored with the study."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from hpsearch.former_names import translate_spec
from hpsearch.objectives.model_metric_names import get_metric_value
from hpsearch.objectives.references import normalize_reference
from hpsearch.search.errors import SearchError, suggest_names
from hpsearch.search.pruners import PrunerSpec
from hpsearch.search.pruners.hyperband_and_asha import ASHA
from hpsearch.search.samplers import SamplerSpec
from hpsearch.search.samplers.optuna import FreezeThaw
from hpsearch.search.spec.defaults import choose_default_names
from hpsearch.search.spec.kinds import Number, Options, format_validation_error
from hpsearch.search.spec.multi_objective import (
    Bound,
    Direction,
    make_bounds,
    parse_constraints,
    parse_directions,
    resolve_metrics,
)
from hpsearch.storage.urls import Addresses

SPEC_VERSION: Literal[1] = 1

# The other settings have the flag of their name.
FLAG_BY_KEY = {"n_trials": "--trials", "objective": "OBJECTIVE"}
KEY_BY_FLAG = {flag: key for key, flag in FLAG_BY_KEY.items()}
BUDGETS = ("n_trials", "budget_epochs", "budget_seconds")
_LIMITS = ("folds", "budget_epochs", "budget_seconds", "timeout", "min_expected_gain", "warm_start")
FILE_ONLY_KEYS = frozenset({"version", "retry_on", "finalists_of"})

MAX_TRIALS = 1_000_000  # also `n_trials` of a study that has only a budget in epochs or seconds

OBJECTIVE_HELP = "digits or another built-in, package.module:Class or my_file.py"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


# Suffixes of the names of finalist and refit studies. Later ones of the same search also end with "-2", "-3" and so on.
FINALISTS, REFIT = ".finalists", ".refit"


def _parse_study_names(given: Any) -> Any:
    """Return study names, given as a list or a comma-separated text, as a list; None if there are no names."""
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else given
    if names is None or names == []:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"--warm-start {given!r} is invalid; give names of studies, such as wine-a,wine-b")
    for place, name in enumerate(names):
        if not re.match(NAME_PATTERN, name):
            raise ValueError(f"--warm-start: {name!r} cannot be the name of a study; separate names by commas")
        if name in names[:place]:
            raise ValueError(f"--warm-start names {name} twice; remove one of them")
    return names


def _check_objective(reference: str) -> str:
    """Reject an objective that would be an option in a suggested command."""
    if reference.startswith("-"):
        raise ValueError(f"OBJECTIVE {reference!r} begins with '-'; give the path of a file as ./{reference}")
    return normalize_reference(reference)


def _resolve_folder(given: Any, info: ValidationInfo) -> Any:
    """Return a local folder as an absolute path, because workers may start in another folder."""
    if not isinstance(given, str | Path):
        return given
    folder = str(given)
    try:
        if not folder or "://" in folder:
            raise RuntimeError("object stores cannot append to files" if folder else "the name is empty")
        return os.path.normpath(Path(folder).expanduser().absolute())
    except RuntimeError as error:  # also ~user for a user that this machine does not have
        setting = get_option_name(str(info.field_name))
        raise ValueError(f"{setting} {folder!r} is not usable ({error}); give a folder on this machine") from None


def _check_wandb_project(given: Any) -> Any:
    if isinstance(given, str) and not re.fullmatch(r"([A-Za-z0-9_-]+/)?[^/\\#?%:\s]{1,128}", given):
        raise ValueError(f"--wandb {given!r} is not a project; give PROJECT or ENTITY/PROJECT, such as me/wine")
    return given


def parse_parent_name(name: str) -> str | None:
    """Return the name of the search if `name` is the name of a finalist or refit study; else None."""
    match = re.fullmatch(rf"(.+)({re.escape(FINALISTS)}|{re.escape(REFIT)})(-\d+)?", name)
    return match[1] if match else None


class FinalistsOf(Options):
    """Setting of a finalist study or a refit study, which belong to another study, the search.

    A finalist study retrains the best trials of the search on new seeds. A refit study trains the configuration of the
    winner on training and validation data together.

    Attributes:
        study: name of the search.
        study_id: id of the search in the database, because a new study may have the name of a deleted study.
        top: requested number of finalists; `trials` may have fewer.
        trials: numbers of the finalists in the search, best first.
        seeds: training seeds, the same for all finalists; different from those of the search.
        divisions: whether each seed has a new train/validation split; False for finalist studies of earlier versions,
            which had no new splits.
        refit: number of epochs of a refit study; None for a finalist study.
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
        """The purpose of the study as text: ``the finalists of 'wine'``."""
        return f"the {'finalists' if self.refit is None else 'refit'} of {self.study!r}"

    def get_trial_and_seed(self, number: int) -> tuple[int, int]:
        """Return the finalist (its trial number in the search) and the seed that trial `number` trains.

        All finalists run on one seed before any runs on the next seed, so that an unfinished table compares equal
        numbers of runs.
        """
        seed, finalist = divmod(number, len(self.trials))
        return self.trials[finalist], self.seeds[seed]


class StudySpec(Options):
    """The settings of a study, which all workers read from the database.

    Each field is a setting. The `run` command has a flag for each setting, with the field's description as help text.
    """

    version: Literal[1] = SPEC_VERSION
    name: str = Field(pattern=NAME_PATTERN, max_length=100, description="Name of the study")
    objective: Annotated[str, AfterValidator(_check_objective)] = Field(min_length=1, description=OBJECTIVE_HELP)
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
    n_trials: int = Field(
        ge=1,
        le=MAX_TRIALS,
        description="Budget: number of trials. Without a given budget, asha has the epochs of as many full trials",
    )
    epochs: int = Field(ge=1, le=1_000_000, description="Epochs of a full trial")
    sampler: Annotated[SerializeAsAny[SamplerSpec], BeforeValidator(SamplerSpec.parse)] = FreezeThaw()
    warm_start: Annotated[list[str] | None, BeforeValidator(_parse_study_names)] = Field(
        default=None,
        description="Earlier studies in this database, separated by commas, whose trials inform the sampler "
        "freeze_thaw",
    )
    pruner: Annotated[SerializeAsAny[PrunerSpec], BeforeValidator(PrunerSpec.parse)] = ASHA()
    default_first: bool = Field(default=True, description="Run the objective's default configuration first, if any")
    seed: int = Field(default=0, ge=0, lt=2**31, description="Seed of the data split and of every trial")
    folds: int | None = Field(
        default=None,
        ge=2,
        le=100,
        description="Cross-validation: each trial trains one model per fold of the training and validation samples, "
        "and reports the mean",
    )
    retries: int = Field(
        default=2, ge=0, le=1000, description="Consecutive attempts without progress before a trial fails"
    )
    # A non-finite loss is not in the list, because a resume is exact and diverges again.
    retry_on: list[Literal["lost", "error", "memory"]] = Field(
        default=["lost"],
        description="Causes of a failed attempt after which the trial resumes from its last checkpoint: the "
        "worker died (`lost`), the objective raised an error (`error`), out of memory (`memory`)",
    )
    timeout: Number | None = Field(default=None, gt=0, description="Seconds after which no new trial starts")
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
        description="Budget: seconds of training, summed over all trials, after which no new epoch starts",
    )
    min_expected_gain: Number | None = Field(
        default=None,
        gt=0,
        description="Stop the study early if the remaining budget is expected to gain less than this in the metric",
    )
    models: Literal["top", "complete", "all", "none"] = Field(
        default="top",
        description="Trials that keep a registrable model: `top`, `complete`, `all` or `none`; `promote` "
        "can create a model from the best checkpoint of any complete trial",
    )
    top_models: int = Field(
        default=5,
        ge=1,
        le=MAX_TRIALS,
        description="With --models top: a trial keeps a model if it is among this number of best trials when it ends",
    )
    tensorboard: Annotated[str | None, BeforeValidator(_resolve_folder)] = Field(
        default=None, description="Folder for TensorBoard event files of all trials, in addition to MLflow"
    )
    wandb: Annotated[str | None, BeforeValidator(_check_wandb_project)] = Field(
        default=None, description="Weights & Biases project, or entity/project, for all trials, in addition to MLflow"
    )
    finalists_of: FinalistsOf | None = None  # set by `hpsearch finalists` and `promote --refit` only

    @property
    def maximize(self) -> bool:
        """Whether a higher value of the metric is better."""
        return self.direction == "maximize"

    @property
    def is_multi_objective(self) -> bool:
        """Whether the study optimizes more than one metric."""
        return self.directions is not None

    @property
    def direction_by_metric(self) -> dict[str, Direction]:
        """The optimized metrics with their directions, in the order of a trial's values."""
        return {self.metric: self.direction} if self.directions is None else self.directions

    @property
    def maximize_each(self) -> tuple[bool, ...]:
        """Per optimized metric, whether a higher value is better."""
        return tuple(direction == "maximize" for direction in self.direction_by_metric.values())

    @property
    def constraint_bounds(self) -> tuple[Bound, ...]:
        """The constraints as bounds on metrics."""
        return make_bounds(self.constraints or {})

    def list_violations(self, values: Mapping[str, float]) -> list[str]:
        """Return a line for each constraint that `values` violate: ``model_mb 12.5 is not <= 10``."""
        found = [(bound, values[bound.metric]) for bound in self.constraint_bounds]
        return [bound.format_violation(value) for bound, value in found if bound.violation(value) > 0]

    @property
    def reported_metrics(self) -> tuple[str, ...]:
        """The metrics that a trial reports in addition to `metric`: other optimized and constrained metrics."""
        named = dict.fromkeys([*self.direction_by_metric, *(bound.metric for bound in self.constraint_bounds)])
        return tuple(name for name in named if name != self.metric)

    def select_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Select, from an epoch's metrics, those that the study optimizes or constrains, and return them by name.

        Raises:
            KeyError: a metric is missing; the argument of the error is the metric's name.
        """
        return {name: get_metric_value(metrics, name) for name in (self.metric, *self.reported_metrics)}

    @property
    def refit(self) -> int | None:
        """The number of epochs of a refit study; None for other studies."""
        return None if self.finalists_of is None else self.finalists_of.refit

    @property
    def budget_description(self) -> str:
        """All budgets as text: ``50 trials, 2000 epochs (100 full trials)``."""
        is_limited = self.n_trials < MAX_TRIALS or not self.has_epoch_or_time_budget
        parts = [f"{self.n_trials} trial{'s' if self.n_trials > 1 else ''}"] if is_limited else []
        if self.budget_epochs is not None:
            full, rest = divmod(self.budget_epochs, self.epochs)
            full_trials = "" if rest else f" ({full} full trial{'s' if full > 1 else ''})"
            parts.append(f"{self.budget_epochs} epochs{full_trials}")
        return ", ".join(parts + ([f"{self.budget_seconds:g} s"] if self.budget_seconds is not None else []))

    @property
    def has_epoch_or_time_budget(self) -> bool:
        """Whether the study has a budget in epochs or seconds in addition to the number of trials."""
        return self.budget_epochs is not None or self.budget_seconds is not None

    @model_validator(mode="before")
    @classmethod
    def _set_defaults(cls, given: Any) -> Any:
        """Set metric and direction from the first entry of `directions`, and set the default sampler and pruner."""
        if not isinstance(given, dict):
            return given
        given = resolve_metrics(given)
        names = choose_default_names(given)
        kinds = {key: given.get(key, {}) for key in names}
        return {**given, **{key: {"name": names[key], **kinds[key]} for key in names if isinstance(kinds[key], dict)}}

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        """Reject settings that contradict each other, and adapt the pruner to the number of epochs."""
        if self.is_multi_objective:
            self.sampler.check_multi_objective()
            self.pruner.check_multi_objective()
            if self.min_expected_gain is not None:
                raise ValueError("--min-expected-gain is not available for multi-objective studies; remove the option")
        known = [self.metric, *self.reported_metrics]
        if (named := self.pruner.get_metric_name()) is not None and named not in known:
            raise ValueError(
                f"pruner.metric {named!r} is not a metric of the study ({', '.join(known)}); use one of these, or add "
                f"{named} to --constraints"
            )
        self.pruner.check_folds(self.folds)
        self.__dict__["pruner"] = self.pruner.fit_to_epochs(self.epochs)
        given = [get_option_name(key) for key in _LIMITS if getattr(self, key) is not None]
        self.pruner.check_settings(n_trials=self.n_trials, sampler=self.sampler.name, given=given)
        if self.warm_start is not None:
            self._check_warm_start(self.warm_start)
        self.sampler.check_n_trials(self.n_trials)
        return self

    def _check_warm_start(self, earlier: list[str]) -> None:
        if not self.sampler.can_warm_start:
            names = " or ".join(sorted(name for name, kind in SamplerSpec.registry.items() if kind.can_warm_start))
            raise ValueError(
                f"--warm-start is not available with the sampler {self.sampler.name}; "
                f"use --sampler {names}, or remove --warm-start"
            )
        if self.is_multi_objective:
            raise ValueError("--warm-start is not available for multi-objective studies; remove the option")
        if self.name in earlier:
            raise ValueError(f"--warm-start {self.name} is the study itself; name earlier studies")


class Settings(Addresses, total=False):
    """Settings of a study, which docs/reference/settings.md explains, and addresses of its services."""

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
    folds: int | None
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
    """Return the flag of a setting; for a positional argument, its name; for a setting without a flag, its key."""
    is_flag = setting in StudySpec.model_fields and setting not in FILE_ONLY_KEYS
    return FLAG_BY_KEY.get(setting, f"--{setting.replace('_', '-')}") if is_flag else setting


def parse_spec(values: dict[str, Any]) -> StudySpec:
    """Validate settings from TOML, YAML, JSON or flags, and return them as a spec.

    Raises:
        SearchError: a setting is invalid; the message has the first invalid setting, its value and the allowed values.
    """
    known = set(StudySpec.model_fields)
    for key in map(str, values):
        if key not in known:
            raise SearchError(f"unknown setting {key!r} in the study spec{suggest_names(key, known)}")
        if _has_huge_integer(values[key]):
            raise SearchError(f"{get_option_name(key)} has an integer with thousands of digits; give a smaller one")
    version = values.get("version", SPEC_VERSION)
    if version != SPEC_VERSION:
        raise SearchError(
            f"the study spec has version {version!r}, and this hpsearch reads version {SPEC_VERSION}; "
            "use the version of hpsearch that created the study"
        )
    try:
        return StudySpec.model_validate(values)
    except ValidationError as error:
        raise SearchError(_format_first_error(error)) from None


def _has_huge_integer(value: Any) -> bool:
    try:
        repr(value)  # Python does not convert integers of more than 4,300 digits to text
    except Exception as error:  # of an object of the user's own class
        return "integer string conversion" in str(error)
    return False


def parse_stored_spec(values: Any) -> StudySpec:
    """Return the spec from values in the database, which an earlier version may have written.

    Raises:
        SearchError: a setting is invalid.
    """
    if not isinstance(values, Mapping):
        raise SearchError(f"the stored settings are not an object, but {type(values).__name__}")
    return parse_spec(translate_spec(values))


def _format_first_error(error: ValidationError) -> str:
    """Return pydantic's first error as one line with the setting and its value."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    setting, value = get_option_name(where), first["input"]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "missing":
        return f"{setting} is not set; give the setting in the spec file or as a flag"
    if where == "name":
        return (
            f"--name {value!r} is invalid; use up to 100 letters, digits, '.', '_' and '-', "
            "starting with a letter or digit"
        )
    if where.startswith("retry_on"):
        return f"retry_on: {value!r} is not a list of 'lost', 'error', 'memory', such as [\"lost\", \"memory\"]"
    return format_validation_error(setting, first)
