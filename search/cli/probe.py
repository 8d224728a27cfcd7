"""Import an objective in a forked process first, because native code of its libraries may end the process."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.errors import ObjectiveError, format_path
from hpsearch.objectives.loading import BUILTIN, load_objective, locate_source, normalize_reference

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
_SECONDS = 10  # the import itself reports errors of slower imports, as far as the process survives them
_ENDED = 77  # exit code of a forked process whose import has returned, also with an exception
_IMPORT = "import sys; from hpsearch.objectives.loading import load_objective; load_objective(sys.argv[1])"


def load_probed_objective(reference: str) -> BaseObjective:
    """Load an objective as `load_objective` does, after `check_import`."""
    check_import(reference)
    return load_objective(reference)


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


def _probe(reference: str) -> str | None:
    """Import an objective in a forked process; return the signal or exit code that ended it, None if none did."""
    import torch  # noqa: F401  # before the fork, so that the forked process and the command load it once

    sys.stdout.flush()
    sys.stderr.flush()
    if (pid := os.fork()) == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_SECONDS)
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(null, descriptor)
            with contextlib.suppress(BaseException):
                load_objective(reference)
        finally:
            os._exit(_ENDED)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        number = signal.Signals(os.WTERMSIG(status))
        return number.name if number in _CRASHES else None
    code = os.WEXITSTATUS(status)
    return None if code == _ENDED else f"exit code {code}"


def _crashes_in_interpreter(reference: str) -> bool:
    """Return whether the import also crashes a new interpreter."""
    command = [sys.executable, "-P", "-c", _IMPORT, reference]
    return -subprocess.run(command, capture_output=True, check=False).returncode in _CRASHES
