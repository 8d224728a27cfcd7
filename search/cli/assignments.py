"""``--set KEY=VALUE``: a training configuration from an objective's default and what is set on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from objectives import Objective
    from objectives.training import TrainConfig

Objective_ = Annotated[
    str, typer.Argument(metavar="OBJECTIVE", help="digits, breast_cancer, package.module:Class or my_file.py.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A training setting, such as lr=1e-3 or model.width=64; may be given again. "
        "'hpsearch objective show OBJECTIVE' lists them.",
    ),
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:N  [default: cuda where there is one]")]
RunSeed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the split, the weights and the order.")]


def configured(objective: Objective, pairs: list[str] | None) -> TrainConfig:
    """Return the objective's default configuration with the given settings in place.

    Raises:
        SearchError: a setting is not KEY=VALUE, or names a model's setting that the default does not have.
        ObjectiveError: a setting is unknown or its value is not valid.
    """
    from objectives.errors import ObjectiveError, nearest
    from objectives.training import TrainConfig
    from search.errors import SearchError
    from search.spec.spec_file import parse_options

    values = objective.default_config().to_dict()
    for key, value in parse_options("--set", pairs or []).items():
        head, dot, name = key.partition(".")
        if head != "model" or not dot:
            values[key] = _number(value)
            continue
        known = values["model"]
        if name not in known:
            hint = nearest(name, list(known)) if known else "default_config() names none"
            raise SearchError(f"--set {key}: the model of {objective.name} has no setting {name!r}: {hint}")
        known[name] = _number(value)
    try:
        return TrainConfig.from_dict(values)
    except ObjectiveError as error:
        raise SearchError(f"--set: {error}" if pairs else str(error)) from None


def _number(value: Any) -> Any:
    """YAML reads 1e-3 as a word."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
