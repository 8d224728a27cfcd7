"""``hpsearch retry``: a failed trial is run again, under its number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from search.cli import options as o

if TYPE_CHECKING:
    from storage.mlflow.client import Tracking


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(retry)


def retry(
    name: o.StudyName,
    trial: Annotated[list[int], typer.Option("--trial", min=0, help="Number of the trial; may be given again.")],
    *,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Run it from its first epoch, not from its last checkpoint.")
    ] = False,
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    home: o.Home = None,
) -> None:
    """Run a failed or infeasible trial again: same number, same parameters, same MLflow run, retries counted anew."""
    from search.cli.mlflow import tell_mlflow
    from search.cli.open_study import open_for_reading
    from search.publish.study import reopen_study, reopen_trial_run
    from search.study.steering import retry_trial
    from search.study.study import load_study

    services, storage = open_for_reading(storage_url, tracking_uri, home)
    study = load_study(storage, name)
    retried = []
    for number in dict.fromkeys(trial):
        was, epoch = retry_trial(study, number, from_start=from_start)
        retried.append(was)
        where = "from its beginning" if epoch is None else f"after epoch {epoch + 1}, its last checkpoint's"
        typer.echo(f"trial {number} waits to be run again, {where}")

    def tell(tracking: Tracking) -> None:
        for was in retried:
            reopen_trial_run(was, tracking)
        reopen_study(study, tracking)

    tell_mlflow(services, study, tell)
    typer.echo(f"workers that run take it up; else: {study.go_on}")
