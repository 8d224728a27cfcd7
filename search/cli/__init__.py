"""The command line: a thin layer over :class:`search.Study`; mistakes are told in one line, with exit code 2."""

from __future__ import annotations

import gc as garbage
import re
import sys
from importlib import metadata
from typing import Annotated

import typer

from hpsearch.search.cli import verbs
from hpsearch.search.process import (
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    find_modules_here,
    leave_when_told,
    telling_mistakes,
)
from hpsearch.search.secret_files import read_secret_files
from hpsearch.search.spec.kinds import load_modules

app = typer.Typer(
    name="hpsearch",
    help="Hyperparameter search for PyTorch: Optuna workers share a Postgres study and log to MLflow.",
    epilog="The wrapper ./hpsearch has four verbs more: 'add' (what objectives import), 'test', 'lint' and 'docs'.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# The order of --help; a verb that is not here comes after these.
ORDER = (
    *("run", "worker", "fleet", "studies", "show", "report", "delete", "init"),
    *("stop", "start", "extend", "retry", "sync"),
    *("finalists", "open_test"),
    *("promote", "serve_check", "gc"),
    *("train", "smoke", "lr_range", "objective"),
    *("stack", "doctor", "backup", "migrate", "serve", "secrets"),
)


def add_verbs(app: typer.Typer) -> None:
    """Add every module of :mod:`hpsearch.search.cli.verbs` to a command line."""
    found = load_modules(verbs.__name__, verbs.__path__)
    for name in sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
        found[name].register(app)


add_verbs(app)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hpsearch {metadata.version('hpsearch')}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", help="Say which version this is, and exit.", is_eager=True, callback=_say_version)
]


@app.callback()
def _root(version: _Version = False) -> None: ...


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    leave_when_told()
    find_modules_here()
    code = _run(arguments)
    garbage.freeze()  # the interpreter's end looks through all there is for cycles: 2 s after a search
    sys.exit(code)


def _run(arguments: list[str] | None) -> int:
    command = typer.main.get_command(app)

    def work() -> int:
        read_secret_files()  # before the options, some of which the environment gives
        result = command.main(args=arguments, prog_name="hpsearch", standalone_mode=False)
        return result if isinstance(result, int) else 0

    try:
        return telling_mistakes(work)
    except typer.TyperException as error:
        if message := error.format_message():  # none when the help was shown for want of a verb
            typer.echo(f"hpsearch: {_with_value(error, message, arguments)}", err=True)
        return EXIT_USER_ERROR
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("hpsearch: stopped", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return 0


def _with_value(error: typer.TyperException, message: str, arguments: list[str] | None) -> str:
    """Return the message with the value that was refused and where to read on; typer leaves the value out."""
    given = sys.argv[1:] if arguments is None else arguments
    for name in getattr(getattr(error, "param", None), "opts", []):
        if name in given[:-1]:
            message = message.replace(f"'{name}':", f"'{name}', {given[given.index(name) + 1]!r}:")
    message = re.sub(r"Input should be (.+?)(, unable to .+)?$", r"it must be \1", message)
    context = getattr(error, "ctx", None)
    return f"{message} (see '{context.command_path} --help')" if context else message
