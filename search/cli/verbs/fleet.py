"""``hpsearch fleet print``: what Slurm, Kubernetes, Ray or systemd is given to run workers."""

from __future__ import annotations

import os
import shlex
from typing import Annotated

import typer

from hpsearch.search.cli import options as o


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    group = typer.Typer(help="Workers under Slurm, Kubernetes, Ray or systemd.", no_args_is_help=True)
    group.command("print")(print_)
    group.callback()(_group)
    app.add_typer(group, name="fleet")


def _group() -> None:
    """Workers under Slurm, Kubernetes, Ray or systemd."""


def print_(
    engine: Annotated[str, typer.Argument(help="slurm, kubernetes, ray or systemd.")],
    study: o.StudyName,
    *,
    workers: Annotated[int, typer.Option("--workers", help="How many.")],
    gpus: Annotated[
        float,
        typer.Option("--gpus-per-worker", help="0, a whole number, or below 1: 0.5 lets two workers share a GPU."),
    ] = 0.0,
    cpus: Annotated[int, typer.Option("--cpus-per-worker", help="Cores of each worker, and its threads.")] = 2,
    memory: Annotated[str, typer.Option("--memory", help="Of each worker, with M, G or T.")] = "8G",
    time: Annotated[
        str | None,
        typer.Option("--time", help="Slurm's time limit, [DAYS-]HOURS:MINUTES:SECONDS  [default: the partition's]"),
    ] = None,
    grace: Annotated[int, typer.Option("--grace", help="Seconds that a worker has from its notice to the kill.")] = 60,
    image: Annotated[str | None, typer.Option("--image", help="Kubernetes' image with hpsearch; it needs one.")] = None,
    command: Annotated[
        str | None,
        typer.Option(
            "--command", help="What starts hpsearch there, for Slurm and systemd  [default: this Python, with its path]"
        ),
    ] = None,
    storage_url: o.StorageUrl = None,
    home: o.Home = None,
) -> None:
    """Print what an engine is given to run workers of a study: for sbatch, `kubectl apply -f -`, `python -`, or as a
    unit of systemd. Nothing is started, and no password is printed: a URL that holds one is refused.
    """
    from hpsearch.search.errors import SearchError
    from hpsearch.search.launch.launch import Launch, printed, why_unknown
    from hpsearch.storage.home import home_dir

    try:
        words = tuple(shlex.split(command or ""))
    except ValueError as error:
        raise SearchError(f"--command {command!r} cannot be read ({error}): quote it as for a shell") from None
    if home is None and storage_url is None and engine != "kubernetes":
        home = str(home_dir())  # the embedded stack's, wherever it is told to run
    launch = Launch(
        engine=engine, study=study, workers=workers, gpus=gpus, cpus=cpus, memory=memory, time=time, grace=grace,
        image=image, storage_url=storage_url.strip() if storage_url else None,
        home=os.path.abspath(home) if home else None,  # noqa: PTH100 a link may lead elsewhere there
        command=words, folder=os.getcwd(),  # noqa: PTH109 as it is
    )  # fmt: skip
    if why := why_unknown(launch):
        typer.echo(f"hpsearch: nobody was asked whether there is a study {study!r}: {why}", err=True)
    if storage_url is None and engine != "kubernetes":
        typer.echo(
            "hpsearch: the embedded stack answers on this machine alone: for others give --storage-url", err=True
        )
    typer.echo(printed(launch), nl=False)
