"""Telling what is being done, where it takes more than a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def steps(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that tells what is being done: a spinner on a terminal, a line each elsewhere."""
    if not console.is_terminal:
        yield console.print
        return
    with console.status("") as status:
        yield status.update
