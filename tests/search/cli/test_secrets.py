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


@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_a_file_of_secrets_is_private(tmp_path: Path, mode: int) -> None:
    """The shell creates the file, and another user can open it before the command starts."""
    file = tmp_path / ".env"
    file.write_text("OTHER=1\n")
    with file.open("a") as output, file.open() as opened_before:
        file.chmod(mode)
        subprocess.run([sys.executable, "-m", "hpsearch", "secrets"], stdout=output, check=True)
        read = opened_before.read()
    assert file.stat().st_mode & 0o777 == 0o600
    assert [line.partition("=")[0] for line in file.read_text().splitlines()] == ["OTHER", *SECRET_NAMES]
    assert (read == "OTHER=1\n") == (mode == 0o644)


def test_a_file_that_others_can_write_to_is_rejected(tmp_path: Path) -> None:
    (tmp_path / ".env").touch()
    with (tmp_path / ".env").open("a") as output:
        (tmp_path / ".env").chmod(0o664)
        command = [sys.executable, "-m", "hpsearch", "secrets"]
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, (tmp_path / ".env").read_text()) == (2, "")
    assert "other users can change the output file; run umask 077 first" in done.stderr


def test_secrets_are_not_written_to_a_deleted_file_of_all_users(tmp_path: Path) -> None:
    with (tmp_path / ".env").open("w+") as output:
        (tmp_path / ".env").chmod(0o644)
        (tmp_path / ".env").unlink()
        command = [sys.executable, "-m", "hpsearch", "secrets"]
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, output.read()) == (2, "")
    assert "other users can change the output file; run umask 077 first" in done.stderr


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
