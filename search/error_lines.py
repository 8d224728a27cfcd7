"""The line of an error on stderr, and the exit code of the command."""

from __future__ import annotations

import logging
import os
import platform
import stat
import sys
import traceback
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from hpsearch.redaction import redact
from hpsearch.search.errors import USER_ERRORS
from hpsearch.search.process.exits import EXIT_UNAVAILABLE, EXIT_USER_ERROR
from hpsearch.storage.display import escape_line
from hpsearch.storage.errors import ServiceUnavailableError, StudyNotFoundError, find_full_disk, format_error

_LONGEST_PATH = 4000  # bytes; Linux limits paths of files to 4095


def find_environment_fault() -> str | None:
    """Return a fault of the environment with which no command can work, and its remedy; None if there is none."""
    try:
        here = Path.cwd()
    except OSError:
        return "the working directory was deleted; change to an existing folder"
    if (length := len(os.fsencode(here))) > _LONGEST_PATH:
        return (
            f"the path of the working directory has {length} bytes, and libraries need one of at most {_LONGEST_PATH}; "
            "change to a folder with a shorter path"
        )
    if platform.system() == "Linux" and not Path("/proc/self").exists():
        return "/proc is not mounted, so processes cannot be watched; mount it: mount -t proc proc /proc"
    try:
        datetime.now().astimezone()
    except ValueError:
        return f"TZ={os.environ.get('TZ', '')!r} is invalid: its offset is not below 24 hours; correct or unset TZ"
    os.umask(umask := os.umask(0o077))
    if umask & stat.S_IRWXU:
        return f"the umask {umask:04o} closes new files to their owner; run umask 022 first"
    return None


def report_errors(work: Callable[[], int]) -> int:
    """Run `work` and return its exit code; print user errors and service errors as one line on stderr."""
    try:
        return work()
    except USER_ERRORS as error:
        _print_error(find_environment_fault() or escape_line(str(error)))  # the objective may have deleted the folder
        return EXIT_UNAVAILABLE if isinstance(error, ServiceUnavailableError) else EXIT_USER_ERROR
    except StudyNotFoundError:
        _print_error("another command has deleted the study; list the studies with hpsearch studies")
        return EXIT_USER_ERROR
    except Exception as error:  # database drivers have error classes of their own
        if "No usable temporary directory" in str(error):  # raised by tempfile
            _print_error("no temporary folder is writable; set TMPDIR to a writable folder, or free disk space")
            return EXIT_UNAVAILABLE
        if package := _find_failed_import(error):
            cause = escape_line(f"{type(error).__name__}: {format_error(error, 300)}")
            remedy = "correct the environment variable that the error names, or install the package again"
            _print_error(f"package {package} cannot be imported ({cause}); {remedy}")
            return EXIT_USER_ERROR
        if type(error).__module__.startswith("google.protobuf"):  # of MLflow's client
            cause = escape_line(format_error(error, 300))
            _print_error(f"the tracking server does not answer as MLflow does ({cause}); correct --tracking-uri")
            return EXIT_USER_ERROR
        if isinstance(error, OverflowError):
            logging.getLogger(__name__).debug("overflow", exc_info=True)
            _print_error(
                f"a value is too large for the statistics ({error}); let the objective report values below 1e150"
            )
            return EXIT_USER_ERROR
        if "can't start new thread" in str(error):  # of Python
            _print_error(
                "no thread can be started; raise the limits of processes (ulimit -u, container) and memory (ulimit -v)"
            )
            return EXIT_UNAVAILABLE
        from hpsearch.storage.database.retry import is_cancelled, is_database_error, is_transient

        if not is_database_error(error):
            raise
        logging.getLogger(__name__).debug("database error", exc_info=True)
        cause, is_unavailable = redact(format_error(error)), is_transient(error)
        if is_cancelled(error):
            remedy = "repeat the command, or raise statement_timeout or lock_timeout of the server"
            fault = f"cancelled a statement ({cause}); {remedy}"
            is_unavailable = True
        elif is_unavailable:
            fault = f"is unavailable: {cause}"
        else:
            fault = f"rejected a statement ({cause}); run hpsearch doctor"
        _print_error(f"the database {escape_line(fault)}")
        return EXIT_UNAVAILABLE if is_unavailable else EXIT_USER_ERROR


def _find_failed_import(error: Exception) -> str | None:
    """Return the installed package whose import by a module of hpsearch raised an error; None if none did."""
    if isinstance(error, MemoryError) or find_full_disk(error) is not None:
        return None
    importer = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if importer == "hpsearch" != package and frame.f_code.co_name == "<module>":
            return package
        importer = package
    return None


def _print_error(message: str) -> None:
    try:
        print(f"hpsearch: {message}", file=sys.stderr, flush=True)  # noqa: T201 output for the user
    except OSError:
        discard_stderr()


def discard_stderr() -> None:
    """Discard what is written to stderr, whose disk is full or whose reader has ended: the exit code is right still."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
