"""Commands that run trials: `run`, `worker`, and `fleet print`, which prints job files for engines such as Slurm."""

from __future__ import annotations

import os
import shlex
from typing import Annotated

import typer

from hpsearch.search.cli import options as o
from hpsearch.search.cli.app import SEARCH_SECTION, add_group, disable_gc, echo, register
from hpsearch.search.error_lines import report_errors
from hpsearch.search.process.exits import EXIT_GAVE_UP, EXIT_INTERRUPTED, EXIT_USER_ERROR


@register(SEARCH_SECTION)
def run(
    settings: o.Settings,
    *,
    workers: Annotated[int, o.workers_option("; 0 only creates the study")] = 2,
    workers_per_gpu: Annotated[
        int | None,
        typer.Option("--workers-per-gpu", min=1, max=64, help="Workers that share each GPU; replaces --workers"),
    ] = None,
    enqueue: o.Enqueue = None,
    tracking_required: o.TrackingRequired = False,
    how: o.FleetWorkerOptions,
    where: o.Addresses,
) -> int:
    """Run a search until its budget is spent. Run the command again to resume the search."""
    from hpsearch.search.fleet.cores_and_gpus import count_gpu_workers, visible_gpus
    from hpsearch.search.fleet.fork_server import start_fork_server
    from hpsearch.search.services import check_pair
    from hpsearch.search.spec.resolve import check_settings, replace_flags_in_errors

    with replace_flags_in_errors(settings.file_keys, settings.file):
        check_settings(settings.values)
    check_pair(where)  # before the slow imports

    if workers_per_gpu is not None:
        workers = count_gpu_workers(visible_gpus(), workers_per_gpu=workers_per_gpu, gpus_per_trial=how["devices"])
    start_fork_server(workers)  # loads its modules while this process imports its own

    with disable_gc():
        from hpsearch.search.cli.probe import ObjectiveProcess, check_import
        from hpsearch.search.console import PlainConsole
        from hpsearch.search.fleet.rank_launcher import check_devices
        from hpsearch.search.run.search import run_search
        from hpsearch.search.study.create import begin_search
        from hpsearch.search.study.study import require_one_device
        from hpsearch.search.tracking.tracker import check_trackers

    options = o.WorkerOptions(tracking_required=tracking_required, **where, **how)
    check_devices(options)  # before the study is created
    require_one_device(settings.values.get("folds"), options.world_size)
    check_import(str(settings.values["objective"]))
    console = PlainConsole(outlives_pipe=True)
    with ObjectiveProcess(settings.values) as process:
        with replace_flags_in_errors(settings.file_keys, settings.file):
            services, study, is_new, objective = begin_search(
                settings.values, where, console, enqueue,
                check=check_trackers, inspect=process.inspect, tracking_required=tracking_required,
            )  # fmt: skip
        ran = run_search(
            services, study, options, workers=workers, created=is_new, console=console, delete_rejected=is_new,
            loaded=objective,
            run_test=process.run_smoke_test,
        )  # fmt: skip
    if ran.is_interrupted:
        return EXIT_INTERRUPTED
    return 0 if not workers or (ran.is_finished and not ran.stopped and ran.summary.best is not None) else 1


@register(SEARCH_SECTION)
def worker(
    study: Annotated[str, typer.Option("--study", help="Name of the study", autocompletion=o.complete_study)],
    *,
    final_exit_code: Annotated[
        int | None,
        typer.Option(
            "--final-exit-code",
            min=0,
            max=125,
            help="Exit code that replaces 2 (invalid setting) and 3 (trials fail), to prevent restarts",
        ),
    ] = None,
    options: o.WorkerOptions,
) -> int:
    """Join a study and run its trials.

    A worker runs on any machine that reaches the study's database. Sampler, pruner, seed and budget come from the
    study. After SIGTERM or Ctrl-C, the worker finishes the epoch, or writes a mid-epoch checkpoint if --grace is too
    short. Then the worker releases the trial for another worker. Further SIGTERMs have no effect; a second Ctrl-C ends
    the worker immediately.

    Exit codes: 0 if no work is left or the study is stopped; 143 if a signal stopped the worker with work left; 1 if a
    service is unavailable; 2 if a setting is wrong; 3 if every trial fails, or the first 5 trials of the worker or the
    last 20 of the study failed with the same error. Start a worker again after 143 and 1.
    """
    with disable_gc():
        from hpsearch.search.fleet.rank_launcher import join_study_on_devices
        from hpsearch.search.worker.lifecycle import join_study

    join = join_study if options.world_size == 1 else join_study_on_devices
    if final_exit_code is None:
        return join(study, options)
    code = report_errors(lambda: join(study, options))
    return final_exit_code if code in {EXIT_USER_ERROR, EXIT_GAVE_UP} else code


