"""The workers of a fleet restart when they die, until there are too many deaths without a result."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import psutil
import pytest

from hpsearch.search.cli import main
from hpsearch.search.fleet import fleet as fleets
from hpsearch.search.fleet.fleet import MAX_DEATHS, Fleet
from hpsearch.search.fleet.fork_server import ForkedProcess, can_fork, start_fork_server
from hpsearch.search.process import exits
from hpsearch.search.run.running import find_searches, register_search, stop_searches
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.storage.embedded.process import wait_until
from hpsearch.storage.trials.lost_attempts import LossCause

# One pytest-xdist process runs the tests that fork, so that the libraries of workers are loaded once.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("forked")]

MANY = 1000  # number of workers, so large that each gets one thread
ABORTING = [sys.executable, "-S", "-c", "import os; os.abort()"]


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Return a fleet of one worker that aborts at its start."""
    monkeypatch.setattr(fleets, "_MAX_RESTART_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(fleets, "can_fork", lambda: False)
    monkeypatch.setattr(fleets, "_count_oom_kills", lambda: 0)  # others of the machine may run out of memory meanwhile
    monkeypatch.setattr(fleets, "_start_interpreter", lambda *_: subprocess.Popen(ABORTING))
    losses: list[LossCause] = []
    made = Fleet(
        "study", WorkerOptions(), workers=1, log_dir=tmp_path, gpus=[], on_loss=lambda _, cause: losses.append(cause)
    )
    made.losses = losses  # type: ignore[attr-defined]
    with closing(made):
        yield made


def test_a_fleet_stops_early_if_an_objective_kills_its_workers(fleet: Fleet) -> None:
    fleet.start()
    while fleet.poll(0):
        time.sleep(0.01)
    assert len(fleet.slots[0].pids) == MAX_DEATHS
    assert fleet.slots[0].exit_code == -6
    log = fleet.slots[0].log
    log.unlink()
    assert fleet.gave_up == (f"worker 0 gave up (exit code -6): no message (its log is empty or deleted); log: {log}",)


def test_a_completed_trial_resets_the_count_of_worker_deaths(fleet: Fleet) -> None:
    fleet.start()
    with_result = 0
    while fleet.poll(with_result):
        with_result = min(len(fleet.slots[0].pids) // 2, 3)  # one after every second start, three in all
        time.sleep(0.01)
    assert len(fleet.slots[0].pids) > MAX_DEATHS


@pytest.mark.parametrize(
    ("command", "causes"),
    [
        ("kill -KILL $$", [LossCause.KILLED] * 4 * MAX_DEATHS),
        ("kill -ABRT $$", [LossCause.CRASHED] * MAX_DEATHS),
        ("exit 7", [LossCause.CRASHED] * MAX_DEATHS),
        ("exit 1", []),  # the worker itself reports that a service is unavailable
    ],
)
def test_a_fleet_finds_the_cause_of_a_death_and_a_kill_counts_as_a_quarter(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, command: str, causes: list[LossCause]
) -> None:
    monkeypatch.setattr(fleets, "_start_interpreter", lambda *_: subprocess.Popen(["sh", "-c", command]))
    fleet.start()
    while fleet.poll(0):
        time.sleep(0.01)
    assert fleet.losses == causes  # type: ignore[attr-defined]
    assert len(fleet.slots[0].pids) == (len(causes) or MAX_DEATHS)


@pytest.mark.parametrize("code", [0, 2, 3, 143])
def test_exit_codes_of_user_code_are_not_those_of_the_worker(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    command = [sys.executable, "-S", "-c", f"import os; os._exit({code})"]
    monkeypatch.setattr(fleets, "_start_interpreter", lambda *_: subprocess.Popen(command))
    fleet.start()
    while fleet.poll(0):
        time.sleep(0.01)
    assert len(fleet.slots[0].pids) == MAX_DEATHS
    why = f"hpsearch: code of the objective ended the worker's process with exit code {code}"
    assert fleet.gave_up[0].startswith(f"worker 0 gave up (exit code 1): {why};")


def test_workers_that_do_not_stop_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    command = [sys.executable, "-S", "-c", code]
    monkeypatch.setattr(fleets, "can_fork", lambda: False)
    monkeypatch.setattr(fleets, "_KILL_MARGIN_SECONDS", 0.01)
    monkeypatch.setattr(fleets, "_start_interpreter", lambda *_: subprocess.Popen(command, stdout=subprocess.PIPE))
    with closing(Fleet("study", WorkerOptions(grace=0), workers=1, log_dir=tmp_path, gpus=[])) as fleet:
        fleet.start()
        worker = fleet.slots[0].process
        assert isinstance(worker, subprocess.Popen)
        assert worker.stdout is not None
        with worker.stdout:
            worker.stdout.readline()
            fleet.stop()
            while fleet.poll(0):
                time.sleep(0.01)
    assert (fleet.slots[0].exit_code, fleet.slots[0].state, fleet.gave_up) == (-9, "stopped", ())


def test_a_suspended_worker_is_stopped_when_the_budget_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "can_fork", lambda: False)
    monkeypatch.setattr(fleets, "_KILL_MARGIN_SECONDS", 0.01)
    monkeypatch.setattr(fleets, "_EXIT_SECONDS", 0.2)
    command = [sys.executable, "-S", "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"]
    monkeypatch.setattr(fleets, "_start_interpreter", lambda *_: subprocess.Popen(command))
    with closing(Fleet("study", WorkerOptions(grace=0), workers=1, log_dir=tmp_path, gpus=[])) as fleet:
        fleet.start()
        while fleet.poll(0, is_done=True):
            time.sleep(0.01)
    assert (fleet.slots[0].exit_code, fleet.slots[0].state, fleet.gave_up) == (-9, "stopped", ())


def test_two_runs_of_one_study_have_different_logs(fleet: Fleet, tmp_path: Path) -> None:
    def names(made: Fleet) -> list[str]:
        return [slot.log.name for slot in made.slots]

    def another() -> Fleet:
        return Fleet("study", WorkerOptions(), workers=2, log_dir=tmp_path, gpus=[])

    assert names(fleet) == ["worker-0.log"]
    with closing(another()) as second:
        assert names(second) == ["worker-1.log", "worker-2.log"]
        fleet.close()
        with closing(another()) as third:
            assert names(third) == ["worker-0.log", "worker-3.log"]
            assert [slot.index for slot in third.slots] == [0, 3]


def forked(arguments: list[str], log: Path, environment: dict[str, str] | None = None) -> ForkedProcess:
    return ForkedProcess(partial(main, arguments), arguments, environment or dict(os.environ), log)


def ended(process: ForkedProcess | subprocess.Popen[bytes]) -> int:
    while (code := process.poll()) is None:
        time.sleep(0.01)
    return code


@pytest.mark.skipif(not can_fork(), reason="workers are not forked here: no Linux, or there is an accelerator")
@pytest.mark.soak
def test_a_forked_command_equals_a_new_process(tmp_path: Path) -> None:
    """Environment, output, session and exit code are equal. The next command needs no interpreter start."""
    start_fork_server(MANY)
    log = tmp_path / "log"
    environment = {**os.environ, "HPSEARCH_HOME": str(tmp_path / "nowhere"), "ONLY_HERE": "1"}
    worker = ForkedProcess(
        partial(main, ["worker", "--study", "s", "--lease", "0"]),
        ["worker", "--study", "s", "--lease", "0"],
        environment,
        log,
    )
    assert ended(worker) == 2
    assert "--lease" in log.read_text()
    assert "ONLY_HERE" not in os.environ
    again = forked(["--help"], log, environment)
    assert ended(again) == 0
    assert "Usage: hpsearch" in log.read_text()


def _leave_a_thread() -> int:
    exits._EXIT_SECONDS = 0.1
    threading.Thread(target=threading.Event().wait, name="left").start()
    return 3


@pytest.mark.skipif(not can_fork(), reason="workers are not forked here: no Linux, or there is an accelerator")
def test_threads_of_user_code_do_not_prevent_the_exit_of_a_worker(tmp_path: Path) -> None:
    start_fork_server(MANY)
    environment = {**os.environ, exits.EXIT_FILE_VARIABLE: str(tmp_path / "exit")}
    assert ended(ForkedProcess(_leave_a_thread, [], environment, tmp_path / "log")) == 3
    assert (tmp_path / "log").read_text() == "hpsearch: ended while code of the objective was running: thread left\n"
    assert (tmp_path / "exit").read_text() == "3"


def _use_all_memory() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
    with contextlib.suppress(MemoryError):
        left = list[object]()
        for size in (1 << 16, 1 << 10, 32):
            with contextlib.suppress(MemoryError):
                while True:
                    left.append(bytearray(size))
    return 3


@pytest.mark.skipif(not can_fork(), reason="workers are not forked here: no Linux, or there is an accelerator")
def test_a_worker_exits_without_memory_for_a_thread(tmp_path: Path) -> None:
    start_fork_server(MANY)
    environment = {**os.environ, exits.EXIT_FILE_VARIABLE: str(tmp_path / "exit")}
    assert ended(ForkedProcess(_use_all_memory, [], environment, tmp_path / "log")) == 3


def test_the_searches_of_a_home_are_found_and_stopped(tmp_path: Path) -> None:
    logs = tmp_path / "logs" / "wine"
    logs.mkdir(parents=True)
    code = f"""
import signal
from pathlib import Path
from hpsearch.search.run.running import register_search
with register_search(Path({str(logs)!r})):
    print(flush=True)
    signal.pause()
"""
    assert find_searches(tmp_path) == []
    search = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert search.stdout is not None
    with search.stdout:
        search.stdout.readline()
    found = find_searches(tmp_path)
    assert [(name, running.pid) for name, running in found] == [("wine", search.pid)]
    assert stop_searches(found)
    search.wait()
    assert find_searches(tmp_path) == []
    assert list(logs.iterdir()) == []


def test_a_search_starts_while_another_command_deletes_its_study(tmp_path: Path) -> None:
    with register_search(tmp_path / "deleted"):
        assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not can_fork(), reason="workers are not forked here: no Linux, or there is an accelerator")
def test_a_forked_worker_can_use_loader_processes(tmp_path: Path) -> None:
    start_fork_server(MANY)
    arguments = [
        "train",
        "breast_cancer",
        "--epochs",
        "1",
        "--set",
        "num_workers=1",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    worker = forked(arguments, tmp_path / "log")
    assert ended(worker) == 0, (tmp_path / "log").read_text()


@pytest.mark.skipif(not can_fork(), reason="workers are not forked here: no Linux, or there is an accelerator")
def test_the_exit_of_a_worker_is_detected_if_the_program_blocks_sigchld(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys, time
from pathlib import Path
from hpsearch.search.fleet.fork_server import ForkedProcess, start_fork_server
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
if __name__ == "__main__":
    start_fork_server(1)
    worker = ForkedProcess(time.tzset, ["tzset"], dict(os.environ), Path({str(tmp_path / "log")!r}))
    while worker.poll() is None:
        time.sleep(0.01)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


_WATCH = """
import os, signal, sys
from pathlib import Path
from hpsearch.search.fleet import fork_server

if __name__ == "__main__":
    # A fleet of one, which is killed; its worker is this very script.
    process = fork_server._context.Process(target=exec, args=(Path(sys.argv[1]).read_text(), {"fleet": os.getpid()}))
    process.start()
    signal.pause()
"""
_WORKER = """
import os, time
from concurrent.futures import ThreadPoolExecutor
from hpsearch.search.process.children import make_fleet_watcher
gone = make_fleet_watcher(fleet)
time.monotonic = lambda: 0.0  # as packages do that freeze the clock
try:
    with ThreadPoolExecutor(2) as threads:  # a worker's training and its watchdog ask at the same time
        answers = set(threads.map(lambda _: any(gone() for _ in range(5000)), range(2)))
except RuntimeError as error:
    answers = error
print("watching" if answers == {False} else answers, flush=True)
while not gone():
    time.sleep(0.01)
"""


@pytest.mark.skipif(not can_fork(), reason="workers are not forked here: no Linux, or there is an accelerator")
def test_a_forked_worker_detects_that_its_fleet_was_killed(tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(_WATCH)
    (tmp_path / "worker.py").write_text(_WORKER)
    fleet = subprocess.Popen(
        [sys.executable, tmp_path / "watch.py", tmp_path / "worker.py"], stdout=subprocess.PIPE, text=True
    )
    assert fleet.stdout is not None
    assert fleet.stdout.readline() == "watching\n"
    fleet.kill()
    assert fleet.stdout.read() == "", "the worker has ended, and the server that it was forked from"
    fleet.wait()


@pytest.mark.skipif(not can_fork(), reason="workers are not forked here: no Linux, or there is an accelerator")
def test_the_fork_server_has_one_thread(tmp_path: Path) -> None:
    """Except for a memory allocator's thread (pyarrow's jemalloc), which handles forks itself."""
    start_fork_server(MANY)
    forked = ForkedProcess(
        partial(main, ["--help"]), ["--help"], dict(os.environ), tmp_path / "log"
    )  # it runs when all libraries are loaded
    assert ended(forked) == 0
    (server,) = [
        one for one in psutil.Process().children() if "hpsearch.search.fleet.preload" in "".join(one.cmdline())
    ]
    names = [(task / "comm").read_text().strip() for task in Path(f"/proc/{server.pid}/task").iterdir()]
    assert len([name for name in names if name != "jemalloc_bg_thd"]) == 1, names


@pytest.mark.skipif(not can_fork(), reason="workers are not forked here: no Linux, or there is an accelerator")
def test_the_socket_is_not_in_a_folder_in_which_others_may_rename_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of another user at the socket would receive the environment of the workers."""
    with tempfile.TemporaryDirectory(dir="/tmp") as shared, tempfile.TemporaryDirectory(dir="/tmp") as home:
        Path(shared).chmod(0o777)
        command = "from hpsearch.search.fleet.fork_server import start_fork_server; start_fork_server(1); input()"
        environment = {**os.environ, "TMPDIR": shared, "HPSEARCH_HOME": home}
        fleet = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, env=environment)
        assert wait_until(lambda: bool(list(Path(home, "tmp").glob("pymp-*/listener-*"))), timeout=60)
        assert not list(Path(shared).glob("pymp-*"))
        fleet.communicate()

        monkeypatch.setattr(tempfile, "tempdir", shared)
        (file := tmp_path / "file").touch()
        monkeypatch.setenv("HPSEARCH_HOME", str(file))
        monkeypatch.setitem(multiprocessing.process.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="Not a directory"):
            ForkedProcess(partial(main, ["--help"]), ["--help"], dict(os.environ), tmp_path / "log")


@pytest.mark.skipif(not can_fork(), reason="workers are not forked here: no Linux, or there is an accelerator")
def test_the_folder_of_the_socket_is_removed_although_the_fleet_is_killed() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short path, as that of a socket has to be
        command = "from hpsearch.search.fleet.fork_server import start_fork_server; start_fork_server(1); input()"
        environment = {**os.environ, "TMPDIR": folder}
        killed = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, env=environment)
        assert wait_until(lambda: bool(list(Path(folder).glob("pymp-*/listener-*"))), timeout=60)
        killed.kill()
        killed.communicate()
        assert wait_until(lambda: not list(Path(folder).glob("pymp-*")), timeout=60)


@pytest.mark.skipif(not can_fork(), reason="workers are not forked on this machine")
def test_starts_in_several_threads_change_neither_output_nor_main_module() -> None:
    def describe() -> tuple[list[str], object]:
        return [str(Path(f"/proc/self/fd/{number}").readlink()) for number in (1, 2)], sys.modules["__main__"]

    def start() -> None:
        for _ in range(100):
            start_fork_server(1)

    before = describe()
    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert describe() == before
