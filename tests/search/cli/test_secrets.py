"""The file of random passwords for Docker Compose."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpsearch.search.cli import run_command
from hpsearch.search.cli.services import SECRET_NAMES


def test_secrets_are_fresh_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for _ in range(2):
        assert run_command(["secrets"]) == 0
        printed.append(dict(line.split("=", 1) for line in capsys.readouterr().out.splitlines()))
    assert tuple(printed[0]) == SECRET_NAMES
    values = [*printed[0].values(), *printed[1].values()]
    assert len(set(values)) == 2 * len(SECRET_NAMES)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{20,}", value) for value in values)


def test_secrets_are_written_to_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("OTHER=1\n")
    file.chmod(0o600)
    with file.open("a") as output:
        subprocess.run([sys.executable, "-m", "hpsearch", "secrets"], stdout=output, check=True)
    assert [line.partition("=")[0] for line in file.read_text().splitlines()] == ["OTHER", *SECRET_NAMES]


@pytest.mark.parametrize("mode", [0o644, 0o660])
def test_a_file_that_others_can_open_gets_no_secrets(tmp_path: Path, mode: int) -> None:
    """The shell creates the file, and another user can open it before the command starts."""
    file = tmp_path / ".env"
    with file.open("w") as output:
        file.chmod(mode)
        command = [sys.executable, "-m", "hpsearch", "secrets"]
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, file.read_text()) == (2, "")
    assert f"(mode {mode:04o}); remove an existing .env, and run: (umask 077; hpsearch secrets > .env)" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_secrets_are_not_written_to_a_file_of_another_user(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.touch()
    os.chown(file, 65534, -1)
    command = [sys.executable, "-m", "hpsearch", "secrets"]
    with file.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, file.read_text()) == (2, "")
    assert "the output file belongs to uid 65534" in done.stderr
