"""Engines (Slurm, Kubernetes, Ray) send signals to all processes of a job, once or repeatedly."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.faults.harness import OBJECTIVE, ROOT, Arena, Zygote, wire
from tests.faults.invariants import assert_equals_undisturbed, read_trials
from tests.faults.orders import OUTSIDE, Order, write
from tests.waiting import wait_for

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("engines")]

LOADING = str(Path(__file__).with_name("loading.py"))


@pytest.mark.parametrize(
    ("objective", "passing"), [pytest.param("Loading", {"epoch": 1}, marks=pytest.mark.soak), ("OwnLoop", {"nth": 2})]
)
def test_a_signal_to_all_processes_of_a_job_ends_no_loader(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]], objective: str, passing: dict[str, int]
) -> None:
    """The worker's child processes get the signal too and continue: the epoch completes, the trial is released."""
    arena.create(1, [Order("training", "hang", trial=0, **passing)], objective=f"{LOADING}:{objective}")
    worker = arena.start()
    wait_for(lambda: arena.has_obeyed(0), "the worker to be in mid-epoch")
    assert len(psutil.Process(worker.pid).children()) >= 2, "it has loaders"
    for number in (signal.SIGTERM, signal.SIGINT):
        os.killpg(worker.pid, number)
    wait_for(lambda: "finishing the epoch" in worker.log.read_text(), "the worker to handle the signal")
    (arena.orders / "open").touch()
    wait_for(lambda: arena.poll_workers() or worker.ended, "the worker to leave")
    assert worker.exit_code == 128 + 15, arena.describe_failure("the signal did not stop the worker")
    (given_back,) = read_trials(arena.storage_url, arena.name)
    assert (given_back.state, sorted(given_back.values)) == ("WAITING", [0, 1]), "the epoch was ended"
    arena.work(1)
    if objective == "Loading":
        (trial,) = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(1), 1)
    else:
        (trial,) = read_trials(arena.storage_url, arena.name)
        assert [trial.values[epoch] / trial.values[0] for epoch in range(4)] == pytest.approx([1, 2, 3, 4], rel=0.1)
    assert trial.outcomes == ["released", "complete"]


def test_loaders_of_a_killed_worker_exit(arena: Arena) -> None:
    """Also while they load. These two loaders never finish."""
    arena.create(1, [Order("loading", "hang", trial=0)], objective=f"{LOADING}:OwnLoop")
    worker = arena.start()
    wait_for(lambda: arena.has_obeyed(0), "a loader to load")
    loaders = psutil.Process(worker.pid).children()
    assert loaders
    worker.send(signal.SIGKILL)
    wait_for(lambda: not any(one.is_running() for one in loaders), "the loaders to be gone")


@pytest.mark.soak
def test_preemptions_cost_no_retries_if_the_trial_makes_progress(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]]
) -> None:
    """Trial 0 is preempted in each of its epochs, and once more; trial 1 never completes its second epoch."""
    preempted = [
        Order("training", action, trial=0, attempt=attempt, epoch=min(attempt, 3), nth=nth)
        for attempt in range(1, 5)
        for nth, action in enumerate(["terminate", "kill"], start=1)
    ]
    arena.create(2, [*preempted, Order("training", "kill", trial=1, attempt=0, epoch=1)], retries=0)
    arena.work(1)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(2), 2)
    assert [trial.state for trial in trials] == ["COMPLETE", "FAIL"]
    assert [trial.outcomes for trial in trials] == [["lost"] * 4 + ["complete"], ["lost"] * 4]


def test_preemptions_during_the_start_fail_no_trial(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]]
) -> None:
    arena.create(1, [Order("log params", "kill", trial=0, attempt=attempt) for attempt in range(1, 4)], retries=0)
    arena.work(1)
    (trial,) = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(1), 1)
    assert trial.outcomes == ["lost"] * 3 + ["complete"]


