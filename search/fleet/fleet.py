"""The fleet of this machine: worker processes, which it restarts after they die and stops when it ends."""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpsearch.search.fleet.cores_and_gpus import assign_gpus, thread_environment
from hpsearch.search.fleet.fork_server import ForkedProcess, can_fork, resume_fork_server, start_fork_server
from hpsearch.search.fleet.rank_launcher import join_study_on_devices
from hpsearch.search.process.children import kill_session
from hpsearch.search.process.exits import (
    EXIT_DRAINED,
    EXIT_FILE_VARIABLE,
    EXIT_GAVE_UP,
    EXIT_UNAVAILABLE,
    EXIT_USER_ERROR,
)
from hpsearch.search.worker.lifecycle import join_study
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.storage.files import lock_file, read_last_lines
from hpsearch.storage.trials.lost_attempts import LossCause
from hpsearch.storage.trials.process_identity import make_process_name

MAX_DEATHS = 5  # consecutive deaths, without progress of the study in between, after which a worker is not restarted
_MAX_RESTART_DELAY_SECONDS = 30.0
_KILL_MARGIN_SECONDS = 5.0  # after the grace period, in which a worker that works has exited
_EXIT_SECONDS = 30.0  # for the exit of workers after the budget is spent
_OUTAGE_GRACE_SECONDS = 5.0  # period after an outage in which a worker's exit is still attributed to the outage
_OOM_SECONDS = 10.0  # from an OOM kill to the end of the process, whose memory the kernel frees first

_OTHERS_SIGNALS = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}  # sent by other processes


@dataclass
class WorkerSlot:
    """One worker of the fleet: its current process, log and exit code. A restart replaces the process."""

    index: int
    log: Path
    process: subprocess.Popen[bytes] | ForkedProcess | None = None
    process_name: str = ""
    deaths: float = 0.0  # a death by a signal of another process counts in part
    restart_at: float = 0.0
    is_stop_requested: bool = False
    exit_code: int | None = None  # set when the worker is not restarted
    pids: list[int] = field(default_factory=list)

    @property
    def exit_file(self) -> Path:
        """File to which the worker writes its exit code."""
        return self.log.with_suffix(".exit")

    def has_reported(self, code: int) -> bool:
        """Return whether the worker itself exited with this code. Code of the objective can call `os._exit`."""
        try:
            return self.exit_file.read_text() == str(code)
        except OSError:
            return False

    @property
    def state(self) -> str:
        """The state of the worker: ``running``, ``restarting``, ``done``, ``stopped`` or ``failed``."""
        if self.process is not None:
            return "running"
        if self.exit_code is None:
            return "restarting"
        if self.exit_code == 0:
            return "done"
        return "stopped" if self.exit_code == EXIT_DRAINED or self.is_stop_requested else "failed"

    def read_last_error(self) -> str:
        """Return the last error in the worker's log; if there is none, the last line of the log."""
        lines = read_last_lines(self.log)
        errors = [line for line in lines if " ERROR " in line or line.startswith("hpsearch:")]
        return (errors or lines or ["no message (its log is empty or deleted)"])[-1]


