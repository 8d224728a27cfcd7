"""The command line: a thin layer over :class:`hpsearch.Study`. It prints a user error as one line, with exit code 2."""

from __future__ import annotations

import errno
import functools
import gc
import logging
import os
import re
import sys
import traceback
from contextlib import suppress
from typing import Any

import typer

from hpsearch.former_names import CURRENT_NAMES
from hpsearch.search.cli import confirm, monitor, objective, run, serve, services, steer, train
from hpsearch.search.cli.app import app, echo
from hpsearch.search.console import EscapingFormatter
from hpsearch.search.error_lines import find_environment_fault, report_errors
from hpsearch.search.errors import suggest_names
from hpsearch.search.process.children import end_started_programs, remember_session
from hpsearch.search.process.exits import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_UNAVAILABLE,
    EXIT_USER_ERROR,
    call_at_end,
)
from hpsearch.search.process.signals import ignore_stop_signals
from hpsearch.search.secret_files import read_secret_files
from hpsearch.search.spec.kinds import rephrase_error
from hpsearch.standard_streams import find_broken_streams
from hpsearch.storage.errors import FULL_DISK_ERRORS

COMMANDS = (
    run,
    monitor,
    steer,
    confirm,
    objective,
    train,
    services,
    serve,
)  # their imports register the commands on the app

_PASSWORD = re.compile(r"://[^/?#\s]*:[^/?#\s]*@")
_VISIBLE_ARGUMENTS = (
    "other users of this machine can read the password in these arguments while the command runs; put it into a "
    "variable or a file (PGPASSWORD_FILE, MLFLOW_TRACKING_PASSWORD_FILE)"
)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    if fault := find_environment_fault():  # otherwise each command fails with an error of its own
        echo(f"hpsearch: {fault}", err=True)
        sys.exit(EXIT_USER_ERROR)
    sys.excepthook = _print_traceback
    remember_session()
    call_at_end(end_started_programs)  # a program with the inherited stdout would keep `| tee` from ending
    if logging.lastResort is not None:  # prints the warnings of commands that configure no log
        logging.lastResort.setFormatter(EscapingFormatter())
    logging.raiseExceptions = False  # a log on a full disk must not add a traceback per line
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # a full pipe that does not block would lose text
            os.set_blocking(stream.fileno(), True)
    given = sys.argv[1:] if arguments is None else arguments
    streams = sys.stdout, sys.stderr
    try:
        if any(map(_PASSWORD.search, given)):
            echo(f"hpsearch: {_VISIBLE_ARGUMENTS}", err=True)
        code = run_command(given)
        sys.stdout, sys.stderr = streams  # an objective may have replaced them
        sys.stdout.flush()
    except OSError as error:
        broken = find_broken_streams()
        is_closed = bool(broken) and error.errno in (errno.EPIPE, errno.EIO)  # its reader or terminal has ended
        if not is_closed and error.errno not in {*FULL_DISK_ERRORS, errno.EIO}:
            raise
        code = EXIT_DONE if is_closed else EXIT_UNAVAILABLE
        if sys.stderr not in broken and not is_closed:
            target = "the output" if error.filename is None else repr(error.filename)
            use = "read or written" if error.errno == errno.EIO else "written"
            echo(f"hpsearch: {target} cannot be {use} ({error.strerror})", err=True)
        for stream in broken:  # otherwise the interpreter reports the unwritten rest
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if given[:1] == ["worker"]:  # engines depend on its exit code
        ignore_stop_signals()
    gc.freeze()  # otherwise the garbage collection at exit takes 2 s after a search
    sys.exit(code)


def _print_traceback(*error: Any) -> None:
    """Print the traceback of an internal error; its message may contain control characters."""
    echo("".join(traceback.format_exception(*error)), err=True, nl=False)


_build_command = functools.cache(typer.main.get_command)  # takes as long as many a command


def run_command(arguments: list[str]) -> int:
    """Run one command and return its exit code; print a user error as one line on stderr and return 2."""
    command = _build_command(app)

    def call_command() -> int:
        read_secret_files()  # before the options are parsed, which read environment variables
        try:
            result = command.main(args=arguments, prog_name="hpsearch", standalone_mode=False)
        except typer.Abort:  # an Exception, whose handler would import modules again that may be incomplete
            raise KeyboardInterrupt from None
        return result if isinstance(result, int) else 0

    try:
        return report_errors(call_command)
    except (OSError, UnicodeError) as error:
        if "--install-completion" not in arguments:
            raise
        echo(
            f"hpsearch: --install-completion: a file of the shell cannot be changed ({error}); correct it, or add the "
            "output of --show-completion to the file yourself",
            err=True,
        )
        return EXIT_USER_ERROR
    except typer.TyperException as error:
        message = error.format_message()
        # Without a command, the message is the help.
        line = message if message.startswith("Usage: ") else f"hpsearch: {_add_value(error, message, arguments)}"
        echo(line, err=True)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        echo("hpsearch: interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if not find_broken_streams():
            raise
        return 0
    except UnicodeEncodeError as error:  # files may have such names, but names of studies may not
        if error.reason != "surrogates not allowed":
            raise
        echo(
            f"hpsearch: {error.object[:80]!a} is not valid {sys.getfilesystemencoding().upper()}; use another name",
            err=True,
        )
        return EXIT_USER_ERROR


_ONE_DEVICE_COMMANDS = ("train", "smoke", "lr-range")
_SEVERAL_DEVICES = ("unknown option --devices", "unknown option --nodes")


def _add_value(error: typer.TyperException, message: str, given: list[str]) -> str:
    """Return typer's error message, completed by the rejected value and a reference to the help."""
    for name in getattr(getattr(error, "param", None), "opts", []):
        if (found := re.search(rf"'{name}'(?: \(env var: '(\w+)'\))?:", message)) is None:
            continue
        if name in given[:-1]:
            message = message.replace(found[0], f"{name} {given[given.index(name) + 1]!r}:")
        elif (joined := next((each for each in given if each.startswith(f"{name}=")), None)) is not None:
            message = message.replace(found[0], f"{name} {joined.partition('=')[2]!r}:")
        elif found[1] is not None and found[1] in os.environ:
            message = message.replace(found[0], f"{found[1]} {os.environ[found[1]]!r}:")
    if hasattr(error, "option_name") and hasattr(error, "possibilities"):
        near = [*(error.possibilities or ()), *filter(None, [CURRENT_NAMES.get(error.option_name)])]
        close = suggest_names(error.option_name, near) if near else ""
        message = f"unknown option {error.option_name}{close}"
    context = getattr(error, "ctx", None)
    if context and context.info_name in _ONE_DEVICE_COMMANDS and message.startswith(_SEVERAL_DEVICES):
        message = f"{context.info_name} uses one device; for several, use 'run OBJECTIVE --trials 1 --devices N'"
    return f"{rephrase_error(message)} (see '{context.command_path} --help')" if context else rephrase_error(message)