@pytest.mark.parametrize("apart", [0.02, *(pytest.param(apart, marks=pytest.mark.soak) for apart in (0.0, 0.001))])
def test_repeated_sigterm_is_harmless(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]], apart: float
) -> None:
    arena.create(1, [Order("training", "hang", trial=0, epoch=1)])
    worker = arena.start()
    wait_for(lambda: arena.has_obeyed(0), "the worker to be in mid-epoch")
    for _ in range(5):
        worker.send(signal.SIGTERM)
        time.sleep(apart)  # the test is about signals at this distance
    wait_for(lambda: "finishing the epoch" in worker.log.read_text(), "the worker to handle the signal")
    worker.send(signal.SIGTERM)
    (arena.orders / "open").touch()
    wait_for(lambda: arena.poll_workers() or worker.ended, "the worker to leave")
    assert worker.exit_code == 128 + 15
    (trial,) = read_trials(arena.storage_url, arena.name)
    assert (trial.state, trial.values) == ("WAITING", dict(enumerate(undisturbed(1)[0][:2])))


_IN_THE_HANDLER = """
import os, signal, sys
from hpsearch.search.process import signals

def at_line(wanted, seen):
    def trace(frame, event, _):
        if frame.f_code.co_name == "on_signal":
            if event == "line" and frame.f_lineno == wanted and not seen:
                seen.append(wanted)
                os.kill(os.getpid(), signal.SIGTERM)
            return trace
    return trace

lost = []
code = signals.stop_on_signals.__code__
(handler,) = [const for const in code.co_consts if getattr(const, "co_name", "") == "on_signal"]
for line in sorted({line for *_, line in handler.co_lines() if line})[1:]:
    stop = signals.stop_on_signals()
    sys.settrace(at_line(line, seen := []))
    os.kill(os.getpid(), signal.SIGTERM)
    sys.settrace(None)
    if not stop.is_set():
        lost.append(line)
    print(line, *seen)
print("lost when another comes at lines", lost)
sys.exit(len(lost))
"""


def test_sigterm_during_any_line_of_its_handler_is_harmless(zygote: Zygote) -> None:
    asked = zygote.python(_IN_THE_HANDLER)
    said, _ = asked.communicate()
    assert asked.poll() == 0, said
    met = [line.split() for line in said.splitlines() if line[:1].isdigit()]
    assert sum(len(line) == 2 for line in met) >= 5, said


def test_a_second_ctrl_c_ends_a_worker_at_once(arena: Arena) -> None:
    arena.create(1, [Order("training", "hang", trial=0, epoch=1)])
    worker = arena.start()
    wait_for(lambda: arena.has_obeyed(0), "the worker to be in mid-epoch")
    worker.send(signal.SIGINT)
    wait_for(lambda: "finishing the epoch" in worker.log.read_text(), "the worker to handle the signal")
    worker.send(signal.SIGINT)
    wait_for(lambda: arena.poll_workers() or worker.ended, "the worker to be gone")
    assert worker.exit_code == 128 + 2


def test_the_exit_code_depends_on_whether_work_is_left(arena: Arena) -> None:
    """No work is left after a signal in the last epoch, nor in a stopped study, for running and for new workers."""
    arena.create(2, [Order("training", "hang", trial=0, epoch=3), Order("training", "hang until mended", trial=1)])
    arena.run("extend", arena.name, "--trials", "1")
    last = arena.start()
    wait_for(lambda: arena.has_obeyed(0), "the worker to be in its last epoch")
    last.send(signal.SIGTERM)
    (arena.orders / "open").touch()
    wait_for(lambda: arena.poll_workers() or last.ended, "the worker to leave")
    (trial,) = read_trials(arena.storage_url, arena.name)
    assert (trial.state, last.exit_code) == ("COMPLETE", 0)
    arena.run("extend", arena.name, "--trials", "2")
    there = arena.start()
    wait_for(lambda: arena.has_obeyed(1), "the worker to be in mid-epoch")
    arena.run("stop", arena.name)
    (arena.orders / "mended").touch()
    wait_for(lambda: arena.poll_workers() or there.ended, "the worker to leave")
    assert there.exit_code == 0
    assert [trial.state for trial in read_trials(arena.storage_url, arena.name)] == ["COMPLETE", "WAITING"]
    arena.run("worker", "--study", arena.name)


_IN_A_THREAD = """
import sys, threading
from hpsearch.search.worker.lifecycle import join_study
from hpsearch.search.worker.options import WorkerOptions

stop, codes = threading.Event(), []
if sys.argv[1] == "stopped":
    stop.set()
options = WorkerOptions(**dict(zip(("storage_url", "tracking_uri", "checkpoint_url", "home"), sys.argv[3:])))
work = threading.Thread(target=lambda: codes.append(join_study(sys.argv[2], options, stop)))
work.start()
work.join()
sys.exit(codes[0])
"""


