"""Console output: tables, counts, command lines, and progress lines."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table

_FILE_COLUMNS = 200  # without a terminal and COLUMNS: tables in files must not wrap


class PlainConsole(Console):
    """A rich console without markup, because error messages and paths contain brackets."""

    def __init__(self, *, stderr: bool = False) -> None:
        is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
        width = None if is_terminal or "COLUMNS" in os.environ else _FILE_COLUMNS
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True, width=width)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print like rich's console, but without trailing spaces in the lines of tables."""
        super().print(*(_UnpaddedTable(each) if isinstance(each, Table) else each for each in objects), **options)

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError. Rich's method exits the process, but a closed pipe must not end a search."""
        raise  # noqa: PLE0704 rich calls this while it handles the BrokenPipeError


class _UnpaddedTable:
    """A table without trailing spaces, which are unwanted in logs and copied lines."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for line in console.render_lines(self._table, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                last = line.pop()
                yield from line
                yield Segment(last.text.rstrip(), last.style)
            yield Segment.line()


def plain_table(
    *columns: str, right: Container[str] = (), wrap: Container[str] | None = None, header_style: str = "bold"
) -> Table:
    """Return an empty table without borders.

    Args:
        columns: headings.
        right: right-aligned columns.
        wrap: columns whose cells may wrap; None lets all columns wrap.
        header_style: rich style of the headings.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style=header_style)
    for column in columns:
        is_fixed = wrap is not None and column not in wrap
        table.add_column(
            column,
            justify="right" if column in right else "left",
            overflow="ellipsis" if is_fixed else "fold",
            no_wrap=is_fixed,
        )
    return table


def pluralize(number: int, noun: str) -> str:
    """Return the number with the noun, in plural if necessary: ``1 worker``, ``2 workers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_command(*arguments: str) -> str:
    """Return an hpsearch command line as the user types it: quoted, and with the name of the wrapper script, if any."""
    return shlex.join([os.environ.get("HPSEARCH_COMMAND", "hpsearch"), *arguments])


@contextmanager
def show_steps(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current step: next to a spinner on a terminal, else as a separate line."""
    if not console.is_terminal:
        yield console.print
        return
    with console.status("") as status:
        yield status.update
