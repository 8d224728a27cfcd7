"""Import all modules that a worker needs at its start or in its first trial.

Only the fork server (:mod:`search.fleet.fork_server`) may import this module, because the import detaches the process
from the terminal. The fleet, not the terminal, sends the signals of Ctrl-C and hang-ups to the workers.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import shutil
import signal
import time
from pathlib import Path

from hpsearch.cuda_library import load_cuda_library
from hpsearch.objectives.private_folders import use_private_compiler_cache
from hpsearch.search.fleet.fork_server import SOCKET_FOLDER_VARIABLE
from hpsearch.search.process.signals import exit_on_signals
from hpsearch.working_folder import import_matplotlib

PRELOADED_MODULES = (
    "hpsearch.search.worker.lifecycle",
    "mlflow.pytorch",
    "torch._inductor",  # imported when deterministic algorithms are requested
    "torch.export._trace",  # this and the next are imported at the first export of a model
    "torch.export.pt2_archive._package",
    "torchmetrics",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "yaml",
    "sklearn.datasets",  # data of the built-in objectives, and its splits
    "sklearn.model_selection",
)


def _watch_fleet() -> int:
    """Start a process that kills the fork server if the fleet ends during the imports, and return its process id.

    A fleet ends early after a wrong setting. An import can hold the GIL, which blocks a thread.
    """
    server = os.getpid()
    if watcher := os.fork():
        return watcher
    try:
        while os.getppid() == server and _read_parent(server) == _fleet:
            time.sleep(0.2)
        if os.getppid() == server:
            os.kill(server, signal.SIGKILL)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    finally:  # also if /proc is unreadable
        os._exit(0)


def _read_parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


_fleet = os.getppid()
# This process must outlive a signal to all processes of a job, because it reports the workers' exit codes to the fleet.
exit_on_signals(only_forked=True)
# The fork server detects exits of workers by SIGCHLD, which the program may block.
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
with contextlib.suppress(OSError):
    os.setsid()
if folder := os.environ.get(SOCKET_FOLDER_VARIABLE):
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # forked processes exit without it
_watcher = _watch_fleet()
load_cuda_library()
with contextlib.suppress(Exception):  # the command and the workers report it
    use_private_compiler_cache()  # otherwise the import of torch's compiler creates a folder in the temporary folder
import_matplotlib()
gc.disable()
for _name in PRELOADED_MODULES:
    with contextlib.suppress(Exception):  # the command and the workers report the error of an import
        importlib.import_module(_name)
os.kill(_watcher, signal.SIGKILL)
with contextlib.suppress(ChildProcessError):  # if the program ignores SIGCHLD
    os.waitpid(_watcher, 0)
gc.enable()
gc.freeze()  # memory pages that the collector does not touch stay shared between the workers
