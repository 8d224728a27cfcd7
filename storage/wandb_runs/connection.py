"""The line to the process that speaks to Weights & Biases: started when needed, killed when it does not answer."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

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
        self._process: subprocess.Popen[bytes] | None = None
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
            process = self._process or self._start()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps({"do": do, **request}, default=str).encode() + b"\n")
                process.stdin.flush()
                answer = self._answer(process, timeout)
            except (OSError, WandbAwayError) as error:
                self._kill()
                raise WandbAwayError(str(error) or "its process has died") from None
            if "error" in answer:  # the package keeps what it began, and would refuse to begin it again
                self._kill()
            elif do == "open":
                self._services = _children(process.pid)
            return answer

    def _start(self) -> subprocess.Popen[bytes]:
        if self._closing:
            raise WandbAwayError("this process is about to end")
        self._folder.mkdir(parents=True, exist_ok=True)
        environment = {"WANDB_ERROR_REPORTING": "false", **os.environ}
        command = [sys.executable, "-P", "-m", "hpsearch.storage.wandb_runs.process"]
        with (self._folder / "process.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self.generation += 1
        return self._process

    def _answer(self, process: subprocess.Popen[bytes], timeout: float) -> dict[str, Any]:
        assert process.stdout is not None
        deadline, line = time.monotonic() + timeout, b""
        while not line.endswith(b"\n"):
            if self._closing or time.monotonic() > deadline:
                raise WandbAwayError(f"no answer within {timeout:g} s")
            if not select.select([process.stdout], [], [], 0.5)[0]:
                continue
            if not (read := os.read(process.stdout.fileno(), 1 << 16)):
                raise WandbAwayError("its process has died")
            line += read
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _kill(self) -> None:
        """End the process and what it has started: a run that is opened anew must be written by nobody else."""
        if self._process is None:
            return
        for victim in {*_children(self._process.pid), *self._services}:
            with contextlib.suppress(psutil.Error):
                victim.kill()
        self._process.kill()
        self._end(self._process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        self._process, self._services = None, []
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.0 if self._closing else 5.0)

    def close(self) -> None:
        """Let the process end, which finishes runs that are open, and let go of a request that waits for it."""
        self._closing = True
        with self._asking:
            if self._process is not None:
                self._end(self._process)


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
