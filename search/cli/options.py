"""Command-line options: flags generated from the settings of studies and workers, and options that commands share."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, is_typeddict

import typer
from pydantic.fields import FieldInfo

from hpsearch.former_names import RENAMED_VARIABLES
from hpsearch.search.errors import SearchError
from hpsearch.search.spec import spec as specs
from hpsearch.search.spec.defaults import EXCEPTIONS
from hpsearch.search.spec.kinds import RegisteredOptions
from hpsearch.search.spec.resolve import parse_options
from hpsearch.search.spec.spec_file import read_spec_file
from hpsearch.search.worker.options import (
    MAX_LOCAL_WORKERS,
    PER_WORKER_OPTIONS,
    FleetWorkerOptions,
    WorkerOptions,
    format_flag,
    format_variable,
)
from hpsearch.storage.urls import Addresses

__all__ = ["Addresses", "FleetWorkerOptions", "WorkerOptions"]


class Settings(NamedTuple):
    """The given settings of a study, and the names of the settings that come from a file."""

    values: dict[str, Any]
    file_keys: set[str]
    file: Path | None = None


def worker_option(name: str) -> Any:
    """Return the typer option of a field of `WorkerOptions`."""
    variable = None if name in PER_WORKER_OPTIONS else format_variable(name)
    help_text = WorkerOptions.model_fields[name].description
    panel = "Addresses" if name in Addresses.__annotations__ else "Workers"
    return typer.Option(format_flag(name), envvar=variable, show_envvar=True, help=help_text, rich_help_panel=panel)


def complete_study(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the studies for tab completion; none if the database is unavailable. Starts no service."""
    from sqlalchemy.engine import make_url

    from hpsearch.storage.database.connect import open_cursor
    from hpsearch.storage.embedded.stack import find_running
    from hpsearch.storage.home import resolve_home
    from hpsearch.storage.urls import normalise_url

    with contextlib.suppress(Exception):  # a message would destroy the line that the user types
        given: str | None = ctx.params.get("storage_url")
        if given is None and (running := find_running(resolve_home(ctx.params.get("home")))) is not None:
            given = running.storage_url
        if given is not None:
            url = make_url(normalise_url(given)).update_query_dict({"connect_timeout": "2"})
            with open_cursor(
                url.render_as_string(hide_password=False), application_name="hpsearch completion"
            ) as cursor:
                cursor.execute("SELECT study_name FROM studies ORDER BY study_name")
                # A worker's role can write any name, and shells evaluate parts of the names that they complete.
                names = (name for (name,) in cursor.fetchall() if re.fullmatch(specs.NAME_PATTERN, name))
                return [name for name in names if name.startswith(incomplete)]
    return []


StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="Name of the study", autocompletion=complete_study)]
StorageUrl = Annotated[str | None, worker_option("storage_url")]
TrackingUri = Annotated[str | None, worker_option("tracking_uri")]
Home = Annotated[str | None, worker_option("home")]
TrackingRequired = Annotated[bool, worker_option("tracking_required")]
Enqueue = Annotated[
    Path | None,
    typer.Option(
        "--enqueue",
        metavar="FILE",
        help="CSV or JSONL file of configurations, which run before sampled ones and count toward the budget",
    ),
]


def workers_option(help_suffix: str) -> Any:
    """Return the typer option `--workers`."""
    return typer.Option(
        "--workers", min=0, max=MAX_LOCAL_WORKERS, help=f"Number of worker processes on this machine{help_suffix}"
    )


def trial_option(help_suffix: str) -> Any:
    """Return the typer option `--trial`."""
    return typer.Option("--trial", min=0, help=f"Number of {help_suffix}")


