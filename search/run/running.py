"""The searches of a home folder that run on this machine, which `hpsearch down` stops before their services."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import psutil

from hpsearch.storage.embedded import process
from hpsearch.storage.files import write_private

_PATTERN = "*/search-*.json"  # in the folder of the logs
_STOP_TIMEOUT = 120.0  # seconds; a search limits its end by --grace


@contextmanager
def register_search(logs: Path) -> Iterator[None]:
    """Record during this block that this process runs the search whose logs are in the folder `logs`."""
    this = psutil.Process()
    identity = process.ProcessIdentity(this.pid, this.create_time(), tuple(this.cmdline()))
    path = logs / f"search-{this.pid}.json"
    with suppress(FileNotFoundError):  # another command has deleted the study; the workers' progress shows it
        write_private(path, json.dumps(asdict(identity)))
    try:
        yield
    finally:
        with suppress(OSError):  # a folder that became read-only; `find_searches` ignores a file of an ended process
            path.unlink(missing_ok=True)


def find_searches(home: Path) -> list[tuple[str, psutil.Process]]:
    """Return the name of the study and the process of each search that uses the services in `home`."""
    found = []
    for path in sorted((home / "logs").glob(_PATTERN)):
        with suppress(OSError, ValueError, TypeError):  # the search has just ended
            stored = json.loads(path.read_text())
            identity = process.ProcessIdentity(stored["pid"], stored["started"], tuple(stored["command"]))
            if (running := process.find(identity)) is None or running.pid == os.getpid():
                path.unlink(missing_ok=True)
            else:
                found.append((path.parent.name, running))
    return found


def stop_searches(searches: list[tuple[str, psutil.Process]]) -> bool:
    """Stop searches as Ctrl-C does, and wait until they have ended; return whether all have."""
    processes = [running for _, running in searches]
    process.send_signal(processes, signal.SIGTERM)
    return process.wait_for_exit(processes, timeout=_STOP_TIMEOUT)
