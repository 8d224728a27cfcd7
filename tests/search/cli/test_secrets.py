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


def test_a_file_of_secrets_is_private(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    with file.open("w") as output:
        file.chmod(0o644)
        subprocess.run([sys.executable, "-m", "hpsearch", "secrets"], stdout=output, check=True)
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(file.read_text().splitlines()) == len(SECRET_NAMES)


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
