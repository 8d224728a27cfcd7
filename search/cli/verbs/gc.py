"""``hpsearch gc``: what nobody will ask for again is shown, and removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpsearch.search.cli import options as o
from hpsearch.search.cli.confirm import confirm

if TYPE_CHECKING:
    from rich.table import Table

    from hpsearch.search.study.cleanup import Garbage


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(gc)


def gc(
    name: Annotated[str | None, typer.Argument(metavar="[STUDY]", help="The study  [default: all of them]")] = None,
    keep_top: Annotated[
        int, typer.Option("--keep-top", min=1, metavar="K", help="How many of the best trials keep their models.")
    ] = 5,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    home: o.Home = None,
) -> None:
    """Show what of a study can go, ask, and remove it: surplus models, leftover checkpoints, old run directories.

    What a running or waiting trial, a finalist or a registered version refers to stays. Safe while a search runs.
    """
    from rich.filesize import decimal

    from hpsearch.search.api.study import Study
    from hpsearch.search.console import PlainConsole
    from hpsearch.search.study.cleanup import remove_garbage

    found: list[Garbage] = []
    problems: list[str] = []
    for each in [name] if name is not None else _all(storage_url, home):
        some, told = Study.open(each, storage_url=storage_url, tracking_uri=tracking_uri, home=home).garbage(keep_top)
        found, problems = found + some, problems + told
    console = PlainConsole()
    if found:
        console.print(_table(found))
    else:
        console.print("nothing can go")
    for problem in problems:
        typer.echo(f"hpsearch: not looked at: {problem}", err=True)
    if not found or not (yes or confirm(f"remove these {decimal(sum(g.size for g in found))}?")):
        return
    freed, stay = remove_garbage(found)
    for problem in stay:
        typer.echo(f"hpsearch: {problem}", err=True)
    console.print(f"freed {decimal(freed)}")
    if any(garbage.where == "MLflow" for garbage in found):
        console.print("MLflow keeps a small record of each removed model until 'mlflow gc' is run on its server")


def _all(storage_url: str | None, home: str | None) -> list[str]:
    from hpsearch.search.api.study import Study

    return [row.name for row in Study.list(storage_url=storage_url, home=home) if row.ours]


def _table(found: list[Garbage]) -> Table:
    from rich.filesize import decimal
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("study", "what can go", "trials", "where", "size"):
        table.add_column(column, justify="right" if column == "size" else "left")
    for garbage in found:
        table.add_row(garbage.study, garbage.what, _numbers(garbage.trials), garbage.where, decimal(garbage.size))
    return table


def _numbers(trials: tuple[int, ...], most: int = 8) -> str:
    """Return ``0, 3, 4 and 12 more``."""
    more = f" and {len(trials) - most} more" if len(trials) > most else ""
    return ", ".join(map(str, trials[:most])) + more
