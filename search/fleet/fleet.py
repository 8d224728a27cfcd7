"""A fleet on this machine: K worker processes, restarted when they die, told to stop when the fleet is."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from hpsearch.search.fleet.devices import join_on_devices
from hpsearch.search.fleet.fork import ForkedProcess, can_fork, gpus_of, load_ahead, thread_settings
from hpsearch.search.process import EXIT_DRAINED, EXIT_GAVE_UP, EXIT_USER_ERROR
from hpsearch.search.worker.join import join_study
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.storage.files import lock_file

# A worker that dies this often without the study getting on is not started again.
MAX_DEATHS = 5
_LONGEST_PAUSE = 30.0  # seconds
_GRACE = 5.0  # seconds after the database's return in which a worker's end is still put down to its absence


@dataclass
class Slot:
    """One worker's place in the fleet: its process, its log, and what became of it."""

    index: int
    log: Path
    process: subprocess.Popen[bytes] | ForkedProcess | None = None
    deaths: int = 0
    restart_at: float = 0.0
    told: bool = False  # to stop
    exit_code: int | None = None  # set when the slot is not filled again
    pids: list[int] = field(default_factory=list)

    @property
    def state(self) -> str:
        """``running``, ``restarting``, ``done``, ``stopped`` or ``failed``."""
        if self.process is not None:
            return "running"
        if self.exit_code is None:
            return "restarting"
        if self.exit_code == 0:
            return "done"
        return "stopped" if self.exit_code == EXIT_DRAINED or self.told else "failed"

    def complaint(self) -> str:
        """Return the line of the worker's log that says why it ended: its last error, else its last line."""
        try:
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            return ""
        errors = [line for line in lines if " ERROR " in line or line.startswith("hpsearch:")]
        return (errors or lines or [""])[-1]


class Fleet:
    """Worker processes of one study on this machine."""

    def __init__(
        self,
        study: str,
        options: WorkerOptions,
        *,
        workers: int,
        log_dir: Path,
        gpus: list[str],
        failed_before: int = 0,
    ) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self._locks = ExitStack()
        logs = ((index, log_dir / f"worker-{index}.log") for index in itertools.count())
        free = ((index, log) for index, log in logs if self._take(log))
        self.slots = [Slot(index, log) for index, log in itertools.islice(free, workers)]
        self._study, self._options, self._command = study, options, ["worker", "--study", study]
        self._workers = workers
        self._forking = can_fork()
        self._environment = {**os.environ, **options.environment(), **thread_settings(workers)}
        self._gpus = gpus
        # One that begins late is not to try again what has failed all others.
        self._environment["HPSEARCH_FLEET_FAILED"] = str(failed_before)
        self._stopping = False
        self._settled = 0
        self._away_until = 0.0

    def _take(self, log: Path) -> bool:
        """Keep a log for this fleet, unless another one that lives has it: two runs of a study are two fleets."""
        descriptor = lock_file(log)
        if descriptor is None:
            return False
        self._locks.callback(os.close, descriptor)
        return True

    def close(self) -> None:
        """Leave the names of the logs to other fleets."""
        self._locks.close()

    def start(self) -> None:
        """Start every worker."""
        for slot in self.slots:
            self._spawn(slot)

    def _spawn(self, slot: Slot) -> None:
        environment = {**self._environment, "HPSEARCH_FLEET_PID": str(os.getpid())}
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus_of(slot.index, self._gpus, self._options.devices))
        slot.process = self._forked(environment, slot.log) or _executed(self._command, environment, slot.log)
        slot.pids.append(slot.process.pid)

    def _forked(self, environment: dict[str, str], log: Path) -> ForkedProcess | None:
        if self._forking:
            try:
                load_ahead(self._workers)
                join = join_study if self._options.devices == 1 else join_on_devices
                work = functools.partial(join, self._study, self._options)
                return ForkedProcess(work, self._command, environment, log)
            except (OSError, EOFError):  # such as a path of temporary files that is too long for a socket
                self._forking = False
        return None

    def poll(self, settled: int, *, away: bool = False) -> bool:
        """Look after the workers once.

        Args:
            settled: how many trials of the study are COMPLETE or PRUNED so far. FAIL does not count: of an objective
                that kills its process every trial fails, and the budget would be gone before anybody is told.
            away: whether the database does not answer: workers that end meanwhile are not to blame, and wait for it.

        Returns:
            Whether any worker is running or to be started again.
        """
        if away:
            self._away_until = time.monotonic() + _GRACE
        away = time.monotonic() < self._away_until
        if settled > self._settled:
            self._settled = settled
            for slot in self.slots:
                slot.deaths = 0
        for slot in self.slots:
            if slot.process is not None and (code := slot.process.poll()) is not None:
                self._ended(slot, code, away=away)
            elif slot.process is None and slot.exit_code is None and not away and time.monotonic() >= slot.restart_at:
                self._spawn(slot)
        return any(slot.exit_code is None for slot in self.slots)

    def _ended(self, slot: Slot, code: int, *, away: bool) -> None:
        slot.process = None
        final = code in {0, EXIT_GAVE_UP, EXIT_DRAINED} or (code == EXIT_USER_ERROR and not away)
        slot.deaths += not final and not away
        if final or self._stopping or slot.deaths >= MAX_DEATHS:
            slot.exit_code = code
        else:
            slot.restart_at = time.monotonic() + min(2.0 ** max(slot.deaths - 1, 0) - 1, _LONGEST_PAUSE)

    def stop(self, *, kill: bool = False) -> None:
        """Tell the workers to end their epoch, save and go; with `kill`, end them at once."""
        self._stopping = True
        for slot in self.slots:
            slot.told = slot.exit_code is None
            if slot.process is not None:
                slot.process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
            elif slot.exit_code is None:
                slot.exit_code = EXIT_DRAINED

    @property
    def gave_up(self) -> tuple[str, ...]:
        """For each worker that gave up, a line with the reason."""
        return tuple(
            f"worker {slot.index} gave up (exit code {slot.exit_code}): {slot.complaint()}; log: {slot.log}"
            for slot in self.slots
            if slot.state == "failed"
        )


def _executed(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a worker in a fresh interpreter."""
    with log.open("ab") as output:
        # -P: a module in the user's folder must not hide an installed package of the same name.
        # A session of its own: Ctrl-C in the terminal reaches the fleet alone, which passes it on once.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "hpsearch", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
