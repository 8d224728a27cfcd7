"""How the processes of an objective end."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import psutil

from hpsearch.search.process.children import kill_session
from hpsearch.storage.embedded.process import is_running, wait_until


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
