"""``hpsearch worker``: join a study by its name and run trials until the budget is spent."""

from __future__ import annotations

from typing import Annotated

import typer

from hpsearch.search.cli import options as o
from hpsearch.search.cli.loading import loading
from hpsearch.search.process import EXIT_GAVE_UP, EXIT_USER_ERROR, telling_mistakes


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(worker)


def worker(
    study: Annotated[str, typer.Option("--study", help="The study's name.")],
    *,
    device: Annotated[
        str | None,
        typer.Option("--device", help="cpu, cuda or cuda:N  [default: cuda where there is one]"),
    ] = None,
    devices: Annotated[
        int,
        typer.Option(
            "--devices",
            min=1,
            max=1024,
            envvar="HPSEARCH_DEVICES",
            show_envvar=True,
            help="Devices of this machine that train each trial together, a process each.",
        ),
    ] = 1,
    nodes: Annotated[
        int,
        typer.Option(
            "--nodes",
            min=1,
            max=1024,
            help="Machines that train each trial together, --devices each: start this on all of them, by srun, or with "
            "MASTER_ADDR and MASTER_PORT set.",
        ),
    ] = 1,
    collective_timeout: o.CollectiveTimeout = None,
    grace: o.Grace = 30.0,
    save_every: o.SaveEvery = None,
    leave_when_idle: Annotated[
        float | None,
        typer.Option(
            "--leave-when-idle",
            min=0,
            help="Leave after so many seconds without a trial to take, while others run theirs.",
        ),
    ] = None,
    max_trials: Annotated[int | None, typer.Option("--max-trials", min=1, help="Leave after so many trials.")] = None,
    max_time: Annotated[
        float | None, typer.Option("--max-time", min=0, help="Leave after so many seconds, as if told to go.")
    ] = None,
    stall: o.Stall = None,
    heartbeat: Annotated[
        str | None, typer.Option("--heartbeat", help="A file to touch while it gets on, for a probe to look at.")
    ] = None,
    final_exit_code: Annotated[
        int | None,
        typer.Option(
            "--final-exit-code",
            min=0,
            max=125,
            help="Exit with this in place of 2 and 3, where every other code but 0 is started again: 0 for Docker.",
        ),
    ] = None,
    lease: o.Lease = 60.0,
    tracking_required: o.TrackingRequired = False,
    system_metrics: o.SystemMetrics = False,
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    checkpoint_url: o.CheckpointUrl = None,
    home: o.Home = None,
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
        from hpsearch.search.worker.options import WorkerOptions

    options = WorkerOptions(
        storage_url=storage_url, tracking_uri=tracking_uri, checkpoint_url=checkpoint_url, home=home,
        device=device, lease=lease, tracking_required=tracking_required, system_metrics=system_metrics,
        grace=grace, save_every=save_every, leave_when_idle=leave_when_idle, max_trials=max_trials, max_time=max_time,
        stall=stall, heartbeat=heartbeat, devices=devices, nodes=nodes, collective_timeout=collective_timeout,
    )  # fmt: skip
    join = join_study if options.world == 1 else join_on_devices
    if final_exit_code is None:
        return join(study, options)
    code = telling_mistakes(lambda: join(study, options))
    return final_exit_code if code in {EXIT_USER_ERROR, EXIT_GAVE_UP} else code