class Fleet:
    """The worker processes of a study on this machine.

    Args:
        study: name of the study.
        options: options of the workers.
        workers: number of workers.
        log_dir: folder of the workers' logs.
        gpus: CUDA devices to assign to the workers; if empty, no GPU is assigned.
        failed_at_start: number of failed trials of the study at the start of the fleet.
        study_id: id of the study in the database, which the workers check; None to join any study of this name.
        on_loss: called with the name and the cause if the process of a worker with one device has not ended by itself.
    """

    def __init__(  # noqa: PLR0913 the options of a fleet are keywords
        self,
        study: str,
        options: WorkerOptions,
        *,
        workers: int,
        log_dir: Path,
        gpus: list[str],
        failed_at_start: int = 0,
        study_id: int | None = None,
        on_loss: Callable[[str, LossCause], None] = lambda *_: None,
    ) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self._locks = ExitStack()
        logs = ((index, log_dir / f"worker-{index}.log") for index in itertools.count())
        free = ((index, log) for index, log in logs if self._lock_log(log))
        self.slots = [WorkerSlot(index, log) for index, log in itertools.islice(free, workers)]
        self._study, self._options, self._command = study, options, ["worker", "--study", study]
        self._workers = workers
        self._can_fork = can_fork()
        self._environment = {**os.environ, **options.environment(), **thread_environment(workers)}
        self._gpus = gpus
        # A worker that starts late counts the failures of the other workers too.
        self._environment["HPSEARCH_FLEET_FAILED"] = str(failed_at_start)
        # Every worker's role can replace the study by one of the same name, whose code the command has not checked.
        self._environment["HPSEARCH_FLEET_STUDY"] = "" if study_id is None else f"{study}/{study_id}"
        self._is_stopping = False
        self._kill_at = self._done_at = math.inf
        self._progress = 0
        self._outage_until = 0.0
        self._on_loss = on_loss
        self._oom_kills = _count_oom_kills()
        self._oom_kill_times = list[float]()  # of OOM kills to which no death of a worker was attributed

    def _lock_log(self, log: Path) -> bool:
        """Lock a log file for this fleet; return False if another fleet of the study holds the lock."""
        descriptor = lock_file(log)
        if descriptor is None:
            return False
        self._locks.callback(os.close, descriptor)
        return True

    def close(self) -> None:
        """Unlock the log files."""
        self._locks.close()

    def start(self) -> None:
        """Start every worker."""
        for slot in self.slots:
            self._spawn(slot)

    def _spawn(self, slot: WorkerSlot) -> None:
        slot.log.parent.mkdir(parents=True, exist_ok=True)  # may have been deleted
        slot.exit_file.unlink(missing_ok=True)
        environment = {**self._environment, "HPSEARCH_FLEET_PID": str(os.getpid())}
        environment[EXIT_FILE_VARIABLE] = str(slot.exit_file)
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(assign_gpus(slot.index, self._gpus, self._options.devices))
        slot.process = self._fork(environment, slot.log) or _start_interpreter(self._command, environment, slot.log)
        slot.process_name = make_process_name(slot.process.pid)
        slot.pids.append(slot.process.pid)

    def _fork(self, environment: dict[str, str], log: Path) -> ForkedProcess | None:
        if self._can_fork:
            try:
                start_fork_server(self._workers)
                join = join_study if self._options.devices == 1 else join_study_on_devices
                work = functools.partial(join, self._study, self._options)
                return ForkedProcess(work, self._command, environment, log)
            except (OSError, EOFError):  # such as a temporary folder whose path is too long for a socket
                self._can_fork = False
        return None

    def poll(self, progress: int, *, is_outage: bool = False, is_done: bool = False) -> bool:
        """Restart the workers that died, except those that died too often.

        Args:
            progress: number of reported epochs, and of COMPLETE and PRUNED trials, of the study. When it increases, the
                counts of deaths are reset. FAIL trials do not count: an objective that kills its process in the first
                epoch fails every trial, and would spend the whole budget before the fleet gives up.
            is_outage: whether the database is unavailable. The exit of a worker during an outage does not count as a
                death; the worker restarts when the database is available again.
            is_done: whether the budget is spent and no trial is running. Workers that do not exit then, for example
                because they are suspended, are stopped.

        Returns:
            Whether any worker is running or will be restarted.
        """
        if is_outage:
            self._outage_until = time.monotonic() + _OUTAGE_GRACE_SECONDS
        is_outage = time.monotonic() < self._outage_until
        if progress > self._progress:
            self._progress = progress
            for slot in self.slots:
                slot.deaths = 0
        self._done_at = min(self._done_at, time.monotonic()) if is_done else math.inf
        if not self._is_stopping and time.monotonic() - self._done_at > _EXIT_SECONDS:
            self.stop()
        if time.monotonic() >= self._kill_at:
            self.stop(kill=True)
        self._watch_oom_kills()
        for slot in self.slots:
            if slot.process is not None and (code := slot.process.poll()) is not None:
                self._record_exit(slot, code, is_outage=is_outage)
            elif slot.state == "restarting" and not is_outage and time.monotonic() >= slot.restart_at:
                self._spawn(slot)
        return any(slot.exit_code is None for slot in self.slots)

    def _record_exit(self, slot: WorkerSlot, code: int, *, is_outage: bool) -> None:
        slot.process = None
        if code < 0 or not slot.has_reported(code):  # the worker has not ended its session itself
            kill_session(slot.pids[-1])
        if (cause := self._find_loss_cause(slot, code)) is not None:
            self._on_loss(slot.process_name, cause)
        if cause is LossCause.CRASHED and code in {0, EXIT_USER_ERROR, EXIT_GAVE_UP, EXIT_DRAINED}:
            with suppress(OSError), slot.log.open("a") as log:  # its folder may be deleted
                log.write(f"hpsearch: code of the objective ended the worker's process with exit code {code}\n")
            code = EXIT_UNAVAILABLE
        slot.exit_file.unlink(missing_ok=True)
        is_final = code in {0, EXIT_GAVE_UP, EXIT_DRAINED} or (code == EXIT_USER_ERROR and not is_outage)
        if not (is_final or is_outage):
            slot.deaths += 1 if cause is None else cause.weight
        if is_final or self._is_stopping or slot.deaths >= MAX_DEATHS:
            slot.exit_code = code
        else:
            slot.restart_at = time.monotonic() + min(2.0 ** max(slot.deaths - 1, 0) - 1, _MAX_RESTART_DELAY_SECONDS)

    def _find_loss_cause(self, slot: WorkerSlot, code: int) -> LossCause | None:
        """Return why the process of a worker ended; None if the worker itself exited."""
        if code in _OTHERS_SIGNALS:
            self._watch_oom_kills()
            if code == -signal.SIGKILL and self._oom_kill_times:
                self._oom_kill_times.pop()
                return LossCause.OUT_OF_MEMORY
            return LossCause.KILLED
        has_exited = code == EXIT_UNAVAILABLE or self._is_stopping or slot.has_reported(code)
        return LossCause.CRASHED if code < 0 or not has_exited else None

    def _watch_oom_kills(self) -> None:
        now, before, self._oom_kills = time.monotonic(), self._oom_kills, _count_oom_kills()
        self._oom_kill_times = [at for at in self._oom_kill_times if now - at < _OOM_SECONDS]
        self._oom_kill_times += [now] * (self._oom_kills - before)

    def stop(self, *, kill: bool = False, within: float | None = None) -> None:
        """Send SIGTERM to the workers, so that they save a checkpoint and exit. `poll` kills those that do not exit.

        Args:
            kill: whether to send SIGKILL instead.
            within: seconds until `poll` kills the workers; None for the grace period and a margin.
        """
        self._is_stopping = True
        resume_fork_server()
        within = self._options.grace + _KILL_MARGIN_SECONDS if within is None else within
        self._kill_at = min(self._kill_at, time.monotonic() + within)
        for slot in self.slots:
            slot.is_stop_requested |= slot.exit_code is None
            if slot.process is not None:
                slot.process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
            elif slot.exit_code is None:
                slot.exit_code = EXIT_DRAINED

    @property
    def gave_up(self) -> tuple[str, ...]:
        """One line per worker that gave up, with the reason."""
        return tuple(
            f"worker {slot.index} gave up (exit code {slot.exit_code}): {slot.read_last_error()}; log: {slot.log}"
            for slot in self.slots
            if slot.state == "failed"
        )


def _count_oom_kills() -> int:
    """Return how many processes the kernel's OOM killer has ended since boot, in all cgroups; 0 if unknown."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:  # no Linux, or a sandbox
        return 0
    return int(found[1]) if found else 0


def _start_interpreter(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a worker as a new Python interpreter."""
    with log.open("ab") as output:
        # -P: a module in the user's folder must not hide an installed package of the same name.
        # A new session: Ctrl-C in the terminal must reach only the fleet, which forwards it once.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "hpsearch", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
