"""Signals of processes, and their sessions."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

import psutil

from hpsearch.search.process import kill_session, restore_handlers, stop_on_signals
from hpsearch.storage.embedded.process import is_running, wait_until


def test_a_command_that_nohup_starts_ignores_the_end_of_the_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with restore_handlers():
            stop_on_signals(signal.SIGHUP, signal.SIGTERM)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) not in {signal.SIG_IGN, signal.SIG_DFL}
    finally:
        signal.signal(signal.SIGHUP, before)


def test_only_the_processes_of_a_session_are_killed() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); input()"
    leaders = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for _ in range(2)
    ]
    ended, other = [psutil.Process(int(each.stdout.readline())) for each in leaders if each.stdout]
    try:
        leaders[0].kill()
        leaders[0].wait()
        kill_session(leaders[0].pid)
        assert wait_until(lambda: not is_running(ended), timeout=60)
        assert is_running(other)
    finally:
        for process in (ended, other):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for each in leaders:
            each.communicate()
