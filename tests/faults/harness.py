"""Run studies with real workers on a real Postgres and inject faults until the budget is spent."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from filelock import FileLock

from hpsearch.storage.web.token import find_token
from tests.faults import zygote
from tests.faults.orders import Order, write
from tests.waiting import PATIENCE, wait_for

ROOT = Path(__file__).parents[2]
OBJECTIVE = str(Path(__file__).with_name("scripted.py"))
LEASE = 4.0  # seconds: long enough for a busy machine, short enough to wait for


@dataclass
class Command:
    """A forked command, with the methods of `subprocess.Popen` that tests use."""

    zygote: Zygote
    pid: int
    log: Path

    def poll(self) -> int | None:
        return self.zygote.exit_code(self.pid)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.02)
        return code

    def lines(self, number: int) -> list[str]:
        """Wait until the command has printed `number` lines or has ended, and return all its lines."""
        while (ended := self.poll() is not None) is False and self.log.read_text().count("\n") < number:
            time.sleep(0.005)
        found = self.log.read_text().splitlines()
        assert len(found) >= number, (ended, found)
        return found

    def communicate(self) -> tuple[str, None]:
        """Wait for its end and return its output of both streams."""
        self.wait()
        return self.log.read_text(), None


class Zygote:
    """Forks commands; see :mod:`tests.faults.zygote`.

    Args:
        server: where the server listens.
        folder: for the outputs of commands without a `log`.
    """

    def __init__(self, server: str, folder: Path) -> None:
        self._server = zygote.Server(server)
        self._folder = folder
        self._processes: dict[int, BaseProcess] = {}
        self._numbers = itertools.count()

    def start(
        self,
        arguments: list[str],
        environment: dict[str, str],
        log: Path,
        *,
        puppet: bool = True,
        cwd: Path = ROOT,
        input: Path = Path(os.devnull),  # noqa: A002 as subprocess names it
        alone: bool = False,
    ) -> int:
        """Fork a command and return its process id; see :func:`tests.faults.zygote.become`."""
        if not log.exists():
            log.touch()
        if not alone:  # the server may have another value
            environment = {"HPSEARCH_HOME": os.environ.get("HPSEARCH_HOME", ""), **environment}
        command = {"start": arguments, "environment": environment, "puppet": puppet, "alone": alone}
        process = self._server.fork({**command, "log": str(log), "cwd": str(cwd), "input": str(input)})
        assert process.pid is not None
        self._processes[process.pid] = process
        return process.pid

    def command(self, arguments: list[str], *, cwd: Path = ROOT, **environment: str) -> Command:
        """Start an hpsearch command."""
        log = self._folder / f"{next(self._numbers)}.log"
        return Command(self, self.start(arguments, environment, log, puppet=False, cwd=cwd), log)

    def python(self, program: str, *arguments: str | Path, **environment: str) -> Command:
        """Start a program as `python -c` does, in a fork that has all libraries loaded."""
        return self.command(["-c", program, *map(str, arguments)], **environment)

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a command, or None while it runs."""
        return self._processes[pid].exitcode

    def undisturbed(self, n_trials: int, path: Path) -> list[list[float]]:
        """Return the values per epoch of the first trials of any study, trained without services."""
        said, _ = self.command(["undisturbed", str(n_trials), str(path)]).communicate()
        assert path.exists(), said
        return [[float.fromhex(value) for value in trial] for trial in json.loads(path.read_text())]

    def close(self) -> None:
        """End what still runs."""
        for process in self._processes.values():
            if process.exitcode is None:
                process.kill()
            process.join()


@contextmanager
def zygotes(folder: Path) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the server's address and starts it if necessary; the server ends with this block.

    Args:
        folder: shared with the other processes of the same test run.
    """
    folder.mkdir(exist_ok=True)
    os.mkfifo(folder / "alive")
    held = os.open(folder / "alive", os.O_RDWR)
    try:
        yield lambda: server_in(folder)
    finally:
        os.close(held)


def server_in(folder: Path) -> str:
    """Return the address of this folder's server; start the server unless another process did."""
    alive, known = folder / "alive", folder / "known"
    with FileLock(folder / "lock"):
        if not known.exists():
            command = [sys.executable, "-m", "tests.faults.zygote", alive, known]
            null = subprocess.DEVNULL
            subprocess.Popen(command, cwd=ROOT, stdin=null, stdout=null, stderr=null, start_new_session=True)
            wait_for(known.exists, "the server that commands are forked from")
    return str(json.loads(known.read_text()))


@dataclass
class Worker:
    """The process of a worker of the study."""

    pid: int
    log: Path
    exit_code: int | None = None

    @property
    def ended(self) -> bool:
        return self.exit_code is not None

    def send(self, number: signal.Signals) -> None:
        if not self.ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass
