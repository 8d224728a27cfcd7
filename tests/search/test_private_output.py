"""Outputs that other users can read get no secrets and no links with a token."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from hpsearch.search import console
from hpsearch.search.console import PlainConsole
from hpsearch.search.private_output import find_exposure

OTHER_UID = 65533
_NOTEBOOK = "the output goes to a notebook, which other users may be able to read"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def terminal() -> Iterator[IO[str]]:
    """Yield a terminal that is not the controlling terminal of this process."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        yield stream
    os.close(master)


def read_links(stream: IO[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what a console prints to a stream instead of ``link``."""
    printed = []
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(console, "add_tokens", lambda text: f"{text}?token")
    shown = PlainConsole()
    monkeypatch.setattr(shown, "_write_buffer", lambda: printed.extend(each.text for each in shown._buffer))
    shown.print("link")
    return "".join(printed).strip()


def test_a_terminal_of_the_user_gets_links_with_a_token(terminal: IO[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_exposure(terminal) is None
    assert read_links(terminal, monkeypatch) == "link?token"


def test_a_command_in_a_notebook_prints_no_token(terminal: IO[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython gives the command a terminal, and the notebook is a file that others may be able to read."""
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    assert find_exposure(terminal) == _NOTEBOOK
    assert read_links(terminal, monkeypatch) == "link"


def test_a_command_in_the_background_of_a_kernel_prints_no_secrets() -> None:
    """Its shell has ended, so that the kernel is not among its parents."""
    environment = {**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    command = [Path(sys.executable).with_name("hpsearch"), "secrets"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert _NOTEBOOK in done.stderr


def test_a_kernel_without_the_variable_of_jupyter_is_a_notebook_too(terminal: IO[str], tmp_path: Path) -> None:
    """VS Code starts such kernels. Other users can subscribe to the port on which a kernel sends outputs."""
    code = "import sys; from hpsearch.search.private_output import find_exposure; sys.exit(find_exposure(sys.stdout))"
    kernel = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    started = tmp_path / "errors"
    for arguments, expected in (
        (["--f=/run/kernel-v31.json"], f"{_NOTEBOOK}\n"),
        (["/a folder/db_ipykernel_launcher.py"], f"{_NOTEBOOK}\n"),
        (["from ipykernel.kernelapp import main; main()"], f"{_NOTEBOOK}\n"),
        (["-f", "notes.json"], ""),
    ):
        with started.open("w") as errors:
            subprocess.run([sys.executable, "-c", kernel, code, *arguments], stdout=terminal, stderr=errors, check=True)
        assert started.read_text() == expected


@needs_root
def test_a_terminal_of_another_user_gets_no_token(terminal: IO[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other user can place a link to the terminal at the path of the output."""
    os.chown(terminal.fileno(), OTHER_UID, -1)
    assert find_exposure(terminal) == f"the terminal belongs to uid {OTHER_UID}, who could read it"
    assert read_links(terminal, monkeypatch) == "link"
    code = "import sys; from hpsearch.search.private_output import find_exposure; sys.exit(find_exposure(sys.stdout))"
    become_controlled = "import fcntl, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0);"
    for start, exit_code in (("", 1), (become_controlled, 0)):  # as `su` leaves the terminal to its owner
        done = subprocess.run(
            [sys.executable, "-c", start + code],
            stdout=terminal,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            check=False,
        )
        assert done.returncode == exit_code


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_variables_for_colours_add_no_token_to_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    with (tmp_path / "log").open("w") as stream:
        assert read_links(stream, monkeypatch) == "link"


@needs_root
def test_a_pipe_of_another_user_is_exposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    os.chown(path, OTHER_UID, -1)
    with os.fdopen(os.open(path, os.O_RDWR), "wb", buffering=0) as stream:
        assert find_exposure(stream) == f"the output is a pipe of uid {OTHER_UID}, who could read it"
        path.chmod(0o600)
        monkeypatch.setenv("SUDO_UID", str(OTHER_UID))
        assert find_exposure(stream) is None
        monkeypatch.setenv("SUDO_UID", "0")
        os.chown(path, 65534, -1)
        assert find_exposure(stream) is not None
    read_end, write_end = os.pipe()
    with os.fdopen(read_end), os.fdopen(write_end, "w") as stream:
        os.chown(write_end, 65534, -1)  # of a user outside of the container
        assert find_exposure(stream) is None


def test_a_named_pipe_that_others_can_open_is_exposed(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    with os.fdopen(os.open(path, os.O_RDWR), "wb", buffering=0) as stream:
        assert find_exposure(stream) is None
        path.chmod(0o640)
        assert find_exposure(stream) == "other users can open the output, a named pipe (mode 0640)"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tell whether a file is open elsewhere")
def test_a_file_that_was_opened_before_it_became_private_is_exposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".env"
    path.touch()
    with path.open() as earlier:
        path.chmod(0o600)
        with path.open("w") as stream:
            assert "has the output file open, perhaps since it was not private" in str(find_exposure(stream))
            with monkeypatch.context() as patch:  # a folder in which the user cannot create files
                patch.setattr("tempfile.TemporaryFile", lambda **_: (tmp_path / "missing" / "file").touch())
                assert find_exposure(stream) is not None
            with monkeypatch.context() as patch:  # as on NFS
                patch.setattr("hpsearch.search.private_output._can_lease", lambda _: False)
                assert find_exposure(stream) is None
            earlier.close()
            assert find_exposure(stream) is None
            stream.write("the lease has ended")
    assert path.read_text()
