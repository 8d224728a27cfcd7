"""``hpsearch show``: one study, its spec, its counts and its trials, or one of its trials."""

from __future__ import annotations

from typing import Annotated

import typer

from hpsearch.search.cli import options as o


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(show)


def show(
    name: o.StudyName,
    every: Annotated[bool, typer.Option("--all", help="List every trial, not only the last 20.")] = False,
    trial: Annotated[
        int | None,
        typer.Option("--trial", min=0, help="Show this one: parameters, attempts, values, and why it ended as it did."),
    ] = None,
    storage_url: o.StorageUrl = None,
    home: o.Home = None,
) -> None:
    """Show a study: its spec, what it came to so far, and its trials; or one trial, with --trial."""
    from hpsearch.search.api.opening import notice_promotions
    from hpsearch.search.api.study import Study
    from hpsearch.search.console import PlainConsole
    from hpsearch.search.report.show import print_study, print_trial

    study = Study.open(name, storage_url=storage_url, home=home)
    stored = study.stored
    notice_promotions(study.services, stored.storage, stored)
    if trial is None:
        print_study(PlainConsole(), stored, study.services.dashboard_url, every=every)
    else:
        print_trial(PlainConsole(), stored, trial)
