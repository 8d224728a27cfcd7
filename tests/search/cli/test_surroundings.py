"""Commands on a full disk, and with unusual folders, environments, umasks and users."""

from __future__ import annotations

import os
import re
import signal
import stat
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import pytest

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.private_folders import open_private_folder
from hpsearch.search.cli import main
from hpsearch.search.error_lines import report_errors
from hpsearch.search.errors import SearchError
from hpsearch.search.process.exits import EXIT_UNAVAILABLE, EXIT_USER_ERROR
from hpsearch.search.report.table_file import write_table
from hpsearch.storage.errors import StorageError
from hpsearch.storage.home import HOME_VARIABLE, resolve_home
from tests.factories import LOOP_OBJECTIVE
from tests.full_disk import full_disk


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "loop.py"], "hpsearch: the output cannot be written (File too large)\n"),
        (["init", "new.py"], "hpsearch: new.py cannot be written: File too large\n"),
    ],
    ids=["train", "init"],
)
def test_a_full_disk_ends_a_command_without_a_traceback(
    monkeypatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(LOOP_OBJECTIVE)
    with full_disk(), pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code in {1, 2}
    said = capsys.readouterr().err
    assert said.splitlines(keepends=True)[-1] == message
    assert all(line.startswith("hpsearch: ") for line in said.splitlines())
    assert not (tmp_path / "new.py").exists()


def test_without_a_temporary_folder_a_command_ends_with_one_line(
    monkeypatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(LOOP_OBJECTIVE)
    monkeypatch.setattr(tempfile, "tempdir", None)  # Python remembers the folder that it has found
    with full_disk(), pytest.raises(SystemExit) as ended:
        main(["objective", "show", "loop.py"])
    message = "no temporary folder is writable; set TMPDIR to a writable folder, or free disk space"
    assert (ended.value.code, capsys.readouterr().err) == (EXIT_UNAVAILABLE, f"hpsearch: {message}\n")


@pytest.mark.parametrize("name", ["trials.csv", "trials.json", "trials.parquet"])
def test_a_full_disk_leaves_the_table_of_before(tmp_path: Path, name: str) -> None:
    write_table(pd.DataFrame({"a": [1]}), tmp_path / name)
    before = (tmp_path / name).read_bytes()
    with full_disk(), pytest.raises(SearchError, match=r"File too large; choose another file$"):
        write_table(pd.DataFrame({"a": [2]}), tmp_path / name)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(name, before)]


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="unmounts /proc in a new namespace, as root")
def test_an_unmounted_proc_is_an_error() -> None:
    program = Path(sys.executable).with_name("hpsearch")
    command = ["unshare", "--mount", "sh", "-c", f"umount -l /proc && exec {program} studies"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("hpsearch: /proc is not mounted")
    assert ended.stderr.count("\n") == 1


def test_values_that_are_too_large_for_the_statistics_are_an_error_of_one_line(capsys: pytest.CaptureFixture) -> None:
    assert report_errors(lambda: int(statistics.fmean([1e308, 1e308]))) == EXIT_USER_ERROR
    message = capsys.readouterr().err
    assert re.fullmatch(r"hpsearch: a value is too large for the statistics .*; let the objective report .*\n", message)


@pytest.mark.parametrize(("umask", "mode"), [(0o000, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_a_umask_that_lets_all_users_write_new_files_is_changed(tmp_path: Path, umask: int, mode: int) -> None:
    command = [sys.executable, "-m", "hpsearch", "init", "wine.py"]
    subprocess.run(command, umask=umask, cwd=tmp_path, check=True)
    assert stat.S_IMODE((tmp_path / "wine.py").stat().st_mode) == mode


def test_an_offset_of_a_day_is_an_error() -> None:
    program = Path(sys.executable).with_name("hpsearch")
    command = [program, "studies"]
    ended = subprocess.run(command, env={**os.environ, "TZ": "UTC+24"}, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "TZ='UTC+24' is invalid: its offset is not below 24 hours; correct or unset TZ" in ended.stderr


def test_completion_that_cannot_be_installed_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_bytes(b"alias x=\xff\n")
    command = [Path(sys.executable).with_name("hpsearch"), "--install-completion", "bash"]
    environment = {**os.environ, "HOME": str(tmp_path), "SHELL": "/bin/bash"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "--install-completion: a file of the shell cannot be changed" in ended.stderr


@pytest.mark.soak
def test_a_umask_that_closes_new_files_is_an_error() -> None:
    program = Path(sys.executable).with_name("hpsearch")
    ended = subprocess.run([program, "studies"], umask=0o777, capture_output=True, text=True, check=False)
    message = "hpsearch: the umask 0777 closes new files to their owner; run umask 022 first\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", message)


@pytest.mark.skipif(os.getuid() != 0, reason="becomes a user without an account, as root")
def test_a_user_without_a_home_folder_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", HOME_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    if (child := os.fork()) == 0:
        try:
            os.setuid(12345)
            assert resolve_home(str(tmp_path)) == tmp_path
            with pytest.raises(StorageError, match=r"^uid 12345 has no home folder; set HPSEARCH_HOME to a folder"):
                resolve_home()
            with pytest.raises(ObjectiveError, match=r"^uid 12345 has no home folder; set HPSEARCH_HOME to a folder"):
                open_private_folder("prepared")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.soak
def test_a_caller_that_ignores_ended_processes_hides_no_exit_code(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP_OBJECTIVE)
    ended = subprocess.run(
        [Path(sys.executable).with_name("hpsearch"), "objective", "show", "loop.py"],
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.soak
def test_a_package_that_rejects_an_environment_variable_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpsearch", "smoke", "digits"],
        env={**os.environ, "TORCH_DISTRIBUTED_DEBUG": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "hpsearch: package torch cannot be imported (ValueError: The value of TORCH_DISTRIBUTED_DEBUG must be OFF, "
        "INFO, or DETAIL.); correct the environment variable that the error names, or install the package again\n"
    )
