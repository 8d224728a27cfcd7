"""``hpsearch worker``: join a study by its name and run trials until the budget is spent."""

from __future__ import annotations

from typing import Annotated

import typer

from search.cli import options as o
from search.cli.loading import loading


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
    lease: o.Lease = 60.0,
    tracking_required: o.TrackingRequired = False,
    system_metrics: o.SystemMetrics = False,
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    checkpoint_url: o.CheckpointUrl = None,
    home: o.Home = None,
) -> int:
    """Run trials of a study, here or on any machine that reaches its database; sampler, pruner, seed and budget
    come from the study. SIGTERM or Ctrl-C ends the epoch, saves, and leaves the trial for another worker; SIGTERM may
    come again, a second Ctrl-C ends it at once.

    Exit code 0: nothing is left, or the study is stopped; 143: it was told to go and there is work left; 1: a service
    does not answer, start it again; 2, a setting is wrong, and 3, the objective fails every trial, are final.
    """
    with loading():
        from search.worker.join import WorkerOptions, join_study

    options = WorkerOptions(
        storage_url=storage_url, tracking_uri=tracking_uri, checkpoint_url=checkpoint_url, home=home,
        device=device, lease=lease, tracking_required=tracking_required, system_metrics=system_metrics,
    )  # fmt: skip
    return join_study(study, options)
