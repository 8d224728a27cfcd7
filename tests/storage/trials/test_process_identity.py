"""Detect from another process of the same machine whether a worker has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpsearch.storage.trials.process_identity import _get_start, get_machine_prefix, get_process_name, has_ended

_PROGRAM = """
import sys
from hpsearch.storage.trials.process_identity import get_process_name
print(get_process_name(), flush=True)
sys.stdin.read()
"""


def start() -> tuple[subprocess.Popen[str], str]:
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", _PROGRAM], stdin=pipe, stdout=pipe, text=True)
    assert child.stdout is not None
    return child, child.stdout.readline().strip()


def test_a_process_ends_when_it_is_killed_even_before_its_parent_looks() -> None:
    child, name = start()
    assert not has_ended(name)
    for invalid in ("nonsense", "a/b", f"{get_machine_prefix()}/x/1", f"{get_machine_prefix()}/1"):
        assert not has_ended(invalid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert has_ended(name)
    child.communicate()
    assert has_ended(name)


def test_a_reused_process_id_is_another_process() -> None:
    machine, pid, started = get_process_name().rsplit("/", 2)
    assert not has_ended(get_process_name())
    assert has_ended(f"{machine}/{pid}/{int(started) - 1}")


def test_processes_of_other_machines_and_containers_are_not_judged() -> None:
    machine, _, started = get_process_name().rsplit("/", 2)
    boot, processes, times = machine.split("/")
    assert not has_ended(f"{boot}/pid:[1]/{times}/999999999/{started}")
    assert not has_ended(f"{boot}/{processes}/time:[1]/999999999/{started}")
    assert not has_ended(f"another-boot/{processes}/{times}/999999999/{started}")
    assert not has_ended(f"{machine}/999999999/unknown"), "it could not see itself"
    assert has_ended(f"{machine}/999999999/{started}")


def test_a_program_name_may_have_spaces_and_parentheses(tmp_path: Path) -> None:
    program = tmp_path / "a ) S (b"
    program.write_text("#!/bin/sh\necho $$\nread line\n")
    program.chmod(0o755)
    child = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    pid = int(child.stdout.readline())
    assert abs(int(_get_start(pid)) - int(_get_start(os.getpid()))) < 100 * 3600 * 24, (
        "ticks, a hundredth of a second each"
    )
    child.communicate("\n")
    assert not _get_start(pid)


_HIDDEN = """
import os, sys
from pathlib import Path
from hpsearch.storage.trials import process_identity
machine, _ = process_identity.get_machine_prefix(), process_identity._is_in_own_proc()
process_identity._PROC = Path("/nonexistent")  # as the option hidepid shows it
if not os.getuid():
    os.setuid(65534)
print(*(process_identity.has_ended(f"{machine}/{pid}/0") for pid in (1, 999999999)))
"""


def test_a_process_hidden_in_proc_counts_as_running() -> None:
    done = subprocess.run([sys.executable, "-c", _HIDDEN], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def in_namespaces(*options: str) -> list[str]:
    """Return whether this process has ended, as seen from a process in other namespaces, and that process's name."""
    source = "from hpsearch.storage.trials.process_identity import *; "
    said = f"{source}print(has_ended({get_process_name()!r}), get_process_name())"
    command = ["unshare", *options, sys.executable, "-c", said]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"this machine makes no namespaces: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_container_with_foreign_proc_judges_no_process() -> None:
    """Nor is it judged itself: its start time would be that of another process."""
    judged, name = in_namespaces("--pid", "--fork")
    assert judged == "False"
    assert name.endswith("/1/unknown"), "it is the first process of its namespace, and /proc shows the machine's"
    assert not has_ended(name)


def test_start_times_of_other_time_namespaces_are_not_compared() -> None:
    """Another time namespace has another boot time, and so other start times of processes."""
    judged, name = in_namespaces("--time", "--boottime", "100000", "--fork")
    assert judged == "False"
    assert name.rsplit("/", 2)[0] != get_process_name().rsplit("/", 2)[0]
    assert not has_ended(name)
