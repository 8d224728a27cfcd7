"""The settings of a study as flags, and from a spec file and flags to what was set."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from pydantic.fields import FieldInfo

from hpsearch.search.errors import SearchError
from hpsearch.search.spec import spec as specs
from hpsearch.search.spec.files import parse_options, read_spec_file
from hpsearch.search.spec.kinds import Kind
from hpsearch.search.spec.multi_objective import USUAL

_Spec = Annotated[Path | None, typer.Option("--spec", help="Study spec as a .toml or .yaml file; flags win over it.")]


def takes_settings(verb: Callable[..., int]) -> Callable[..., int]:
    """Give a verb that takes `settings` a flag for each field of the study spec, and --spec for a file of them."""
    own = inspect.signature(verb, eval_str=True)
    flags = [_parameter("spec", _Spec)]
    for key, field in specs.StudySpec.model_fields.items():
        if key not in specs.IN_FILES_ONLY:
            flags += _parameters(key, field)
    flags.sort(key=lambda flag: flag.name != "objective")

    @functools.wraps(verb)
    def with_flags(**given: Any) -> int:
        values = {flag.name: given.pop(flag.name) for flag in flags}
        return verb(gather_settings(values.pop("spec"), values), **given)

    others = [parameter for name, parameter in own.parameters.items() if name != "settings"]
    with_flags.__signature__ = own.replace(parameters=[*flags, *others])  # type: ignore[attr-defined]  # Typer reads it
    return with_flags


def _parameters(key: str, field: FieldInfo) -> list[inspect.Parameter]:
    """Return the flag of a setting; of what has options of its own, another one for these."""
    if isinstance(field.default, Kind):
        names = ", ".join(sorted(field.default.kinds))
        named = typer.Option(
            f"--{key}", show_default=f"{field.default.name}; with --directions {USUAL[key]}", help=names
        )
        more = typer.Option(f"--{key}-option", metavar="KEY=VALUE", help=f"Option of the {key}; may be given again.")
        return [
            _parameter(key, Annotated[str | None, named]),
            _parameter(f"{key}_option", Annotated[list[str] | None, more]),
        ]
    if key == "objective":
        return [_parameter(key, Annotated[str | None, typer.Argument(metavar="[OBJECTIVE]", help=field.description)])]
    if field.annotation is bool:
        switch = f"{specs.typed(key)}/--no-{specs.typed(key).removeprefix('--')}"
        words = typer.Option(switch, show_default=specs.typed(key).removeprefix("--"), help=field.description)
        return [_parameter(key, Annotated[bool | None, words])]
    default = "the objective's" if field.is_required() else "none" if field.default is None else field.default
    option = typer.Option(specs.typed(key), show_default=str(default), help=field.description)
    kinds = {field.annotation, *get_args(field.annotation)}
    kind: Any = next((kind for kind in (int, float) if kind in kinds), str)
    return [_parameter(key, Annotated[kind | None, option])]


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def gather_settings(spec_file: Path | None, flags: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that were given: the file's, with the flags laid over them."""
    settings = read_spec_file(spec_file) if spec_file else {}
    flags = {key: value for key, value in flags.items() if value is not None}
    for key in ("sampler", "pruner"):
        name, options = flags.pop(key, None), parse_options(f"--{key}-option", flags.pop(f"{key}_option", []))
        if name is None and not options:
            continue
        kept = settings.get(key, {})
        if not isinstance(kept, dict):
            raise SearchError(f"{key} is {kept!r}: give its name, or a table with its name and options")
        if name is not None and name != kept.get("name"):
            kept = {"name": name}
        settings[key] = {**kept, **options}
    settings |= flags
    if "objective" not in settings:
        raise SearchError("OBJECTIVE is missing: name one, such as digits, or give --spec FILE with 'objective'")
    return settings
