"""Arguments and settings of the commands that need an objective but no study."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpsearch.search.spec.spec import OBJECTIVE_HELP

if TYPE_CHECKING:
    from hpsearch.objectives.base_objective import BaseObjective


ObjectiveArgument = Annotated[str, typer.Argument(metavar="OBJECTIVE", help=OBJECTIVE_HELP)]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Training setting, such as lr=1e-3 or model.width=64; repeatable; 'objective show' lists all settings",
    ),
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:N  [default: cuda if available]")]
RunSeed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the data split, initial weights and data order")]


def make_config(objective: BaseObjective, pairs: list[str] | None) -> Any:
    """Return the objective's default configuration, overridden by ``KEY=VALUE`` settings.

    Raises:
        SearchError: a setting is not KEY=VALUE, or is missing in the default configuration.
        ObjectiveError: a setting is unknown or its value is invalid.
    """
    from hpsearch.objectives.custom_loop.loop_objective import LoopObjective, config_from_json, config_to_json
    from hpsearch.objectives.errors import ObjectiveError
    from hpsearch.objectives.training.config import TrainConfig
    from hpsearch.search.errors import SearchError, as_search_error
    from hpsearch.search.spec.resolve import parse_options

    given = {key: _to_number(value) for key, value in parse_options("--set", pairs or [], example="lr=1e-3").items()}
    if isinstance(objective, LoopObjective):
        own = dict(config_to_json(objective.default_config(), f"{type(objective).__name__}.suggest"))
        for key, value in given.items():
            if isinstance(own.get(key), float | int) and isinstance(value, str):
                raise SearchError(f"--set {key}: {key} must be a number, not {value!r}")
            _replace(own, key, value, f"--set {key}: objective {objective.name}")
        return config_from_json(objective, own)
    values = objective.default_config().to_dict()
    for key, value in given.items():
        if key.startswith("model."):
            _replace(values["model"], key.removeprefix("model."), value, f"--set {key}: the model of {objective.name}")
        else:
            values[key] = value
    with as_search_error("--set: " if given else "", ObjectiveError):
        return TrainConfig(**values)


def _replace(values: dict[str, Any], name: str, value: Any, owner: str) -> None:
    """Replace the value of an existing key.

    Raises:
        SearchError: `values` has no key `name`.
    """
    from hpsearch.search.errors import SearchError, suggest_names

    if name not in values:
        hint = suggest_names(name, values) if values else "; the default configuration has no settings"
        raise SearchError(f"{owner} has no setting {name!r}{hint}")
    values[name] = value


def _to_number(value: Any) -> Any:
    """Return a value with texts such as ``1e-3`` converted to numbers, because YAML reads them as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
