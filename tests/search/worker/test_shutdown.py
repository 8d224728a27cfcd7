"""The deadline of a worker that shuts down."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from hpsearch.search.process.signals import GracefulShutdown, StopEvent


def test_the_grace_period_starts_at_the_signal() -> None:
    stop = StopEvent()
    shutdown = GracefulShutdown(stop, grace=100.0)
    assert not shutdown.is_shutting_down
    stop.set()
    assert stop.since is not None
    stop.since -= 40.0  # it came 40 s before anybody asked
    assert shutdown.is_shutting_down
    assert shutdown.seconds_left() == pytest.approx(60.0, abs=5.0)


LATE_SIGNAL = """
import os, signal, sys
from hpsearch.search.process.signals import exit_on_signals, ignore_stop_signals
class Late:
    def __del__(self):  # after the interpreter has restored the default handlers
        os.kill(os.getpid(), signal.SIGTERM)
late = Late()
exit_on_signals()
ignore_stop_signals()
sys.exit(3)
"""


def test_a_signal_while_the_interpreter_exits_does_not_replace_the_exit_code() -> None:
    assert subprocess.run([sys.executable, "-c", LATE_SIGNAL], check=False).returncode == 3


ADOPT = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: adopt orphans as the first process of a container does
subprocess.run([sys.executable, *sys.argv[1:]], check=True)
"""
LEFT = """
import os, subprocess, sys, time
import psutil
from hpsearch.search.process.children import end_session, remember_session
earlier = subprocess.Popen(["sh", "-c", "read line; sleep 1000"], stdin=subprocess.PIPE)  # as `> >(gzip)`
if sys.argv[1:] == ["command"]:
    remember_session()
earlier.stdin.close()
children = [os.fork() or time.sleep(1000), subprocess.Popen(["sleep", "1000"]).pid]
orphan = int(subprocess.run(["sh", "-c", "sleep 1000 >&- 2>&- & echo $!"], stdout=subprocess.PIPE).stdout)
subprocess.Popen(["sleep", "1000"], start_new_session=True).kill()  # such as a service
while len(own := psutil.Process(earlier.pid).children()) < 1 or not psutil.Process(orphan).environ():
    time.sleep(0.01)
if sys.argv[1:] == ["command"]:
    ended = sorted(end_session()) == sorted([*children, orphan])
    ended = ended and earlier.poll() is None and own[0].is_running()
else:
    ended = sorted(end_session()) == sorted([*children, orphan, earlier.pid, own[0].pid])
own[0].kill()
print(ended, os.waitpid(children[0], 0)[1], os.waitpid(children[1], 0)[1])
"""


@pytest.mark.parametrize(
    ("kind", "is_leader", "parent"),
    [("worker", True, []), ("command", True, []), ("command", False, []), ("command", True, ["-c", ADOPT])],
    ids=["worker", "leader", "member", "container"],
)
def test_a_worker_kills_the_processes_that_code_of_the_objective_left(
    kind: str, parent: list[str], *, is_leader: bool
) -> None:
    """A command spares processes that its shell has started before."""
    command = [sys.executable, *parent, "-c", LEFT, kind]
    done = subprocess.run(command, start_new_session=is_leader, capture_output=True, text=True, check=True)
    assert done.stdout == "True 9 9\n"


def test_the_grace_period_of_an_event_starts_when_it_is_detected() -> None:
    shutdown = GracefulShutdown(event := threading.Event(), grace=100.0)
    assert not shutdown.is_shutting_down
    event.set()
    assert shutdown.is_shutting_down
    assert shutdown.seconds_left() == pytest.approx(100.0, abs=5.0)


def test_the_time_limit_of_a_worker() -> None:
    assert GracefulShutdown(StopEvent(), grace=1.0, max_time=0.0).is_shutting_down
    shutdown = GracefulShutdown(StopEvent(), grace=1.0, max_time=1000.0)
    assert not shutdown.is_shutting_down
    shutdown.start()
    assert shutdown.is_shutting_down


@pytest.mark.parametrize(("end", "left"), [("+10", 10.0), ("+1000", 100.0), ("", 100.0), ("soon", 100.0)])
def test_the_end_of_a_slurm_job_limits_the_grace_period(monkeypatch: pytest.MonkeyPatch, end: str, left: float) -> None:
    """Where a time limit is nearer than the grace, it counts."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", f"{time.time() + float(end):.0f}" if end.startswith("+") else end)
    shutdown = GracefulShutdown(StopEvent(), grace=100.0)
    shutdown.start()
    assert shutdown.seconds_left() == pytest.approx(left, abs=5.0)
