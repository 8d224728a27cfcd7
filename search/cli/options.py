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