Infeasible = Annotated[bool, typer.Option("--infeasible", help="Include trials that violate a constraint of the study")]
Prefer = Annotated[
    str | None,
    typer.Option(
        "--prefer",
        help="Rule that selects a trial on the Pareto front: conditions, 'then', and the metric to optimize, such "
        "as 'accuracy >= 0.98 then latency_ms'",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation prompt")]
_Spec = Annotated[
    Path | None,
    typer.Option(
        "--spec",
        help="TOML or YAML file with settings of the study; command-line options override them",
        rich_help_panel="Study",
    ),
]


def add_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace each parameter of type `Settings`, `WorkerOptions` or TypedDict by one flag per field of the type."""
    own = inspect.signature(command, eval_str=True)
    expanded = {name: found for name, parameter in own.parameters.items() if (found := _flags(parameter.annotation))}

    @functools.wraps(command)
    def wrapper(**given: Any) -> Any:
        for name, (flags, gather) in expanded.items():
            given[name] = gather({flag.name: given.pop(flag.name) for flag in flags})
        return command(**given)

    parameters = [
        flag.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in own.parameters.items()
        for flag in (expanded[name][0] if name in expanded else [parameter])
    ]
    wrapper.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # Typer reads it
    return wrapper


def _flags(kind: Any) -> tuple[list[inspect.Parameter], Callable[[dict[str, Any]], Any]] | None:
    """Return the flags for a parameter of type `kind`, and a function that makes its value from the flag values.

    Returns:
        None if a parameter of this type is not replaced by flags.
    """
    if kind is Settings:
        fields = {key: field for key, field in specs.StudySpec.model_fields.items() if key not in specs.FILE_ONLY_KEYS}
        flags = [flag for key, field in fields.items() for flag in _study_flags(key, field)]
        flags = [flags.pop([flag.name for flag in flags].index("objective")), _parameter("spec", _Spec), *flags]
        return flags, lambda values: gather_settings(values.pop("spec"), values)
    if kind is WorkerOptions:
        return [_worker_flag(name) for name in WorkerOptions.model_fields], _make_worker_options
    if is_typeddict(kind):
        return [_worker_flag(name) for name in kind.__annotations__], _check_worker_options
    return None


def _make_worker_options(values: dict[str, Any]) -> WorkerOptions:
    for former, current in RENAMED_VARIABLES.items():
        if former in os.environ:
            raise SearchError(f"{former}={os.environ[former]} is no longer supported; set {current} instead")
    return WorkerOptions(**values)


def _check_worker_options(values: dict[str, Any]) -> dict[str, Any]:
    _make_worker_options(values)
    return values


def _worker_flag(name: str) -> inspect.Parameter:
    field = WorkerOptions.model_fields[name]
    return _parameter(name, Annotated[_type_of(field), worker_option(name)], field.default)


def _study_flags(key: str, field: FieldInfo) -> list[inspect.Parameter]:
    """Return the flag of a setting; for `sampler` and `pruner`, also the flag --sampler-option or --pruner-option."""
    if key == "objective":
        return [_parameter(key, Annotated[str | None, typer.Argument(metavar="OBJECTIVE", help=field.description)])]
    if isinstance(field.default, RegisteredOptions):
        names = ", ".join(sorted(field.default.registry))
        default = f"{field.default.name}; {EXCEPTIONS[key]}"
        more = typer.Option(
            f"--{key}-option", metavar="KEY=VALUE", help=f"Setting of the {key}; repeatable", rich_help_panel="Study"
        )
        return [
            _parameter(key, Annotated[str | None, _study_option(key, names, default)]),
            _parameter(f"{key}_option", Annotated[list[str] | None, more]),
        ]
    default = "the objective's" if field.is_required() else field.default
    if field.annotation is bool:
        default = "on" if field.default else "off"
    return [_parameter(key, Annotated[_type_of(field) | None, _study_option(key, str(field.description), default)])]


def _study_option(key: str, help_text: str, default: Any) -> Any:
    flag = specs.get_option_name(key)
    if default in {"on", "off"}:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    help_text = help_text if default is None else f"{help_text}  [default: {default}]"
    return typer.Option(flag, help=help_text, rich_help_panel="Study")


def _type_of(field: FieldInfo) -> Any:
    """Return the type to which typer converts the flag value of a field."""
    parts = {part for kind in (field.annotation, *get_args(field.annotation)) for part in (kind, *get_args(kind))}
    kind = next((kind for kind in (bool, int, float) if kind in parts), str)
    return kind if field.default is not None else kind | None


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def gather_settings(spec_file: Path | None, flags: dict[str, Any]) -> Settings:
    """Return the settings of the spec file, overridden by the flags."""
    settings = read_spec_file(spec_file) if spec_file else {}
    flags = {key: value for key, value in flags.items() if value is not None}
    in_file = settings.keys() - flags.keys()
    for key in ("sampler", "pruner"):
        name, options = flags.pop(key, None), parse_options(f"--{key}-option", flags.pop(f"{key}_option", []))
        if name is None and not options:
            continue
        kept = settings.get(key, {})
        if not isinstance(kept, dict):
            raise SearchError(f"{key} is {kept!r}; give the name of a {key}, or a table with its name and options")
        if name is not None and name != kept.get("name"):
            kept = {"name": name}
        settings[key] = {**kept, **options}
    settings |= flags
    if "objective" not in settings:
        raise SearchError("OBJECTIVE is missing; give one such as digits, or --spec FILE with the setting 'objective'")
    return Settings(settings, in_file, spec_file)
