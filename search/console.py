"""Console output: counts, commands to type, and progress lines."""

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

_WIDE = 200  # columns, where nobody has set how many there are: a table in a file must not fold


class PlainConsole(Console):
    """Prints text as it is: error messages and paths hold brackets that are no markup."""

    def __init__(self, *, stderr: bool = False) -> None:
        terminal = (sys.stderr if stderr else sys.stdout).isatty()
        width = None if terminal or "COLUMNS" in os.environ else _WIDE
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True, width=width)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, but for the blanks with which it fills a table's last column."""
        super().print(*(_Ragged(each) if isinstance(each, Table) else each for each in objects), **options)

    def on_broken_pipe(self) -> None:
        """Leave it to the caller: a reader that goes away must not end a search."""
        raise  # noqa: PLE0704 rich calls this while it handles the BrokenPipeError


class _Ragged:
    """A table whose lines end where their text does: a log is not filled with blanks, nor a copied line."""

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
    """Return an empty table without lines.

    Args:
        columns: their headings.
        right: the columns that are aligned to the right.
        wrap: the columns whose cells may have several lines; None for all.
        header_style: of the headings.
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


def counted(number: int, noun: str) -> str:
    """Return ``1 worker`` or ``2 workers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def command(*arguments: str) -> str:
    """Return a command line of ours as the user would type it, quoted, with the wrapper's name where it is in use."""
    return shlex.join([os.environ.get("HPSEARCH_COMMAND", "hpsearch"), *arguments])


@contextmanager
def steps(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that tells what is being done: a spinner on a terminal, a line each elsewhere."""
    if not console.is_terminal:
        yield console.print
        return
    with console.status("") as status:
        yield status.update
