"""``hpsearch top``: a study and its workers as they are now."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Annotated

import typer

from hpsearch.search.cli import options as o


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(top)


def top(
    name: o.StudyName,
    as_json: Annotated[bool, typer.Option("--json", help="Print it once as JSON, for scripts.")] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Print it once; so it is done where there is no terminal.")
    ] = False,
    every: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two looks.")] = 2.0,
    storage_url: o.StorageUrl = None,
    home: o.Home = None,
) -> None:
    """Watch a study: its workers on all machines, their trials, epochs and leases, what ended and why, and when it
    will be over. Ctrl-C ends it.
    """
    from rich.live import Live

    from hpsearch.search.api.study import Study
    from hpsearch.search.console import PlainConsole
    from hpsearch.search.report.top import Pace, read_standing, render

    study, console, pace = Study.open(name, storage_url=storage_url, home=home), PlainConsole(), Pace()
    if as_json:
        typer.echo(read_standing(study.stored).to_json())
        return
    if once or not console.is_terminal:
        standing = read_standing(study.stored)
        console.print(render(standing, pace.of(standing), width=console.width))
        return
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            standing = read_standing(study.stored)
            view = render(standing, pace.of(standing), width=console.width, height=console.height)
            live.update(view, refresh=True)
            time.sleep(every)  # a look; nothing wakes it
