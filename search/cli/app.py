"""The app that commands register on, and the helpers that they share."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Annotated, Any

import typer

from hpsearch.search.cli.options import with_flags

# The sections of --help, in their order.
SEARCH = "Search"
STEER = "Watch and steer"
CONFIRM = "Confirm and promote"
OBJECTIVES = "Objectives"
SERVICES = "Services"

app = typer.Typer(
    name="hpsearch",
    help="Hyperparameter search for PyTorch: Optuna workers share a Postgres study and log to MLflow.",
    epilog="The wrapper ./hpsearch has four more commands: 'add' (packages for objectives), 'test', 'lint' and 'docs'.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hpsearch {metadata.version('hpsearch')}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_print_version)
]


@app.callback()
def _root(version: _Version = False) -> None: ...


def register(section: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as a command, in a section of --help; parameters that are models become flags."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        app.command(rich_help_panel=section)(with_flags(function))
        return function

    return add


def group(name: str, section: str, words: str) -> typer.Typer:
    """Return a group of commands, such as `serve`, in a section of --help."""
    made = typer.Typer(help=words, no_args_is_help=True)
    app.add_typer(made, name=name, rich_help_panel=section)
    return made


@contextmanager
def loading() -> Iterator[None]:
    """Import without the garbage collector: it finds nothing then, and takes a quarter of the time (6.3 s to 4.7 s)."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # what was loaded stays: later collections pass over it
        gc.enable()


def confirm(question: str) -> bool:
    """Ask a yes-or-no question; return the answer.

    Raises:
        SearchError: there is no terminal, as in a job.
    """
    from hpsearch.search.errors import SearchError

    try:
        return typer.confirm(question)
    except typer.Abort:
        if sys.stdin is not None and sys.stdin.isatty():
            raise
        typer.echo(err=True)
        raise SearchError("there is no terminal to answer on: give --yes") from None