_fleet = add_group("fleet", SEARCH_SECTION, "Run workers under Slurm, Kubernetes, Ray or systemd.")


@_fleet.command("size")
@o.add_flags
def set_fleet_size(
    study: o.StudyName,
    workers: Annotated[int, typer.Argument(min=0, max=100_000, metavar="N", help="Number of workers; 0 for no number")],
    *,
    where: o.Addresses,
) -> None:
    """Set the number of workers that a study should have.

    It starts none: `top` and the metric hpsearch_wanted_workers compare it with the active workers.
    """
    from hpsearch.search.api.study import Study
    from hpsearch.storage.attributes import WANTED_WORKERS

    found = Study.open(study, **where)
    found._stored.set_attr(WANTED_WORKERS, workers)
    echo(f"study {study} should have {workers} workers")


@_fleet.command("print")
def print_job_file(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="slurm, kubernetes, ray or systemd")],
    study: o.StudyName,
    *,
    workers: Annotated[int, typer.Option("--workers", help="Number of workers")],
    gpus: Annotated[float, typer.Option("--gpus-per-worker", help="GPUs per worker; with 0.5, two share a GPU")] = 0.0,
    cpus: Annotated[int, typer.Option("--cpus-per-worker", help="CPU cores per worker")] = 2,
    memory: Annotated[str, typer.Option("--memory", help="Memory per worker, with the unit M, G or T")] = "8G",
    time: Annotated[
        str | None, typer.Option("--time", help="Slurm time limit, [DAYS-]HH:MM:SS  [default: the partition's]")
    ] = None,
    grace: Annotated[int, typer.Option("--grace", help="Seconds from SIGTERM to SIGKILL of a worker")] = 60,
    image: Annotated[str | None, typer.Option("--image", help="Container image; required for Kubernetes")] = None,
    command: Annotated[
        str | None,
        typer.Option(
            "--command",
            help="Command that starts hpsearch, for Slurm and systemd  [default: this Python with -m hpsearch]",
        ),
    ] = None,
    storage_url: o.StorageUrl = None,
    home: o.Home = None,
) -> None:
    """Print the job file that starts workers of a study under Slurm, Kubernetes, Ray or systemd.

    The file is the input of sbatch, `kubectl apply -f -` or `python -P -`, or a systemd unit. The command starts
    nothing. It rejects a --storage-url with a password, so that no password is printed.
    """
    from hpsearch.search.errors import SearchError
    from hpsearch.search.launch.launch import LaunchConfig, check_study_exists, render_manifest
    from hpsearch.storage.home import prepare_home

    try:
        words = tuple(shlex.split(command or ""))
    except ValueError as error:
        raise SearchError(f"--command {command!r} cannot be parsed ({error}); quote it as for a shell") from None
    if home is None and storage_url is None and engine != "kubernetes":
        home = str(prepare_home())  # the job must use the same embedded stack
    launch = LaunchConfig(
        engine=engine, study=study, workers=workers, gpus=gpus, cpus=cpus, memory=memory, time=time, grace=grace,
        image=image, storage_url=storage_url.strip() if storage_url else None,
        home=os.path.abspath(home) if home else None,  # noqa: PTH100 resolved links may differ on the node
        command=words, folder=os.getcwd(),  # noqa: PTH109 a string
    )  # fmt: skip
    if why := check_study_exists(launch):
        echo(f"hpsearch: could not check that study {study!r} exists: {why}", err=True)
    if storage_url is None and engine != "kubernetes":
        echo(
            "hpsearch: the embedded services run on this machine only; give --storage-url for workers elsewhere",
            err=True,
        )
    echo(render_manifest(launch), nl=False)
