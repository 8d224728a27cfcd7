"""``hpsearch open-test``: the sealed test set of a study is opened, once, for the winner."""

from __future__ import annotations

from typing import Annotated

import typer

from search.cli import options as o
from search.cli.confirm import confirm


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command("open-test")(open_test)


def open_test(
    name: o.StudyName,
    *,
    trial: Annotated[
        int | None,
        typer.Option("--trial", min=0, help="Number of the trial, with --unconfirmed  [default: the winner]"),
    ] = None,
    unconfirmed: Annotated[
        bool,
        typer.Option("--unconfirmed", help="Open it for a trial that did not win among finalists; it is marked so."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    home: o.Home = None,
) -> None:
    """Score the best weights of the finalists' winner on the test set, which opens once in the life of a study."""
    from search.cli.mlflow import tell_mlflow
    from search.cli.open_study import open_for_reading
    from search.console import command
    from search.errors import SearchError
    from search.finalists.text import confirmation_lines
    from search.promotion.open_test import choose_candidate, open_for
    from search.publish.study import close_study
    from search.study.study import load_study
    from search.study.summary import summarise
    from storage.attributes import TRACKING_URI
    from storage.mlflow.health import check_server
    from storage.records.test_openings import AlreadyOpenError

    services, storage = open_for_reading(storage_url, tracking_uri, home)
    study = load_study(storage, name)
    if (of := study.spec.finalists_of) is not None:
        raise SearchError(f"study {name!r} holds finalists: open the test set of {of.study!r}")
    try:
        candidate = choose_candidate(study, trial=trial, unconfirmed=unconfirmed)
        number, mark = candidate.trial.number, "" if candidate.finalists else ", unconfirmed by finalists"
        if not yes:
            question = f"open the test set of {name} for trial {number}{mark}? It opens once."
            if not confirm(question):
                raise typer.Abort
        uri = services.tracking_uri or study.attrs.get(TRACKING_URI)
        if uri is None:
            raise SearchError(f"study {name!r} names no tracking server: give --tracking-uri")
        check_server(uri)
        opening = open_for(study, candidate, services.open_tracking(uri))
    except AlreadyOpenError as error:
        raise SearchError(f"study {name!r}: {error}; see it with: {command('show', name)}") from None
    for metric, value in (opening.scores or {}).items():
        typer.echo(f"test {metric} {value:.6g}")
    for line in confirmation_lines(study):
        typer.echo(line)
    tell_mlflow(services, study, lambda tracking: close_study(study, summarise(study), tracking))
