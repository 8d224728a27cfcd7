"""``hpsearch finalists``: the best trials of a search are trained anew on fresh seeds, and one of them wins."""

from __future__ import annotations

from typing import Annotated

import typer

from hpsearch.search.cli import options as o
from hpsearch.search.cli.loading import loading
from hpsearch.search.process import EXIT_INTERRUPTED


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(finalists)


def finalists(
    study: o.StudyName,
    *,
    top: Annotated[
        int | None,
        typer.Option(
            "--top", min=1, help="How many of the best configurations  [default: 5; of several metrics the front]"
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="How many fresh seeds, the same for all  [default: 2]")
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            "--workers", min=0, max=512, help="Worker processes on this machine; 0 chooses and shows, and trains none."
        ),
    ] = 2,
    new_set: Annotated[
        bool,
        typer.Option(
            "--new-set",
            help="Choose anew, on other seeds; an earlier winner stands until these have one.",
        ),
    ] = False,
    infeasible: Annotated[
        bool, typer.Option("--infeasible", help="Take trials too that break a constraint of the study.")
    ] = False,
    devices_per_trial: o.DevicesPerTrial = 1,
    collective_timeout: o.CollectiveTimeout = None,
    grace: o.Grace = 30.0,
    save_every: o.SaveEvery = None,
    stall: o.Stall = None,
    lease: o.Lease = 60.0,
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    checkpoint_url: o.CheckpointUrl = None,
    home: o.Home = None,
) -> int:
    """Train the best trials of a finished search again, on fresh seeds and divisions that are the same for all.

    The best of many over-states itself: the winner is chosen on the fresh runs alone, which also tell what to expect of
    it on new data. The test split stays as it is. Called again it goes on where it stopped, and shows the table when
    all is done. Other machines join with 'worker --study STUDY.finalists'.
    """
    from hpsearch.search.fleet.fork import load_ahead
    from hpsearch.search.services import check_pair

    check_pair(storage_url, tracking_uri)  # before anything is loaded

    load_ahead(workers)  # while this process loads what it needs itself

    with loading():
        from hpsearch.search.api.study import Study
        from hpsearch.search.console import PlainConsole, steps
        from hpsearch.search.run import finalists as _  # noqa: F401 all that the study will need

    with steps(PlainConsole()) as tell:
        opened = Study.open(
            study,
            storage_url=storage_url,
            tracking_uri=tracking_uri,
            checkpoint_url=checkpoint_url,
            home=home,
            progress=tell,
        )
    ran = opened.train_finalists(
        top, seeds, workers=workers, new_set=new_set, infeasible=infeasible,
        lease=lease, grace=grace, save_every=save_every, stall=stall,
        devices=devices_per_trial, collective_timeout=collective_timeout,
    )  # fmt: skip
    if ran.interrupted:
        return EXIT_INTERRUPTED
    decided = ran.table.decided if workers or not ran.table.pending else True
    return 0 if decided else 1
