"""``hpsearch studies``: a line per study."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from hpsearch.search.cli import options as o

if TYPE_CHECKING:
    from hpsearch.search.api.opening import StudyRow


_NUMBERS = ("trials", "complete", "pruned", "failed", "running")
_COLUMNS = ("study", "objective", *_NUMBERS, "best", "promoted")
_ALWAYS = {"study", "objective", "trials", "complete", "best"}
_LEAST = {"study": 5, "objective": 8, "best": 9}  # columns: what is folded narrower cannot be read


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(studies)


def studies(storage_url: o.StorageUrl = None, home: o.Home = None) -> None:
    """List the studies and where they stand."""
    from rich.table import Table

    from hpsearch.search.api.study import Study
    from hpsearch.search.console import PlainConsole, command

    found = [_cells(row) for row in Study.list(storage_url=storage_url, home=home)]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    # What no study has takes no room: a terminal of 80 columns has none for all of them.
    kept = [name for name in _COLUMNS if name in _ALWAYS or any(row.get(name, "0") not in ("0", "") for row in found)]
    for name in kept:
        right, least = name in _NUMBERS, _LEAST.get(name)
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=right, min_width=least)
    for row in found:
        table.add_row(*(row.get(name, "") for name in kept))
    if table.row_count:
        PlainConsole().print(table)
    else:
        typer.echo(f"no studies yet; start one with: {command('run', 'digits')}")


def _cells(row: StudyRow) -> dict[str, str]:
    from hpsearch.objectives.errors import shown

    if not row.ours:
        return {"study": row.name, "objective": "(not made by hpsearch)"}
    kind = " (finalists)" if row.of_finalists else " (refit)" if row.of_refit else ""
    name = row.name + kind + (" (stopped)" if row.stopped else "")
    name += " (stopped early)" if row.stopped_early else ""
    best = "" if row.best_value is None else f"{row.metric} {row.best_value:.4f} (trial {row.best_number})"
    best += f", {row.front} on the front" if row.front else ""
    path, colon, cls = row.objective.rpartition(":")
    return {
        "study": name,
        "objective": f"{shown(path)}{colon}{cls}" if path.startswith("/") else row.objective,
        "trials": row.done.removesuffix(" trials"),
        **{state: str(getattr(row, state)) for state in _NUMBERS[1:]},
        "best": best,
        "promoted": ", ".join(row.promoted),
    }
