"""``hpsearch run``: create or join a study and run it with a fleet on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hpsearch.search.cli import options as o
from hpsearch.search.cli.loading import loading
from hpsearch.search.cli.settings import takes_settings
from hpsearch.search.process import EXIT_INTERRUPTED


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(takes_settings(run))


def run(
    settings: dict[str, Any],
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
    devices_per_trial: o.DevicesPerTrial = 1,
    collective_timeout: o.CollectiveTimeout = None,
    grace: o.Grace = 30.0,
    save_every: o.SaveEvery = None,
    stall: o.Stall = None,
    lease: o.Lease = 60.0,
    tracking_required: o.TrackingRequired = False,
    system_metrics: o.SystemMetrics = False,
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    checkpoint_url: o.CheckpointUrl = None,
    home: o.Home = None,
) -> int:
    """Run a search to the end of its budget; run it again to go on where it stopped."""
    from hpsearch.search.fleet.fork import load_ahead, visible_gpus, workers_on
    from hpsearch.search.services import check_pair
    from hpsearch.search.study.create import check_settings

    check_settings(settings)
    check_pair(storage_url, tracking_uri)  # before anything is loaded

    if workers_per_gpu is not None:
        workers = workers_on(visible_gpus(), sharing=workers_per_gpu, each=devices_per_trial)
    load_ahead(workers)  # while this process loads what it needs itself

    with loading():
        from hpsearch.search.api.study import Study
        from hpsearch.search.run import search as _  # noqa: F401 all that the study will need

    study = Study.from_spec(
        settings, storage_url=storage_url, tracking_uri=tracking_uri, checkpoint_url=checkpoint_url, home=home,
        tracking_required=tracking_required, enqueue=enqueue,
    )  # fmt: skip
    ran = study.run_fleet(
        workers, tracking_required=tracking_required,
        lease=lease, grace=grace, save_every=save_every, stall=stall, system_metrics=system_metrics,
        devices=devices_per_trial, collective_timeout=collective_timeout,
    )  # fmt: skip
    if ran.interrupted:
        return EXIT_INTERRUPTED
    return 0 if not workers or (ran.over and not ran.stopped and ran.summary.best is not None) else 1
