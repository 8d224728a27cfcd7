"""Options of commands: the settings of a study, generated from its model, and those that several commands share."""

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
from hpsearch.search.spec.kinds import Kind
from hpsearch.search.spec.multi_objective import USUAL
from hpsearch.search.spec.settings import parse_options, read_spec_file

StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="The study's name.")]
StorageUrl = Annotated[
    str | None,
    typer.Option(
        "--storage-url",
        envvar="HPSEARCH_STORAGE_URL",
        show_envvar=True,
        help="Postgres of the studies, postgresql://USER@HOST/DATABASE; without it the embedded one is used.",
    ),
]
TrackingUri = Annotated[
    str | None,
    typer.Option(
        "--tracking-uri",
        envvar="HPSEARCH_TRACKING_URI",
        show_envvar=True,
        help="MLflow tracking server, http(s)://HOST:PORT; without it the embedded one is used.",
    ),
]
Home = Annotated[
    str | None,
    typer.Option(
        "--home",
        envvar="HPSEARCH_HOME",
        show_envvar=True,
        help="Folder of the embedded services, checkpoints and logs; without it the user's data folder.",
    ),
]
CheckpointUrl = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-url",
        envvar="HPSEARCH_CHECKPOINT_URL",
        show_envvar=True,
        help="Folder or fsspec URL (s3://BUCKET/PREFIX) where all machines find the checkpoints; the study keeps it.",
    ),
]
TrackingRequired = Annotated[
    bool,
    typer.Option(
        "--tracking-required",
        help="Refuse to start while MLflow does not answer; without it what is logged waits on disk.",
    ),
]
SystemMetrics = Annotated[
    bool,
    typer.Option(
        "--system-metrics",
        envvar="HPSEARCH_SYSTEM_METRICS",
        show_envvar=True,
        help="Log the machine's load (CPU, memory, disk, network, GPU) to each trial's run.",
    ),
]
Lease = Annotated[
    float,
    typer.Option(
        "--lease",
        min=1.0,
        max=86_400.0,
        envvar="HPSEARCH_LEASE",
        show_envvar=True,
        help="Seconds without a sign of life after which others take a worker's trial over.",
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        "--grace",
        min=0.0,
        envvar="HPSEARCH_GRACE",
        show_envvar=True,
        help="Seconds from SIGTERM to the kill: an epoch that does not end in time is saved in its midst.",
    ),
]
DevicesPerTrial = Annotated[
    int,
    typer.Option(
        "--devices-per-trial",
        min=1,
        max=1024,
        envvar="HPSEARCH_DEVICES",
        show_envvar=True,
        help="Devices of this machine that train each trial together, a process each.",
    ),
]
CollectiveTimeout = Annotated[
    float | None,
    typer.Option(
        "--collective-timeout",
        envvar="HPSEARCH_COLLECTIVE_TIMEOUT",
        show_envvar=True,
        help="Seconds in which all devices of a trial have to come to a step  [default: half of --lease]",
    ),
]
SaveEvery = Annotated[
    float | None,
    typer.Option(
        "--save-every",
        envvar="HPSEARCH_SAVE_EVERY",
        show_envvar=True,
        help="Minutes after which an epoch that takes longer is saved in its midst  [default: at its end alone]",
    ),
]
Stall = Annotated[
    float | None,
    typer.Option(
        "--stall",
        envvar="HPSEARCH_STALL",
        show_envvar=True,
        help="Restart a worker, and give its trial back, when it takes no step for so many times its longest pause.",
    ),
]
Enqueue = Annotated[
    Path | None,
    typer.Option(
        "--enqueue",
        metavar="FILE",
        help="A .csv or .jsonl file of configurations, which are run before others and count in the budget.",
    ),
]
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
