"""Run code of an objective in a forked process first, because native code of its libraries may end the process."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Self, TypeVar, cast

import optuna

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.errors import ObjectiveError, format_path
from hpsearch.objectives.loading import load_objective
from hpsearch.objectives.private_folders import make_socket_folder
from hpsearch.objectives.references import BUILTIN, locate_source, normalize_reference
from hpsearch.objectives.training.checks.smoke import SmokeResult
from hpsearch.objectives.training.data.loader import kill_with_parent
from hpsearch.search.console import format_command
from hpsearch.search.errors import USER_ERRORS
from hpsearch.search.process.children import bind_children, kill_session
from hpsearch.search.process.exits import EXIT_UNAVAILABLE
from hpsearch.search.process.signals import ENDING_SIGNALS
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.create import load_for_search
from hpsearch.search.study.preflight import inspect_objective, run_random_smoke_test

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
_SECONDS = 10  # the import itself reports errors of slower imports, as far as the process survives them
_REPORT_SECONDS = 60
_QUIET_TRACKER = "ignore:resource_tracker"
_ENDED = 77  # exit code of a forked process whose import has returned, also with an exception
_IMPORT = "import sys; from hpsearch.objectives.loading import load_objective; load_objective(sys.argv[1])"


def load_probed_objective(reference: str) -> BaseObjective:
    """Load an objective as `load_objective` does, after `check_import`. What its code forks ends with this process."""
    _share_socket_folder()
    check_import(reference)
    bind_children()
    return load_objective(reference)


def _share_socket_folder() -> None:
    with contextlib.suppress(OSError, ObjectiveError):  # the code may need no such folder
        make_socket_folder()


def check_import(reference: str) -> None:
    """Check that importing an objective does not end the process.

    Raises:
        ObjectiveError: the import crashes, or calls `os._exit`. Other errors are left to the import itself.
    """
    if sys.platform != "linux" or normalize_reference(reference) in BUILTIN:
        return
    if (file := locate_source(reference)) is None or (how := _probe(reference)) is None:
        return
    if how in {signal.Signals(number).name for number in _CRASHES} and not _crashes_in_interpreter(reference):
        return  # libraries may be unable to run in a forked process
    command = shlex.join(["python", "-X", "faulthandler", format_path(file)])
    raise ObjectiveError(
        f"objective {reference!r} ends the process during its import ({how}); trace it with: {command}"
    )


def _fork() -> int:
    """Fork this process. Python would ignore a KeyboardInterrupt in the functions that libraries run after a fork."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return os.fork()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _probe(reference: str) -> str | None:
    """Import an objective in a forked process; return the signal or exit code that ended it, None if none did."""
    import torch  # noqa: F401  # before the fork, so that the forked process and the command load it once

    parent = os.getpid()
    if (pid := _fork()) == 0:
        try:
            kill_with_parent(parent)
            os.setsid()  # without a terminal, at which code such as getpass would wait
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_SECONDS)
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(null, descriptor)
            bind_children()
            with contextlib.suppress(BaseException):
                load_objective(reference)
        finally:
            os._exit(_ENDED)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    kill_session(pid)  # programs that the import has started
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        number = signal.Signals(os.WTERMSIG(status))
        return None if number == signal.SIGALRM else number.name
    code = os.WEXITSTATUS(status)
    return None if code == _ENDED else f"exit code {code}"


def _crashes_in_interpreter(reference: str) -> bool:
    """Return whether the import also crashes a new interpreter."""
    command = [sys.executable, "-P", "-c", _IMPORT, reference]
    return -subprocess.run(command, capture_output=True, check=False).returncode in _CRASHES


