"""Questions before what cannot be undone."""

from __future__ import annotations

import sys

import typer


def confirm(question: str) -> bool:
    """Ask; return the answer.

    Raises:
        SearchError: nobody is there to answer, as in a job without a terminal.
    """
    from hpsearch.search.errors import SearchError

    try:
        return typer.confirm(question)
    except typer.Abort:
        if sys.stdin is not None and sys.stdin.isatty():
            raise
        typer.echo(err=True)
        raise SearchError("there is no terminal to answer on: give --yes") from None
