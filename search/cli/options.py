"""Options that several verbs share, each written once with its type, help and environment variable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
Spec = Annotated[Path | None, typer.Option("--spec", help="Study spec as a .toml or .yaml file; flags win over it.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the study  [default: the objective's name]")]
Trials = Annotated[
    int | None,
    typer.Option("--trials", help="Budget: how many trials the study runs  [default: the objective's]"),
]
Epochs = Annotated[int | None, typer.Option("--epochs", help="Epochs of a full trial  [default: the objective's]")]
Metric = Annotated[
    str | None, typer.Option("--metric", help="Validation metric to optimise  [default: the objective's]")
]
Direction = Annotated[str | None, typer.Option("--direction", help="maximize or minimize  [default: the objective's]")]
Sampler = Annotated[str | None, typer.Option("--sampler", help="tpe, random, qmc or gp  [default: tpe]")]
SamplerOption = Annotated[
    list[str] | None,
    typer.Option("--sampler-option", metavar="KEY=VALUE", help="Option of the sampler; may be given again."),
]
Pruner = Annotated[
    str | None,
    typer.Option(
        "--pruner",
        help="median, percentile, successive_halving, hyperband, threshold or none  [default: median]",
    ),
]
PrunerOption = Annotated[
    list[str] | None,
    typer.Option("--pruner-option", metavar="KEY=VALUE", help="Option of the pruner; may be given again."),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of the data split and of every trial  [default: 0]")]
Retries = Annotated[
    int | None,
    typer.Option("--retries", help="How many attempts at a trial may come to nothing before it fails  [default: 2]"),
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", help="Seconds after which no new trial is started  [default: none]"),
]
Models = Annotated[
    str | None,
    typer.Option("--models", help="Which trials leave a registrable model: complete, all or none  [default: complete]"),
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
