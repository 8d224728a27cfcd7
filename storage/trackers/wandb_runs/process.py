"""The process that calls the Weights & Biases library."""

from __future__ import annotations

import json
import os
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


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a run's file, up to the place where it is torn; the package has no reader in Python."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _chunks(path.read_bytes()):
        yield Record.FromString(data)


def _chunks(data: bytes) -> Iterator[bytes]:
    """Yield what LevelDB calls records, put together from their parts."""
    at, parts = _HEADER, b""  # the file begins with a header of its own, of the same size
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:  # the rest of a block that has no room for a part
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


def steps_of(folder: Path, run: str) -> set[int]:
    """Return the steps of a run in the files that wait for `wandb sync`."""
    found = (record for path in folder.glob(f"offline-run-*/run-{run}.wandb") for record in records(path))
    return {record.history.step.num for record in found if record.WhichOneof("record_type") == "history"}


_LAST_WORDS = 20.0  # seconds to finish runs when whoever started this is gone
_WRITING = 30.0  # seconds to write a file to its end
_INIT = 30.0  # seconds for a server to know a run


class Runs:
    """The runs that are open, by their ids."""

    def __init__(self) -> None:
        self._runs: dict[str, tuple[Any, set[int], int]] = {}  # each with its known steps and its lock

    def open(self, *, run_id: str, folder: str, **settings: Any) -> dict[str, Any]:
        """Begin a run or go on with it; the steps that it has are not logged again."""
        import wandb

        lock = lock_file(Path(folder) / f".{run_id}.lock")
        if lock is None:
            return {"busy": True}
        quiet = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True,
            x_disable_machine_info=True, x_save_requirements=False, init_timeout=_INIT,
            x_transaction_log_flush_interval=1.0,
        )  # fmt: skip
        known = steps_of(Path(folder) / "wandb", run_id)
        run = wandb.init(id=run_id, dir=folder, resume="allow", reinit="create_new", settings=quiet, **settings)
        self._runs[run_id] = run, known | set(range(run.step)), lock  # a run that the server has begins there
        return {}

    def tell(
        self,
        *,
        run_id: str,
        config: dict[str, Any],
        rows: list[tuple[int, dict[str, Any]]],
        summary: dict[str, Any],
    ) -> dict[str, Any]:
        """Log rows at their steps, each once, and set what a run has one of."""
        run, known, _ = self._runs[run_id]
        if config:
            run.config.update(config, allow_val_change=True)
        for step, values in rows:
            if step not in known:
                known.add(step)
                run.log(values, step=step, commit=True)
        if summary:
            run.summary.update(summary)
        return {}

    def finish(self, *, run_id: str, exit_code: int, left: bool) -> dict[str, Any]:
        """Finish a run; return when all of it has arrived, or is on disk.

        Args:
            run_id: of the run.
            exit_code: 0 if it ended well.
            left: whether it was left, to be gone on with.
        """
        run, _, lock = self._runs.pop(run_id)
        if left:
            run.mark_preempting()
        file = Path(run.settings.sync_file) if run.offline else None
        run.finish(exit_code=exit_code)
        if file is not None:
            _await_end(file)
        os.close(lock)
        return {}

    def finish_all(self) -> None:
        """Finish what is open: whoever would go on with it is gone."""
        for run in list(self._runs):
            self.finish(run_id=run, exit_code=1, left=True)


def _await_end(file: Path) -> None:
    """Wait until all of a run that has finished is in its file: the package answers before it is."""
    deadline, size = time.monotonic() + _WRITING, -1
    while time.monotonic() < deadline:
        if file.exists() and (now := file.stat().st_size) != size:
            size = now
            if any(record.WhichOneof("record_type") == "exit" for record in records(file)):
                with file.open("rb") as written:
                    os.fsync(written.fileno())
                return
        time.sleep(0.02)
    raise TimeoutError(f"{file} does not get to its end")


def main() -> None:
    """Answer until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # those that stop a worker: it has yet to say what it logged
        signal.signal(number, signal.SIG_IGN)
    line = Connection(int(sys.argv[1]))
    os.set_inheritable(line.fileno(), False)
    runs = Runs()
    known: dict[str, Callable[..., dict[str, Any]]] = {"open": runs.open, "tell": runs.tell, "finish": runs.finish}
    with suppress(EOFError, OSError):  # the other end is closed
        while True:
            request = json.loads(line.recv_bytes())
            try:
                answer = known[request.pop("do")](**request)
            except Exception as error:  # whatever the package raises is for the process that asked
                answer = {"error": f"{type(error).__name__}: {error}"}
            line.send_bytes(json.dumps(answer).encode())
    end = threading.Timer(_LAST_WORDS, os._exit, (1,))
    end.daemon = True
    end.start()
    try:
        runs.finish_all()
    finally:
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
