"""Errors of files and pipes of an objective are no end of the command's output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from hpsearch.objectives.template import write_template
from tests.faults.harness import Zygote
from tests.waiting import wait_for

_FAILING = """

import multiprocessing, os
from torch import nn


class Net(nn.Linear):
    def forward(self, x):
        if self.training:
            {statement}
        return super().forward(x)


class Failing(Wine):
    def model(self, config, train):
        return Net(13, 3)


reader, writer = multiprocessing.Pipe(duplex=False)
reader.close()
"""


@pytest.mark.parametrize(
    ("command", "statement"),
    [("train", "raise OSError(5, 'failed')"), ("smoke", "raise BrokenPipeError"), ("smoke", "writer.send(1)")],
)
def test_an_error_of_a_file_of_the_objective_is_reported(
    zygote: Zygote, tmp_path: Path, command: str, statement: str
) -> None:
    """An ended helper process or a bad disk: before, the command ended without a message and with the exit code 0."""
    write_template(tmp_path / "wine.py")
    with (tmp_path / "wine.py").open("a") as file:
        file.write(_FAILING.format(statement=statement))
    ended = zygote.command([command, "wine.py:Failing"], cwd=tmp_path, HPSEARCH_HOME=str(tmp_path / "home"))
    output, _ = ended.communicate()
    assert ended.returncode == 2
    line = (tmp_path / "wine.py").read_text().splitlines().index(f"            {statement}") + 1
    assert f"wine.py:{line}: " in output
    assert "Traceback" not in output


def test_ctrl_c_ends_a_command_whose_stderr_nobody_reads() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    code = "import time; from hpsearch.__main__ import _exit_interrupted as end; import signal; "
    code += "signal.signal(signal.SIGINT, end); print(flush=True); time.sleep(1000)"
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writer)
    assert command.stdout is not None
    command.stdout.readline()
    command.send_signal(signal.SIGINT)
    wait_for(lambda: command.poll() is not None, "the end of the command")
    assert command.returncode == 130
    command.stdout.close()
    os.close(reader)
    os.close(writer)


def test_a_variable_that_keeps_the_interpreter_open_changes_no_exit_code() -> None:
    environment = {**os.environ, "PYTHONINSPECT": "1"}
    command = [sys.executable, "-m", "hpsearch", "run", "/missing.py"]
    ended = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False)
