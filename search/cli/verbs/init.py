"""``hpsearch init``: a first objective of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpsearch.search.console import command


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(init)


def init(
    path: Annotated[Path, typer.Argument(metavar="FILE.py", help="File to write; it must not exist.")],
) -> None:
    """Write a small objective that runs as it is, to be made one's own."""
    from hpsearch.objectives.template import write_template

    write_template(path)
    typer.echo(f"wrote {path}; run it with: {command('run', str(path))}")
