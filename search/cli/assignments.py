"""``--set KEY=VALUE``: a training configuration from an objective's default and what is set on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hpsearch.objectives.objective import BaseObjective
    from hpsearch.objectives.own_loop.loop_objective import LoopObjective
    from hpsearch.objectives.training.config import TrainConfig

Objective_ = Annotated[
    str, typer.Argument(metavar="OBJECTIVE", help="digits or another built-in, package.module:Class or my_file.py.")
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


def configured(objective: BaseObjective, pairs: list[str] | None) -> Any:
    """Return the objective's default configuration with the given settings in place.

    Raises:
        SearchError: a setting is not KEY=VALUE, or names one that the default does not have.
        ObjectiveError: a setting is unknown or its value is not valid.
    """
    from hpsearch.objectives.own_loop.loop_objective import LoopObjective
    from hpsearch.search.spec.files import parse_options

    given = {key: _number(value) for key, value in parse_options("--set", pairs or []).items()}
    if isinstance(objective, LoopObjective):
        return _own(objective, given)
    return _trained(objective, given)


def _own(objective: LoopObjective, given: dict[str, Any]) -> Any:
    """The configuration of an own loop: of the settings that its search space has."""
    from hpsearch.objectives.own_loop.loop_objective import config_of, plain_config
    from hpsearch.search.errors import SearchError

    values = dict(plain_config(objective.default_config(), f"{type(objective).__name__}.suggest"))
    for key, value in given.items():
        _require(key in values, f"--set {key}: {objective.name} has no setting {key!r}", key, list(values))
        if isinstance(values[key], float | int) and isinstance(value, str):
            raise SearchError(f"--set {key}: {key} must be a number, not {value!r}")
        values[key] = value
    return config_of(objective, values)


def _trained(objective: BaseObjective, given: dict[str, Any]) -> TrainConfig:
    from hpsearch.objectives.errors import ObjectiveError
    from hpsearch.objectives.training.config import TrainConfig
    from hpsearch.search.errors import SearchError

    values = objective.default_config().to_dict()
    for key, value in given.items():
        head, dot, name = key.partition(".")
        if head != "model" or not dot:
            values[key] = value
            continue
        known = values["model"]
        _require(
            name in known, f"--set {key}: the model of {objective.name} has no setting {name!r}", name, list(known)
        )
        known[name] = value
    try:
        return TrainConfig.from_dict(values)
    except ObjectiveError as error:
        raise SearchError(f"--set: {error}" if given else str(error)) from None


def _require(there: bool, otherwise: str, name: str, known: list[str]) -> None:
    from hpsearch.objectives.errors import nearest
    from hpsearch.search.errors import SearchError

    if not there:
        raise SearchError(f"{otherwise}: {nearest(name, known) if known else 'the default configuration names none'}")


def _number(value: Any) -> Any:
    """YAML reads 1e-3 as a word."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
