"""The study spec: all that a worker must know of a search, validated, versioned and stored with the study."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from search.errors import SearchError, nearest

SPEC_VERSION: Literal[1] = 1

# The flag of each field: messages speak of what the user types.
FLAGS = {
    "n_trials": "--trials",
    "objective": "OBJECTIVE",
    **{key: f"--{key}" for key in ("name", "metric", "direction", "epochs", "seed", "retries", "timeout", "models")},
}

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TPE(_Model):
    """Tree-structured Parzen estimator (Bergstra et al. 2011), Optuna's ``TPESampler``."""

    name: Literal["tpe"] = "tpe"
    n_startup_trials: int = Field(default=10, ge=0)
    n_ei_candidates: int = Field(default=24, ge=1)
    multivariate: bool = True
    group: bool = True
    constant_liar: bool = True


class Random(_Model):
    """Independent random search, Optuna's ``RandomSampler``."""

    name: Literal["random"] = "random"


class QMC(_Model):
    """Quasi-Monte Carlo search, Optuna's ``QMCSampler``."""

    name: Literal["qmc"] = "qmc"
    qmc_type: Literal["sobol", "halton"] = "sobol"
    scramble: bool = True


class GP(_Model):
    """Gaussian-process Bayesian optimisation, Optuna's ``GPSampler``."""

    name: Literal["gp"] = "gp"
    n_startup_trials: int = Field(default=10, ge=0)
    deterministic_objective: bool = False


class Median(_Model):
    """Prune what is worse than the median of the finished trials at the same epoch, Optuna's ``MedianPruner``."""

    name: Literal["median"] = "median"
    n_startup_trials: int = Field(default=5, ge=0)
    n_warmup_steps: int = Field(default=2, ge=0)
    interval_steps: int = Field(default=1, ge=1)
    n_min_trials: int = Field(default=1, ge=1)


class Percentile(_Model):
    """Keep the best `percentile` percent at each epoch, Optuna's ``PercentilePruner``."""

    name: Literal["percentile"] = "percentile"
    percentile: float = Field(default=25.0, ge=0.0, le=100.0, strict=False)
    n_startup_trials: int = Field(default=5, ge=0)
    n_warmup_steps: int = Field(default=2, ge=0)
    interval_steps: int = Field(default=1, ge=1)
    n_min_trials: int = Field(default=1, ge=1)


class SuccessiveHalving(_Model):
    """Asynchronous successive halving (Li et al. 2020), Optuna's ``SuccessiveHalvingPruner``."""

    name: Literal["successive_halving"] = "successive_halving"
    min_resource: int = Field(default=1, ge=1)
    reduction_factor: int = Field(default=4, ge=2)
    min_early_stopping_rate: int = Field(default=0, ge=0)
    bootstrap_count: int = Field(default=0, ge=0)


class Hyperband(_Model):
    """Hyperband (Li et al. 2018), Optuna's ``HyperbandPruner``; `max_resource` is the spec's epochs unless given."""

    name: Literal["hyperband"] = "hyperband"
    min_resource: int = Field(default=1, ge=1)
    max_resource: int | None = Field(default=None, ge=1)
    reduction_factor: int = Field(default=3, ge=2)
    bootstrap_count: int = Field(default=0, ge=0)


class Threshold(_Model):
    """Prune at an absolute bound, Optuna's ``ThresholdPruner``."""

    name: Literal["threshold"] = "threshold"
    lower: float | None = Field(default=None, strict=False, allow_inf_nan=False)
    upper: float | None = Field(default=None, strict=False, allow_inf_nan=False)
    n_warmup_steps: int = Field(default=0, ge=0)
    interval_steps: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.lower is None and self.upper is None:
            raise ValueError("give lower or upper")
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(f"lower {self.lower:g} is more than upper {self.upper:g}")
        return self


class NoPruning(_Model):
    """Every trial runs all its epochs, Optuna's ``NopPruner``."""

    name: Literal["none"] = "none"


SamplerSpec = Annotated[TPE | Random | QMC | GP, Field(discriminator="name")]
PrunerSpec = Annotated[
    Median | Percentile | SuccessiveHalving | Hyperband | Threshold | NoPruning, Field(discriminator="name")
]

SAMPLERS = ("tpe", "random", "qmc", "gp")
PRUNERS = ("median", "percentile", "successive_halving", "hyperband", "threshold", "none")


class FinalistsOf(_Model):
    """Makes a study the finalists of another: each of its best trials, trained anew on each of some fresh seeds.

    Attributes:
        study: the other study's name.
        study_id: its number in the database: a study deleted and made again under its name is another.
        top: how many finalists were asked for; there may be fewer trials.
        trials: numbers of the finalists in the other study, the best one first.
        seeds: of the training, the same for all finalists; none is a seed of the search.
    """

    study: str
    study_id: int
    top: int = Field(ge=1)
    trials: list[int] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)

    def assignment(self, number: int) -> tuple[int, int]:
        """Return whose configuration trial `number` trains, and on which seed.

        All finalists come once before any comes twice, so that a table that is not yet whole compares like with like.
        """
        seed, finalist = divmod(number, len(self.trials))
        return self.trials[finalist], self.seeds[seed]