class ObjectiveProcess:
    """Forked process that runs the objective's code before the first trial, so that a crash does not end the command.

    It is forked before the command imports the objective, and imports the objective when it is needed. For built-in
    objectives, and on other systems than Linux, the code runs in the process of the command.

    Args:
        settings: the given settings of the study.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings, self._reference = settings, str(settings["objective"])
        self._pid: int | None = None

    def __enter__(self) -> Self:
        if sys.platform == "linux" and normalize_reference(self._reference) not in BUILTIN:
            _share_socket_folder()
            self._connection, theirs = multiprocessing.Pipe()
            parent = os.getpid()
            if (pid := _fork()) == 0:
                try:
                    self._connection.close()
                    kill_with_parent(parent)
                    os.setsid()  # without a terminal, at which code such as getpass would wait
                    self._serve(theirs)
                finally:
                    os._exit(EXIT_UNAVAILABLE)
            self._pid = pid
            theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._pid is not None:
            kill_session(self._pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._wait()

    def inspect(self, objective: BaseObjective, spec: StudySpec) -> dict[str, Any]:
        """Call `inspect_objective` in the process.

        Raises:
            ObjectiveError: as for `inspect_objective`, or the code ended the process.
        """
        return self._call(inspect_objective, objective, spec)

    def run_smoke_test(self, objective: BaseObjective, spec: StudySpec) -> SmokeResult:
        """Call `run_random_smoke_test` in the process, and end the process, which contains the data.

        Raises:
            ObjectiveError: as for `run_random_smoke_test`, or the code ended the process.
        """
        try:
            return self._call(run_random_smoke_test, objective, spec)
        finally:
            self.close()

    def _call(
        self, function: Callable[[BaseObjective, StudySpec], Result], objective: BaseObjective, spec: StudySpec
    ) -> Result:
        if self._pid is None:
            return function(objective, spec)
        try:
            self._connection.send((function, spec))
            if not self._connection.poll(_REPORT_SECONDS):
                log.warning(
                    "the first calls of %s take more than %d s (data, model, step, export)",
                    self._reference,
                    _REPORT_SECONDS,
                )
            result, error = self._connection.recv()
        except (EOFError, ConnectionError):
            raise ObjectiveError(self._describe_end(self._wait())) from None
        if error is not None:
            raise ObjectiveError(error)
        if result is None:
            sys.exit(EXIT_UNAVAILABLE)  # after an internal error, whose traceback the process has printed
        return cast("Result", result)

    def _wait(self) -> int | None:
        """Wait for the end of the process, and return its exit code; None if code of the objective has read it."""
        assert self._pid is not None
        status = None
        with contextlib.suppress(ChildProcessError):
            _, status = os.waitpid(self._pid, 0)
        self._pid = None
        with contextlib.suppress(OSError):  # code of the objective has closed it
            self._connection.close()
        return None if status is None else os.waitstatus_to_exitcode(status)

    def _describe_end(self, code: int | None) -> str:
        how = "unknown exit code" if code is None else f"exit code {code}"
        remedy = "remove the call that ends the process, such as os._exit"
        if code is not None and code < 0:
            how = signal.Signals(-code).name
            remedy = f"trace it with: python -X faulthandler -m {format_command('smoke', self._reference)}"
        if code == -signal.SIGKILL:
            remedy = "its memory may be too small; use less data or a smaller model"
        return f"objective {self._reference!r} ends the process during a check before the first trial ({how}); {remedy}"

    def _serve(self, connection: Connection) -> None:
        """Answer calls until the command ends."""
        for number in ENDING_SIGNALS:  # only the command ends this process
            signal.signal(number, lambda *_: None)
        bind_children()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)  # as in workers: code that asks the user fails, instead of waiting behind a progress line
        os.close(null)
        # joblib's tracker, which outlives this process for a moment, would print what it removes.
        given = os.environ.get("PYTHONWARNINGS")
        os.environ["PYTHONWARNINGS"] = f"{given},{_QUIET_TRACKER}" if given else _QUIET_TRACKER
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        objective: BaseObjective | None = None
        while True:
            function, spec = connection.recv()
            answer: tuple[object, str | None] = None, None
            try:
                if objective is None:
                    with _discard_output():  # the command prints the output of the import
                        _, objective = load_for_search(self._settings)
                answer = function(objective, spec), None
            except USER_ERRORS as error:
                answer = None, str(error)
            except Exception:  # a fault of hpsearch: its traceback is printed, and the command ends
                sys.excepthook(*sys.exc_info())
            except BaseException as error:  # of the objective's code
                fault = f"raises {type(error).__name__} in a check before the first trial; remove it"
                answer = None, f"objective {self._reference!r} {fault}"
            _flush()
            connection.send(answer)


def _flush() -> None:
    """Flush the standard streams, which code of the objective may have replaced by any object."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # as raised by any such object
            stream.flush()


@contextlib.contextmanager
def _discard_output() -> Iterator[None]:
    kept, null = [os.dup(1), os.dup(2)], os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        os.dup2(null, 2)
        yield
    finally:
        _flush()
        for target, copy in enumerate(kept, start=1):
            os.dup2(copy, target)
            os.close(copy)
        os.close(null)
