"""``hpsearch open-test``: the sealed test set of a study is opened, once, for the winner."""

from __future__ import annotations

from typing import Annotated

import typer

from hpsearch.search.cli import options as o
from hpsearch.search.cli.confirm import confirm


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command("open-test")(open_test)


def open_test(
    name: o.StudyName,
    *,
    trial: Annotated[
        int | None,
        typer.Option(
            "--trial",
            min=0,
            help="Number of the trial, with --unconfirmed or of several metrics  [default: the winner]",
        ),
    ] = None,
    prefer: Annotated[
        str | None,
        typer.Option("--prefer", help="In place of --trial, of several metrics: see 'promote --help'."),
    ] = None,
    unconfirmed: Annotated[
        bool,
        typer.Option("--unconfirmed", help="Open it for a trial that did not win among finalists; it is marked so."),
    ] = False,
    refit: Annotated[
        bool,
        typer.Option("--refit", help="Open it for the winner's refit, which 'promote --refit' has trained."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    home: o.Home = None,
) -> None:
    """Score the best weights of the finalists' winner on the test set, which opens once in the life of a study."""
    from hpsearch.search.api import actions
    from hpsearch.search.api.study import Study
    from hpsearch.search.errors import SearchError
    from hpsearch.search.finalists.text import confirmation_lines

    if trial is not None and prefer is not None:
        raise SearchError(f"--trial {trial} and --prefer both name a trial: leave one out")
    study = Study.open(name, storage_url=storage_url, tracking_uri=tracking_uri, home=home)
    if prefer is not None:
        trial = study.preferred(prefer)
    candidate = actions.choose(study.stored, trial=trial, unconfirmed=unconfirmed, refit=refit)
    number, mark = candidate.trial.number, "" if candidate.finalists else ", unconfirmed by finalists"
    if not yes and not confirm(f"open the test set of {name} for {candidate.subject}{mark}? It opens once."):
        raise typer.Abort
    for metric, value in study.open_test(trial=number, unconfirmed=unconfirmed, refit=refit).items():
        typer.echo(f"test {metric} {value:.6g}")
    for line in confirmation_lines(study.stored):
        typer.echo(line)
