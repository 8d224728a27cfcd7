"""A process that has imported all libraries and forks commands, so that a command starts in milliseconds.

It is the server of :mod:`multiprocessing` that a fleet forks its workers from, with more loaded, and all processes of a
run of tests share it, and so do the fleets of the commands: to load it takes 10 s of a core, and a fleet 10 s more.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import traceback
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_context = multiprocessing.get_context("forkserver")


# --- the process that starts the server, and ends it ---


def keep(alive: Path, known: Path) -> None:
    """Start the server, write its address to `known`, and exit when the pipe `alive` has no writer any more."""
    os.environ |= {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    _context.set_forkserver_preload(["hpsearch.search.fleet.preload", "tests.faults.warm"])
    forkserver.ensure_running()
    new = known.with_suffix(".new")
    new.write_text(json.dumps(forkserver._forkserver._forkserver_address))  # type: ignore[attr-defined]
    new.rename(known)
    alive.read_bytes()


# --- in the tests ---


class Server(forkserver.ForkServer):
    """A client of the server for processes that did not start it."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._forkserver_address = address
        self._forkserver_alive_fd = os.pipe()[1]  # the process that started it keeps it alive

    def ensure_running(self) -> None:
        """Do nothing: if the server does not run, connecting fails."""

    def fork(self, command: dict[str, Any]) -> BaseProcess:
        """Start a command."""
        process = _context.Process(target=become, args=({**command, "server": self._forkserver_address},))
        before = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = self.connect_to_new_process
        try:
            process.start()
        finally:
            forkserver.connect_to_new_process = before
        return process


# --- in the process of a command ---


def become(command: dict[str, Any]) -> None:
    """Run a command in this process and exit with its code.

    Args:
        command: `start`, its arguments; `environment`, which is added, or replaces all of it with `alone`; `cwd`,
            `input` and `log`. With `puppet` it obeys orders. Otherwise it is a command of hpsearch, or of Python:
            `-c` and a program, or a file.
    """
    if not command["puppet"] and not command["start"][0].endswith((".py", "-c", "undisturbed")):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # like ./hpsearch; the command unblocks it
    try:
        os.setsid()
        logging.getLogger().handlers.clear()  # a loaded library adds handlers, which a new interpreter does not have
        if sys.platform == "linux":  # the process that started it may be killed, and this one must end with the tests
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if command["alone"]:
            os.environ.clear()
        os.environ.update(command["environment"])
        log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdin = Path(command["input"]).open()  # noqa: SIM115 for as long as the process lives
        multiprocessing.set_start_method(None, force=True)  # for the processes that the command starts
        server = Server(command["server"])  # also for fleets that the command starts
        forkserver.ensure_running = server.ensure_running
        forkserver.connect_to_new_process = server.connect_to_new_process
        os.chdir(command["cwd"])
        code = run(command["start"], puppet=command["puppet"])
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:  # a forked child must not continue as its parent
        traceback.print_exc()
        code = 70
    leave(code)


def run(start: list[str], *, puppet: bool) -> int:
    """Run the command and return its exit code."""
    if start[0] == "undisturbed":
        return undisturbed(int(start[1]), Path(start[2]))
    if start[0] == "-c":
        return program(start)
    if start[0].endswith(".py"):
        return script(start)
    if not puppet:
        return command_line(start)
    from tests.faults import puppet as puppets

    return puppets.main(start)


def leave(code: int) -> None:
    """Exit like an interpreter, but without the destruction of all modules, which takes seconds."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def command_line(arguments: list[str]) -> int:
    """Run the hpsearch command line."""
    from hpsearch.__main__ import main

    sys.argv[1:] = arguments
    main()
    raise AssertionError("it ends by exiting")


def program(arguments: list[str]) -> int:
    """Run a program as `python -c` does."""
    _, code, *rest = arguments
    sys.argv[:] = ["-c", *rest]
    exec(code, {"__name__": "__main__"})
    return 0


def script(arguments: list[str]) -> int:
    """Run a file as `python file.py` does: as the main module, with its folder first in `sys.path`."""
    sys.argv[:] = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


def undisturbed(n_trials: int, path: Path) -> int:
    """Train trials one after another without any service, and write their values."""
    import optuna

    from hpsearch import Trainer
    from hpsearch.search.samplers.optuna import Random
    from hpsearch.search.samplers.suggest import derive_seed, make_sampler
    from tests.faults.scripted import EPOCHS, Scripted

    values = []
    study = optuna.create_study()
    for number in range(n_trials):
        study.sampler = make_sampler(Random(), study_seed=0, trial_number=number, epochs=1)
        objective = Scripted()
        config = objective.configure(study.ask())
        seed = derive_seed(0, "trial", number)
        result = Trainer(objective, config, epochs=EPOCHS, seed=seed, split_seed=0, device="cpu").fit()
        values.append([record.metrics["val_loss"].hex() for record in result.history])
    path.write_text(json.dumps(values))
    return 0


if __name__ == "__main__":
    keep(Path(sys.argv[1]), Path(sys.argv[2]))