class Arena:
    """One study and its workers.

    Attributes:
        models: trials whose models are exported, which is the slowest step of a trial; None for all.
        settings: environment of every command.
    """

    zygote: Zygote
    name: str
    folder: Path
    storage_url: str
    tracking_uri: str
    models: list[int] | None = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    token: str | None = None

    def __post_init__(self) -> None:
        self.token = find_token(self.tracking_uri)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def orders(self) -> Path:
        return self.folder / "orders"

    def make_quiet_arena(self) -> Arena:
        """Return an arena like this one for a study without faults."""
        folder = self.folder / "quiet"
        folder.mkdir()
        folder.chmod(0o755)
        return Arena(self.zygote, f"{self.name}-quiet", folder, self.storage_url, self.tracking_uri)

    def create(
        self, n_trials: int, orders: list[Order], *, retries: int = 2, settings: str = "", objective: str = OBJECTIVE
    ) -> None:
        """Create the study, with orders for its workers."""
        write(self.orders, orders)
        self.home.mkdir(exist_ok=True)
        self.home.chmod(0o755)
        more = settings.split()
        self.run("run", objective, "--name", self.name, "--trials", str(n_trials), "--retries", str(retries),
                 "--sampler", "random", "--pruner", "none", "--models", "complete", "--workers", "0",
                 *more)  # fmt: skip

    def environment(self, **more: str) -> dict[str, str]:
        urls = {"HPSEARCH_STORAGE_URL": self.storage_url, "HPSEARCH_TRACKING_URI": self.tracking_uri}
        # The commands have another home than the MLflow server, which may be behind a wire of the test.
        self.token = find_token(self.tracking_uri) or self.token
        token = {"MLFLOW_TRACKING_TOKEN": self.token} if self.token else {}
        models = {} if self.models is None else {"MODELS_OF": json.dumps(self.models)}
        where = {"HPSEARCH_HOME": str(self.home), "ORDERS": str(self.orders)}
        # Long times, so that an epoch completes on a slow machine too. Tests of shorter times override them.
        times = {"HPSEARCH_LEASE": str(LEASE), "HPSEARCH_GRACE": str(PATIENCE)}
        times["HPSEARCH_COLLECTIVE_TIMEOUT"] = str(PATIENCE)
        return {**urls, **token, **models, **where, **times, **self.settings, **more}

    def start(self, *arguments: str, **environment: str) -> Worker:
        """Start a worker, or another command."""
        log = self.folder / f"{len(self.workers):03d}.log"
        start = list(arguments or ("worker", "--study", self.name))
        pid = self.zygote.start(start, self.environment(**environment), log)
        self.workers.append(Worker(pid, log))
        return self.workers[-1]

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run a command to its end."""
        process = self.start(*arguments)
        wait_for(lambda: self.poll_workers() or process.ended, f"hpsearch {arguments[0]}")
        assert process.exit_code == code, process.log.read_text()
        return process.log.read_text()

    def poll_workers(self) -> None:
        """Update the exit codes of workers that have ended."""
        for worker in self.workers:
            if not worker.ended:
                worker.exit_code = self.zygote.exit_code(worker.pid)

    def work(
        self,
        slots: int,
        *,
        meanwhile: Callable[[list[Worker]], None] = lambda _: None,
        codes: tuple[int, ...] = (-signal.SIGKILL,),
        patience: float = PATIENCE,
        **more: str,
    ) -> None:
        """Keep `slots` workers running until each has exited because no work is left.

        Args:
            slots: number of concurrent workers. A worker that was killed or drained is replaced by another.
            meanwhile: is called repeatedly with the running workers.
            codes: exit codes, in addition to 0, after which a worker is replaced by another.
            patience: seconds after which the search has failed.
            more: environment of the workers.
        """
        running = [self.start(**more) for _ in range(slots)]
        deadline = time.monotonic() + patience
        while running:
            assert time.monotonic() < deadline, self.describe_failure("the study does not end")
            self.poll_workers()
            meanwhile(running)
            for worker in [w for w in running if w.ended]:
                running.remove(worker)
                if worker.exit_code != 0:
                    assert worker.exit_code in codes, self.describe_failure(f"a worker left with {worker.exit_code}")
                    running.append(self.start(**more))
            time.sleep(0.02)

    def list_frozen_workers(self) -> list[Worker]:
        """Return the workers that SIGSTOP stopped."""
        return [w for w in self.workers if not w.ended and state_of(w.pid) == "T"]

    def replace_frozen_workers(self, running: list[Worker], **more: str) -> None:
        """Start a worker with the variables `more` for each running worker that SIGSTOP stopped."""
        for worker in self.list_frozen_workers():
            if worker in running:
                running.remove(worker)
                running.append(self.start(**more))

    def has_obeyed(self, index: int) -> bool:
        return (self.orders / f"obeyed-{index}").exists()

    def events(self, event: str) -> list[dict[str, Any]]:
        """Return the events of this kind that workers have written."""
        log = self.orders / "log.jsonl"
        text = log.read_text() if log.exists() else ""
        written = text[: text.rfind("\n") + 1]  # a worker may be writing the line after it
        return [line for line in map(json.loads, written.splitlines()) if line["event"] == event]

    def log_size(self) -> int:
        """Return the size of the event log, which grows while workers train and report."""
        log = self.orders / "log.jsonl"
        return log.stat().st_size if log.exists() else 0

    def describe_failure(self, what: str) -> str:
        """Return an assertion message with the last lines of the workers' logs."""
        logs = [
            f"--- {w.pid} {w.exit_code} ---\n" + "\n".join(w.log.read_text().splitlines()[-15:]) for w in self.workers
        ]
        return "\n".join([what, *logs[-12:]])

    def close(self) -> None:
        """End what still runs."""
        self.poll_workers()
        for worker in self.workers:
            worker.send(signal.SIGKILL)
        wait_for(lambda: self.poll_workers() or all(w.ended for w in self.workers), "the workers to be gone")


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class Wire:
    """A TCP relay to a server that can be cut and mended, so that the server seems to be down."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.mended = threading.Event()
        self.mended.set()
        self.refused = 0  # number of connections while it was cut
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self.mended.clear()
        for end in list(self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self.mended.set()

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if not self.mended.is_set():
                self.refused += 1
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            for source, target in ((client, server), (server, client)):
                self._open.add(source)
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
        self._open.discard(source)
        source.close()


@contextmanager
def wire(url: str) -> Iterator[tuple[Wire, str]]:
    """Yield a wire to the server of a URL on this machine, and the URL through it."""
    port = urlsplit(url).port
    assert port is not None
    line = Wire(port)
    try:
        yield line, url.replace(f":{port}", f":{line.port}")
    finally:
        line.close()
