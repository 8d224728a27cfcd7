"""The line to the process that speaks to Weights & Biases: started when needed, killed when it does not answer."""

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
    from multiprocessing.connection import Connection as Line

from hpsearch.storage.errors import AwayError


class WandbAwayError(AwayError):
    """Weights & Biases does not answer, or not yet: what is logged can wait for it."""


class Connection:
    """A process that speaks to Weights & Biases.

    Args:
        folder: where it keeps its files and its log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: tuple[subprocess.Popen[bytes], Line] | None = None
        self._services: list[psutil.Process] = []  # what the process has started
        self._asking = threading.Lock()
        self._closing = False
        self.generation = 0  # of the process: runs that an earlier one had open are not

    def ask(self, timeout: float, do: str, **request: Any) -> dict[str, Any]:
        """Ask the process, which is started if need be, and return its answer.

        Raises:
            WandbAwayError: it does not answer within so many seconds, or has died; it is started anew next time.
        """
        with self._asking:
            process, line = self._process or self._start()
            try:
                line.send_bytes(json.dumps({"do": do, **request}, default=str).encode())
                answer = self._answer(line, timeout)
            except (OSError, EOFError, WandbAwayError) as error:
                self._end(kill=True)
                raise WandbAwayError(str(error) or "its process has died") from None
            if "error" in answer:  # the package keeps what it began, and would refuse to begin it again
                self._end(kill=True)
            elif do == "open":
                self._services = _children(process.pid)
            return answer

    def _start(self) -> tuple[subprocess.Popen[bytes], Line]:
        if self._closing:
            raise WandbAwayError("this process is about to end")
        self._folder.mkdir(parents=True, exist_ok=True)
        environment = {"WANDB_ERROR_REPORTING": "false", **os.environ}
        line, other_end = multiprocessing.Pipe()
        number = other_end.fileno()
        command = [sys.executable, "-P", "-m", "hpsearch.storage.trackers.wandb_runs.process", str(number)]
        with other_end, (self._folder / "process.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._process = process, line
        self.generation += 1
        return self._process

    def _answer(self, line: Line, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while not line.poll(0.5):
            if self._closing or time.monotonic() > deadline:
                raise WandbAwayError(f"no answer within {timeout:g} s")
        answer: dict[str, Any] = json.loads(line.recv_bytes())
        return answer

    def _end(self, *, kill: bool = False) -> None:
        """Close the line, at which the process ends, or kill it with the processes that it has started.

        A run that is opened again must not be written by an earlier process.
        """
        if self._process is None:
            return
        process, line = self._process
        if kill:
            for victim in {*_children(process.pid), *self._services}:
                with contextlib.suppress(psutil.Error):
                    victim.kill()
            process.kill()
        line.close()
        self._process, self._services = None, []
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.0 if self._closing else 5.0)

    def close(self) -> None:
        """Let the process end, which finishes runs that are open, and let go of a request that waits for it."""
        self._closing = True
        with self._asking:
            self._end()


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
