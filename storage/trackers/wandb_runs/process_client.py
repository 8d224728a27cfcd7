"""The connection to the process that calls the wandb library: started on demand, killed if it does not answer."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from multiprocessing.connection import Connection as Pipe

from hpsearch.storage.errors import ServiceUnavailableError


class WandbUnavailableError(ServiceUnavailableError):
    """A Weights & Biases server or process that does not answer; records stay in the journal until it answers."""


class Connection:
    """A connection to a process that calls the wandb library.

    Args:
        folder: the folder for the files and the log of the process.

    Attributes:
        generation: the number of processes that were started so far; runs that an earlier process opened are closed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: tuple[subprocess.Popen[bytes], Pipe] | None = None
        self._child_processes: list[psutil.Process] = []  # child processes of the process
        self._request_lock = threading.Lock()
        self._is_closing = False
        self.generation = 0

    def request(self, timeout_seconds: float, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a command to the process, which is started if necessary, and return its reply.

        Raises:
            WandbUnavailableError: the process died or did not reply in time; the next request starts another process.
        """
        with self._request_lock:
            process, pipe = self._process or self._start()
            try:
                pipe.send_bytes(json.dumps({"command": command, **arguments}, default=str).encode())
                reply = self._receive(pipe, timeout_seconds)
            except (OSError, EOFError, WandbUnavailableError) as error:
                self._stop(kill=True)
                raise WandbUnavailableError(str(error) or "the wandb process has died") from None
            if "error" in reply:  # the library keeps its state after an error, and would reject a second attempt
                self._stop(kill=True)
            elif command == "open":
                self._child_processes = _list_children(process.pid)
            return reply

    def _start(self) -> tuple[subprocess.Popen[bytes], Pipe]:
        if self._is_closing:
            raise WandbUnavailableError("this process is shutting down")
        self._folder.mkdir(parents=True, exist_ok=True)
        environment = {"WANDB_ERROR_REPORTING": "false", **os.environ}
        pipe, other_end = multiprocessing.Pipe()
        number = other_end.fileno()
        command = [sys.executable, "-P", "-m", "hpsearch.storage.trackers.wandb_runs.process_main", str(number)]
        with other_end, (self._folder / "process.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self._folder,  # W&B reads wandb/settings of the working folder, which could name another server
                env=environment,
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._process = process, pipe
        self.generation += 1
        return self._process

    def _receive(self, pipe: Pipe, timeout_seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_seconds
        while not pipe.poll(0.5):
            if self._is_closing or time.monotonic() > deadline:
                raise WandbUnavailableError(f"no answer within {timeout_seconds:g} s")
        reply: dict[str, Any] = json.loads(pipe.recv_bytes())
        return reply

    def _stop(self, *, kill: bool = False) -> None:
        """Close the pipe, so that the process exits, or kill the process and its children.

        A killed process cannot write to a run that another process opens later.
        """
        if self._process is None:
            return
        process, pipe = self._process
        if kill:
            for child in {*_list_children(process.pid), *self._child_processes}:
                with contextlib.suppress(psutil.Error):
                    child.kill()
            process.kill()
        pipe.close()
        self._process, self._child_processes = None, []
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.0 if self._is_closing else 5.0)

    def close(self) -> None:
        """Interrupt a request in flight, and make the process exit after it has finished its open runs."""
        self._is_closing = True
        with self._request_lock:
            self._stop()


def _list_children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