@pytest.mark.soak
def test_a_worker_can_run_in_a_thread(arena: Arena, zygote: Zygote) -> None:
    """As in an actor of Ray, where a worker cannot handle signals."""
    arena.create(1, [])
    where = [arena.name, arena.storage_url, arena.tracking_uri, "", str(arena.home)]
    stopped = zygote.python(_IN_A_THREAD, "stopped", *where, **arena.environment())
    wait_for(lambda: stopped.poll() is not None, "the thread to leave")
    assert stopped.poll() == 128 + 15, stopped.communicate()[0]
    assert read_trials(arena.storage_url, arena.name) == []
    worked = zygote.python(_IN_A_THREAD, "works", *where, **arena.environment())
    wait_for(lambda: worked.poll() is not None, "the thread to work")
    assert worked.poll() == 0, worked.communicate()[0]
    assert [trial.state for trial in read_trials(arena.storage_url, arena.name)] == ["COMPLETE"]


_UNSHARE = ("unshare", "--pid", "--fork")


def may_unshare() -> bool:
    try:
        return subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not may_unshare(), reason="this user may not make a namespace of process ids")
def test_the_first_process_of_a_container_handles_sigterm_before_it_loads_a_library(
    arena: Arena, tmp_path: Path
) -> None:
    """The kernel discards a signal to the first process that has no handler. Here the first import blocks."""
    arena.create(1, [])
    pipe, libraries = tmp_path / "pipe", tmp_path / "libraries"
    os.mkfifo(pipe)
    libraries.mkdir()
    for library in ("optuna", "psycopg2", "pydantic", "rich", "sqlalchemy", "torch", "typer"):
        (libraries / f"{library}.py").write_text(f"open({str(pipe)!r}).read()\n")
    command = [*_UNSHARE, sys.executable, "-P", "-m", "hpsearch", "worker", "--study", arena.name]
    environment = {**os.environ, **arena.environment(), "PYTHONPATH": str(libraries)}
    started = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE)
    writers: list[int] = []
    try:
        wait_for(lambda: started.poll() is not None or open_for_a_reader(pipe, writers), "the worker to import")
        (worker,) = psutil.Process(started.pid).children()
        worker.terminate()
        assert started.wait(60) == 128 + 15
    finally:
        for writer in writers:
            os.close(writer)
        for left in [*psutil.Process(started.pid).children(), started] if started.poll() is None else []:
            left.kill()
    assert read_trials(arena.storage_url, arena.name) == []


def open_for_a_reader(pipe: Path, writers: list[int]) -> bool:
    """Open the pipe for writing if a process reads it, which then blocks until it is closed."""
    with contextlib.suppress(OSError):
        writers.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    return bool(writers)


@pytest.mark.soak
def test_a_command_tolerates_lost_connections_while_it_opens_a_study(arena: Arena) -> None:
    """When it connects, and while it creates the study."""
    with wire(arena.storage_url) as (line, through):
        arena.storage_url, there = through, arena.storage_url
        write(arena.orders, [Order("preflight check", "hang", trial=OUTSIDE, attempt=0)])
        (arena.home).mkdir()
        line.cut()
        run = arena.start("run", OBJECTIVE, "--name", arena.name, "--trials", "1", "--workers", "0")
        wait_for(lambda: line.refused, "the command to be cut off")
        line.mend()
        wait_for(lambda: arena.has_obeyed(0), "the command to run its preflight check")
        line.cut()
        line.mend()
        (arena.orders / "open").touch()
        wait_for(lambda: arena.poll_workers() or run.ended, "the study to be made")
        assert run.exit_code == 0, arena.describe_failure("it did not wait")
        assert "(new)" in run.log.read_text()
        line.cut()
        before = line.refused
        worker = arena.start()
        wait_for(lambda: line.refused > before, "the worker to be cut off")
        line.mend()
        wait_for(lambda: arena.poll_workers() or worker.ended, "the worker to leave")
        assert worker.exit_code == 0, arena.describe_failure("it did not wait")
    assert [trial.state for trial in read_trials(there, arena.name)] == ["COMPLETE"]
