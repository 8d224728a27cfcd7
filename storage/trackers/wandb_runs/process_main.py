"""The process that calls the Weights & Biases library."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hpsearch.storage.files import lock_file

_HEADER, _BLOCK = 7, 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_records(path: Path) -> Iterator[Any]:
    """Yield the records of a `.wandb` file, up to the first truncated record; wandb has no Python reader for them."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _chunks(path.read_bytes()):
        yield Record.FromString(data)


def _chunks(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in the LevelDB log format; fragments of a record are joined."""
    at, parts = _HEADER, b""  # the file begins with a header, which has the size of the header of a record
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:  # the padding of a block without space for another fragment
            at += _BLOCK - at % _BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + _HEADER : at + _HEADER + size]
        if kind not in {_FULL, _FIRST, _MIDDLE, _LAST} or len(part) < size:
            return
        at += _HEADER + size
        parts = part if kind in {_FULL, _FIRST} else parts + part
        if kind in {_FULL, _LAST}:
            yield parts
            parts = b""


def read_offline_steps(folder: Path, run_id: str) -> set[int]:
    """Return the steps of a run that are in offline files, which `wandb sync` uploads later."""
    paths = folder.glob(f"offline-run-*/run-{run_id}.wandb")
    histories = (
        record for path in paths for record in read_records(path) if record.WhichOneof("record_type") == "history"
    )
    return {record.history.step.num for record in histories}


_SHUTDOWN_SECONDS = 20.0  # time to finish runs after the parent process has exited
_WRITE_SECONDS = 30.0  # time to complete the file of a run
_INIT_SECONDS = 30.0  # time for the server to create or find a run


def _neutralize(value: Any) -> Any:
    """Return a value in which no text and no dictionary refers to an artifact.

    wandb would send the user's key to the server in a text such as ``wandb-artifact://http://HOST/ID``, and a worker
    can store such a text as a parameter. The text begins with an apostrophe instead.
    """
    if isinstance(value, str):
        return f"'{value}" if re.match(r"\s*wandb-[\w-]*://", value, re.IGNORECASE) else value
    if isinstance(value, dict):
        return {"type" if key == "_type" else key: _neutralize(part) for key, part in value.items()}
    return [_neutralize(part) for part in value] if isinstance(value, list) else value


class WandbRuns:
    """The open runs of this process. Each public method except `finish_all` executes one command of the parent."""

    def __init__(self) -> None:
        self._runs: dict[str, tuple[Any, set[int], int]] = {}  # run, logged steps, descriptor of the lock

    def open(self, *, run_id: str, folder: str, config: dict[str, Any], **settings: Any) -> dict[str, Any]:
        """Create or resume a run; steps that the run already has are not logged again."""
        import wandb

        if (lock := lock_file(Path(folder) / f".{run_id}.lock")) is None:
            return {"busy": True}
        quiet = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True,
            x_disable_machine_info=True, x_save_requirements=False, init_timeout=_INIT_SECONDS,
            x_transaction_log_flush_interval=1.0,
        )  # fmt: skip
        steps = read_offline_steps(Path(folder) / "wandb", run_id)
        settings |= {"config": _neutralize(config), "settings": quiet}
        run = wandb.init(id=run_id, dir=folder, resume="allow", reinit="create_new", **settings)
        self._runs[run_id] = run, steps | set(range(run.step)), lock  # a run on the server resumes at its next step
        return {}

    def log_rows(
        self, *, run_id: str, config: dict[str, Any], rows: list[tuple[int, dict[str, Any]]], summary: dict[str, Any]
    ) -> dict[str, Any]:
        """Log the rows of steps that the run does not have yet, and update config and summary of the run."""
        run, logged_steps, _ = self._runs[run_id]
        if config:
            run.config.update(_neutralize(config), allow_val_change=True)
        for step, values in rows:
            if step not in logged_steps:
                logged_steps.add(step)
                run.log(values, step=step, commit=True)
        if summary:
            run.summary.update(_neutralize(summary))
        return {}

    def finish(self, *, run_id: str, exit_code: int, is_preempted: bool) -> dict[str, Any]:
        """Finish a run, and wait until all its data are on the server or on disk.

        Args:
            run_id: the id of the run.
            exit_code: the exit code of the run: 0 if the trial succeeded, else 1.
            is_preempted: whether another attempt will resume the run.
        """
        run, _, lock = self._runs.pop(run_id)
        if is_preempted:
            run.mark_preempting()
        file = Path(run.settings.sync_file) if run.offline else None
        run.finish(exit_code=exit_code)
        if file is not None:
            _wait_until_written(file)
        os.close(lock)
        return {}

    def finish_all(self) -> None:
        """Finish all open runs after the parent process has exited."""
        for run_id in list(self._runs):
            self.finish(run_id=run_id, exit_code=1, is_preempted=True)


def _wait_until_written(file: Path) -> None:
    """Wait until the file of a finished run is complete, because the library returns before the file is complete."""
    deadline, size = time.monotonic() + _WRITE_SECONDS, -1
    while time.monotonic() < deadline:
        if file.exists() and (now := file.stat().st_size) != size:
            size = now
            if any(record.WhichOneof("record_type") == "exit" for record in read_records(file)):
                with file.open("rb") as written:
                    os.fsync(written.fileno())
                return
        time.sleep(0.02)
    raise TimeoutError(f"{file} is incomplete after {_WRITE_SECONDS:g} s")


def main() -> None:
    """Execute the commands of the parent process until it closes the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):  # after these signals, the worker still sends its last records
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]))
    os.set_inheritable(pipe.fileno(), False)
    runs = WandbRuns()
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "open": runs.open,
        "log_rows": runs.log_rows,
        "finish": runs.finish,
    }
    with suppress(EOFError, OSError):  # the parent process has closed the pipe
        while True:
            request = json.loads(pipe.recv_bytes())
            try:
                reply = commands[request.pop("command")](**request)
            except Exception as error:  # errors of the library go to the parent process
                reply = {"error": f"{type(error).__name__}: {error}"}
            pipe.send_bytes(json.dumps(reply).encode())
    watchdog = threading.Timer(_SHUTDOWN_SECONDS, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()
    try:
        runs.finish_all()
    finally:
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