class StudySpec(_Model):
    """One search. Sampler, pruner, seed, budget and metric come from here, never from a worker's flags."""

    version: Literal[1] = SPEC_VERSION
    name: str = Field(pattern=NAME_PATTERN, max_length=100)
    objective: str = Field(min_length=1)
    metric: str = Field(min_length=1)
    direction: Literal["maximize", "minimize"]
    n_trials: int = Field(ge=1, le=1_000_000)
    epochs: int = Field(ge=1, le=1_000_000)
    sampler: SamplerSpec = TPE()
    pruner: PrunerSpec = Median()
    seed: int = Field(default=0, ge=0, lt=2**31)
    retries: int = Field(default=2, ge=0, le=1000)
    # Not the non-finite loss: a resume is exact, and diverges again.
    retry_on: list[Literal["lost", "error", "memory"]] = Field(
        default=["lost"],
        description="After which ends a trial is tried again, from its last checkpoint: its worker died (`lost`), the "
        "objective raised (`error`), it ran out of memory (`memory`)",
    )
    timeout: float | None = Field(default=None, gt=0, strict=False, allow_inf_nan=False)
    models: Literal["complete", "all", "none"] = "complete"  # which trials leave a registrable model
    finalists_of: FinalistsOf | None = None  # set by `hpsearch finalists`, never by a user

    @model_validator(mode="before")
    @classmethod
    def _fill_hyperband(cls, data: Any) -> Any:
        """Write Hyperband's `max_resource` down: left open, each process would derive its own."""
        pruner = data.get("pruner") if isinstance(data, dict) else None
        if isinstance(pruner, dict) and pruner.get("name") == "hyperband" and pruner.get("max_resource") is None:
            return {**data, "pruner": {**pruner, "max_resource": data.get("epochs")}}
        return data

    @model_validator(mode="after")
    def _resources_fit(self) -> Self:
        if isinstance(self.pruner, SuccessiveHalving | Hyperband) and self.pruner.min_resource > self.epochs:
            raise ValueError(
                f"pruner.min_resource {self.pruner.min_resource} is more than epochs {self.epochs}: "
                "no trial would ever reach it; lower it"
            )
        if isinstance(self.pruner, Hyperband) and (self.pruner.max_resource or self.epochs) < self.pruner.min_resource:
            raise ValueError(
                f"pruner.max_resource {self.pruner.max_resource} is less than pruner.min_resource "
                f"{self.pruner.min_resource}: give the epochs of a full trial, or leave it out"
            )
        return self


def parse_spec(values: dict[str, Any]) -> StudySpec:
    """Validate `values` (plain types, as from TOML, YAML, JSON or flags).

    Raises:
        SearchError: naming the first setting that is wrong, its value and what is allowed.
    """
    known = set(StudySpec.model_fields)
    for key in map(str, values):
        if key not in known:
            raise SearchError(f"unknown setting {key!r} in the study spec{nearest(key, known)}")
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


def _first_line(error: ValidationError) -> str:
    """Turn pydantic's first complaint into one line that names the setting and its value."""
    first = error.errors(include_url=False)[0]
    # A tagged union puts the tag ('tpe') into the path: it is not a part of the setting's name.
    path = [str(p) for p in first["loc"] if p not in {*SAMPLERS, *PRUNERS}]
    where = ".".join(path)
    if not where:
        return str(first["msg"]).removeprefix("Value error, ")
    setting = FLAGS.get(where, where)
    kind = first["type"]
    if kind == "missing":
        return f"{setting} is not set: give it in the spec file or as a flag"
    if kind == "extra_forbidden":
        model = {"sampler": SAMPLER_MODELS, "pruner": PRUNER_MODELS}.get(path[0], {}).get(_tag(first["loc"]))
        options = set(model.model_fields) - {"name"} if model else set()
        return f"{setting}: no such option" + (nearest(path[-1], options) if options else "; it takes none")
    value = first["input"]
    if kind.startswith("union_tag"):
        names = SAMPLERS if path[0] == "sampler" else PRUNERS
        given = value.get("name") if isinstance(value, dict) else value
        return f"{path[0]}: unknown {path[0]} {given!r}{nearest(str(given), names)}"
    if where == "name":
        return (
            f"--name {value!r} cannot name a study: use up to 100 letters, digits, '.', '_' and '-', "
            "a letter or digit first"
        )
    if kind.startswith("model_"):
        return f"{where} is {value!r}: give its name, or a table with its name and options"
    if where.startswith("retry_on"):
        setting, kinds = "retry_on", ", ".join(repr(k) for k in ("lost", "error", "memory"))
        return f'{setting}: {value!r} is no list of {kinds}, such as ["lost", "memory"]'
    message = str(first["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    message = message.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    return f"{setting} is {value!r}: it must be {message}"


def _tag(loc: tuple[int | str, ...]) -> str:
    return str(loc[1]) if len(loc) > 1 else ""


SAMPLER_MODELS: dict[str, type[_Model]] = {"tpe": TPE, "random": Random, "qmc": QMC, "gp": GP}
PRUNER_MODELS: dict[str, type[_Model]] = {
    "median": Median,
    "percentile": Percentile,
    "successive_halving": SuccessiveHalving,
    "hyperband": Hyperband,
    "threshold": Threshold,
    "none": NoPruning,
}


def differences(stored: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return a line for each setting of `wanted` that `stored` has otherwise: ``"n_trials: 24 -> 50"``."""
    lines = []
    for key in sorted(wanted):
        before, after = stored.get(key), wanted[key]
        if isinstance(before, dict) and isinstance(after, dict) and before.get("name") == after.get("name"):
            lines += [f"{key}.{line}" for line in differences(before, after)]
        elif before != after:
            lines.append(f"{key}: {before!r} -> {after!r}")
    return lines
