"""Run a command without the user's credentials, and in bubblewrap where it is installed."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpsearch.storage.errors import format_error

log = logging.getLogger(__name__)

# All other variables are removed, because any of them may contain a credential.
_KEPT_VARIABLES = (
    *("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
)
_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")


def run_isolated(
    command: Sequence[str],
    *,
    folder: Path,
    readable: Sequence[Path],
    variables: Mapping[str, str],
    timeout_seconds: float,
) -> subprocess.CompletedProcess[str]:
    """Run a Python command without credentials in its environment.

    In bubblewrap, the command has no network and sees no files but those of Python, `folder` and `readable`.

    Args:
        command: command line, which starts with `sys.executable`.
        folder: folder that the command may change; its empty sub-folder `cwd` becomes the current and home folder.
        readable: further files that the command may read.
        variables: further environment variables.
        timeout_seconds: the command is killed after this time.

    Raises:
        subprocess.TimeoutExpired: the command was killed.
    """
    home = folder / "cwd"
    home.mkdir()
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return subprocess.run(
        [*_find_bubblewrap(folder, readable), *command],
        cwd=home,
        # Without bubblewrap, torch would use a folder in the temporary folder that other users can create first.
        env={**kept, "HOME": str(home), "TORCHINDUCTOR_CACHE_DIR": str(home / "compiled"), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )


def _find_bubblewrap(folder: Path, readable: Sequence[Path]) -> list[str]:
    """Return the command that starts another command in bubblewrap; empty if bubblewrap is not installed."""
    if (program := shutil.which("bwrap")) is None:
        return []
    command = [program, "--unshare-all", "--die-with-parent", "--new-session"]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]  # noqa: S108 a new file system
    for path in (*_SYSTEM_FOLDERS, sys.base_prefix, sys.prefix, *map(str, readable)):
        command += ["--ro-bind-try", path, path]
    command += ["--bind", str(folder), str(folder), "--chdir", str(folder / "cwd")]
    probe = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if probe.returncode != 0:  # such as in a container without user namespaces
        log.warning("bubblewrap cannot start (%s); the model runs without it", format_error(probe.stderr))
        return []
    return command
