"""Signals and failures while a command is loaded, and while it exits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpsearch.search.process.exits import EXIT_FILE_VARIABLE

_INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == "hpsearch.search.cli":
            os.kill(os.getpid(), signal.Signals[sys.argv[1]])

sys.meta_path.insert(0, Finder())
from hpsearch.__main__ import main
main()
"""


def test_ctrl_c_is_handled_before_the_command_is_loaded() -> None:
    command = [sys.executable, "-c", _INTERRUPTED, "SIGINT"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "hpsearch: interrupted\n")


@pytest.mark.soak
def test_ctrl_c_within_an_import_takes_effect_after_it() -> None:
    """The C code of torch catches all exceptions while it imports numpy."""
    code = _INTERRUPTED.replace("hpsearch.search.cli", "torch").replace(
        "os.kill(os.getpid(), signal.Signals[sys.argv[1]])",
        """
            try:
                os.kill(os.getpid(), signal.SIGINT)
                sum(range(1000))
            except KeyboardInterrupt:
                print("caught", flush=True)""",
    )
    done = subprocess.run([sys.executable, "-c", code, "smoke", "digits"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "hpsearch: interrupted\n")


@pytest.mark.soak
def test_ctrl_c_in_a_finalizer_is_not_lost(tmp_path: Path) -> None:
    """Python prints an exception of a finalizer and discards it."""
    file = tmp_path / "finalizer.py"
    file.write_text(
        """
import os, signal, time

class Finalizer:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))

Finalizer()
time.sleep(60)
"""
    )
    command = [sys.executable, "-m", "hpsearch", "train", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "hpsearch: interrupted\n")


_INTERRUPTED_AT_EXIT = """
import atexit, os

def interrupt():
    os.kill(os.getpid(), 2)
    sum(number for number in range(1000))  # the handler runs between two of these

atexit.register(interrupt)
from hpsearch.__main__ import main
main()
"""


def test_ctrl_c_while_the_interpreter_exits_is_silent() -> None:
    command = [sys.executable, "-c", _INTERRUPTED_AT_EXIT, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_worker_reports_a_stop_before_it_is_loaded(tmp_path: Path) -> None:
    """Otherwise its fleet would attribute the exit to code of the objective."""
    environment = {**os.environ, EXIT_FILE_VARIABLE: str(tmp_path / "exit")}
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED, "SIGTERM"], env=environment, check=False)
    assert (done.returncode, (tmp_path / "exit").read_text()) == (143, "143")


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_backup_without_leftovers(tmp_path: Path, number: signal.Signals) -> None:
    code = f"""
import os, tempfile, time
from hpsearch.search.cli.services import _exit_on_signals
_exit_on_signals()
with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):
    os.kill(os.getpid(), {number})
    time.sleep(60)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_a_lack_of_memory_is_one_line() -> None:
    code = _INTERRUPTED.replace("os.kill(os.getpid(), signal.Signals[sys.argv[1]])", "raise MemoryError")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "hpsearch: not enough memory; end other programs, or raise the limit of memory\n",
    )


_HANDLED = """
import os, signal, time
from hpsearch import __main__ as program

program._HANDLING_SECONDS = 0.5
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
program._start_signal_watchdog()
handled = []
before = signal.signal(signal.SIGTERM, lambda *_: handled.append(1))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.2)
signal.signal(signal.SIGTERM, before)
time.sleep(1.5)
print(len(handled))
"""


def test_a_command_may_take_time_after_a_search_has_handled_its_signal() -> None:
    """To write the report, for example: the handlers of the search are restored before."""
    done = subprocess.run([sys.executable, "-c", _HANDLED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
