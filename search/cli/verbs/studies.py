"""``hpsearch studies``: a line per study."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from search.cli import options as o

if TYPE_CHECKING:
    from search.api.opening import StudyRow


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(studies)


def studies(storage_url: o.StorageUrl = None, home: o.Home = None) -> None:
    """List the studies and where they stand."""
    from rich.table import Table

    from search.api.study import Study
    from search.console import PlainConsole, command

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("study", "objective", "trials", "complete", "pruned", "failed", "running", "best", "promoted"):
        table.add_column(column, justify="left" if column in {"study", "objective", "best", "promoted"} else "right")
    for row in Study.list(storage_url=storage_url, home=home):
        table.add_row(*_cells(row))
    if table.row_count:
        PlainConsole().print(table)
    else:
        typer.echo(f"no studies yet; start one with: {command('run', 'digits')}")


def _cells(row: StudyRow) -> tuple[str, ...]:
    if not row.ours:
        return row.name, "(not made by hpsearch)"
    name = row.name + (" (finalists)" if row.of_finalists else "") + (" (stopped)" if row.stopped else "")
    best = "" if row.best_value is None else f"{row.metric} {row.best_value:.4f} (trial {row.best_number})"
    counts = (f"{row.finished}/{row.budget}", row.complete, row.pruned, row.failed, row.running)
    return name, row.objective, *map(str, counts), best, ", ".join(row.promoted)
