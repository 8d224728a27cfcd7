"""The console of every verb, and how it writes numbers of things and the commands that a user is to type."""

from __future__ import annotations

import os
import shlex
import sys

from rich.console import Console

_WIDE = 200  # columns, where nobody has set how many there are: a table in a file must not fold


class PlainConsole(Console):
    """Prints text as it is: error messages and paths hold brackets that are no markup."""

    def __init__(self, *, stderr: bool = False) -> None:
        terminal = (sys.stderr if stderr else sys.stdout).isatty()
        width = None if terminal or "COLUMNS" in os.environ else _WIDE
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True, width=width)

    def on_broken_pipe(self) -> None:
        """Leave it to the caller: a reader that goes away must not end a search."""
        raise  # noqa: PLE0704 rich calls this while it handles the BrokenPipeError


def counted(number: int, noun: str) -> str:
    """Return ``1 worker`` or ``2 workers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def command(*arguments: str) -> str:
    """Return a command line of ours as the user would type it, quoted, with the wrapper's name where it is in use."""
    return shlex.join([os.environ.get("HPSEARCH_COMMAND", "hpsearch"), *arguments])
