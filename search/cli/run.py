"""How searches are started: by `run`, by a `worker` that joins, and by the files that engines take."""

from __future__ import annotations

import os
import shlex
from typing import Annotated

import typer

from hpsearch.search.cli import options as o
from hpsearch.search.cli.app import SEARCH, group, loading, register
from hpsearch.search.process import EXIT_GAVE_UP, EXIT_INTERRUPTED, EXIT_USER_ERROR, report_errors


@register(SEARCH)
def run(
    settings: o.Settings,
    *,
    workers: Annotated[
        int,
        typer.Option("--workers", min=0, max=512, help="Worker processes on this machine; 0 only creates the study."),
    ] = 2,
    workers_per_gpu: Annotated[
        int | None,
        typer.Option(
            "--workers-per-gpu", min=1, max=64, help="In place of --workers: so many on each GPU, for small models."
        ),
    ] = None,
    enqueue: o.Enqueue = None,
    tracking_required: o.TrackingRequired = False,
    how: o.Working,
    where: o.Addresses,
) -> int:
    """Run a search to the end of its budget; run it again to go on where it stopped."""
    from hpsearch.search.fleet.fork import load_ahead, visible_gpus, workers_on
    from hpsearch.search.services import check_pair
    from hpsearch.search.spec.settings import check_settings

    check_settings(settings)
    check_pair(where["storage_url"], where["tracking_uri"])  # before anything is loaded

    if workers_per_gpu is not None:
        workers = workers_on(visible_gpus(), sharing=workers_per_gpu, each=how["devices"])
    load_ahead(workers)  # while this process loads what it needs itself

    with loading():
        from hpsearch.search.console import PlainConsole
        from hpsearch.search.run.search import begin_search, run_search

    options = o.WorkerOptions(tracking_required=tracking_required, **where, **how)
    console = PlainConsole()
    services, study, created = begin_search(settings, options, console, enqueue)
    ran = run_search(services, study, options, workers=workers, created=created, console=console)
    if ran.interrupted:
        return EXIT_INTERRUPTED
    return 0 if not workers or (ran.over and not ran.stopped and ran.summary.best is not None) else 1


@register(SEARCH)
def worker(
    study: Annotated[str, typer.Option("--study", help="The study's name.")],
    *,
    final_exit_code: Annotated[
        int | None,
        typer.Option(
            "--final-exit-code",
            min=0,
            max=125,
            help="Exit with this in place of 2 and 3, where every other code but 0 is started again: 0 for Docker.",
        ),
    ] = None,
    options: o.WorkerOptions,
) -> int:
    """Run trials of a study, here or on any machine that reaches its database; sampler, pruner, seed and budget
    come from the study. SIGTERM or Ctrl-C ends the epoch, or saves within it where --grace is too short for that, and
    leaves the trial for another worker; SIGTERM may come again, a second Ctrl-C ends it at once.

    Exit code 0: nothing is left, or the study is stopped; 143: it was told to go and there is work left; 1: a service
    does not answer, start it again; 2, a setting is wrong, and 3, the objective fails every trial, are final.
    """
    with loading():
        from hpsearch.search.fleet.devices import join_on_devices
        from hpsearch.search.worker.join import join_study

    join = join_study if options.world == 1 else join_on_devices
    if final_exit_code is None:
        return join(study, options)
    code = report_errors(lambda: join(study, options))
    return final_exit_code if code in {EXIT_USER_ERROR, EXIT_GAVE_UP} else code


_fleet = group("fleet", SEARCH, "Workers under Slurm, Kubernetes, Ray or systemd.")


@_fleet.command("print")
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
