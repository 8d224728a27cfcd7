"""Commands whose outputs are full, closed or unusable."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from hpsearch.search.cli import main
from tests.waiting import wait_for


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
@pytest.mark.parametrize("is_buffered", [True, False])
def test_a_full_output_ends_a_command_with_one_line(
    monkeypatch, capsys: pytest.CaptureFixture[str], is_buffered: bool
) -> None:
    device = Path("/dev/full")
    unbuffered = io.TextIOWrapper(cast(Any, device.open("wb", buffering=0)), write_through=True)
    with device.open("w") if is_buffered else unbuffered as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            main(["--help"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "hpsearch: the output cannot be written (No space left on device)\n"


@pytest.mark.parametrize("redirection", ["<&- >&- 2>&-", "0>/dev/zero 1</dev/zero 2</dev/zero"])
def test_unusable_streams_are_replaced_by_the_null_device(tmp_path: Path, redirection: str) -> None:
    code = f"""
from hpsearch.standard_streams import open_standard_streams
open_standard_streams()
import os, sys
with open({str(tmp_path / "file")!r}, "w") as file:
    print("to nowhere")
    file.write(f"{{file.fileno() > 2}} {{sys.stdin.read()!r}} {{os.path.samefile('/dev/null', '/dev/fd/2')}}")
    file.write(f" {{[os.get_inheritable(stream) for stream in range(3)]}}")
"""
    subprocess.run(["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", code], check=True)
    assert (tmp_path / "file").read_text() == "True '' True [True, True, True]"


@pytest.mark.soak
def test_a_full_stderr_does_not_change_the_exit_code() -> None:
    for arguments in (["show", "--trial", "x", "s"], ["smoke", "nowhere.py"]):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run([sys.executable, "-m", "hpsearch", *arguments], stderr=full, check=False)
        assert done.returncode == 2


def test_the_output_shows_characters_that_its_encoding_lacks() -> None:
    code = (
        "from hpsearch.standard_streams import open_standard_streams\nopen_standard_streams()\nprint('\\u00fc\\u4e2d')"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "\\xfc\\u4e2d\n"


@pytest.mark.parametrize("open_output", [os.pipe, pty.openpty])
def test_a_closed_output_ends_a_command_but_not_a_search(open_output: Callable[[], tuple[int, int]]) -> None:
    reader, writer = open_output()
    os.close(reader)
    command = [sys.executable, "-m", "hpsearch", "--help"]
    assert subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False).returncode == 0
    code = """
import sys
from hpsearch.search.console import PlainConsole
console = PlainConsole(outlives_pipe=True)
for _ in range(3):
    console.print("text")
print("later", flush=True)
sys.stderr.write("end")
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "end")


def test_a_full_pipe_that_does_not_block_loses_no_text() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    command = subprocess.Popen([sys.executable, "-m", "hpsearch", "run", "--help"], stdout=writer)
    os.close(writer)
    wait_for(lambda: _count_unread(reader) == 4096, "a full pipe")
    with os.fdopen(reader) as stream:
        text = stream.read()
    assert command.wait() == 0
    assert "--trials" in text
    assert text.endswith("\n")
    assert len(text) > 8192


def _count_unread(pipe: int) -> int:
    """Return the number of bytes that wait in a pipe."""
    (number,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return int(number)
