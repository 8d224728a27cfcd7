"""Processes that code of an objective forks before the first trial end with the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.template import write_template
from hpsearch.search.cli import run_command
from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow.health import TrackingUnavailableError
from tests.faults.harness import Zygote
from tests.waiting import wait_for

BAD_CALLS = """
import os
import signal
import subprocess
import threading
import time


class Ending(Wine):
    def data(self, seed):
        os._exit(0)


class Asking(Wine):
    def data(self, seed):
        input("Download? ")


class AskingAtTheTerminal(Wine):
    def data(self, seed):
        open("/dev/tty").readline()


class Deaf(Wine):
    def __init__(self):
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


class Aborting(Deaf):
    def data(self, seed):
        os.abort()


class Closing(Wine):
    def __init__(self):
        os.closerange(3, 4096)


class Crashing(Wine):
    def on_epoch(self, model, epoch, config):
        if epoch:
            open("pids", "a").write(f"{subprocess.Popen(['sleep', '1000']).pid}\\n")
            os.kill(os.getpid(), 11)


class Leaving(Wine):
    def data(self, seed):
        threading.Thread(target=time.sleep, args=(1000,)).start()
        open("pids", "a").write(f"{subprocess.Popen(['sleep', '1000']).pid}\\n")
        return super().data(seed)
"""

FORKS = """
import os
import subprocess
import time


class Forking(Wine):
    def model(self, config, train):
        os.fork() or (open("pids", "a").write(f"{os.getpid()}\\n"), time.sleep(1000))
        open("pids", "a").write(f"{subprocess.Popen(['sleep', '1000']).pid}\\n")
        return super().model(config, train)
"""


@pytest.fixture
def objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPSEARCH_STORAGE_URL", database_url)
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path / "home"))
    write_template(tmp_path / "wine.py")
    with (tmp_path / "wine.py").open("a") as file:
        file.write(FORKS + BAD_CALLS)
    return "wine.py:Forking"


def has_no_process_left() -> bool:
    pids = [int(line) for line in Path("pids").read_text().split()]
    return bool(pids) and not any(psutil.pid_exists(pid) for pid in pids)


def test_the_checks_of_a_run(objective: str) -> None:
    assert run_command(["run", objective, "--workers", "0", "--tracking-uri", "http://127.0.0.1:1"]) == 0
    wait_for(has_no_process_left, "the end of the forked processes")


@pytest.mark.soak
def test_a_crash_of_a_worker(objective: str) -> None:
    command = ["run", "wine.py:Crashing", "--trials", "1", "--workers", "1", "--retries", "0"]
    assert run_command([*command, "--tracking-uri", "http://127.0.0.1:1"]) == 1
    wait_for(has_no_process_left, "the end of the programs that the worker has started")


@pytest.mark.soak
def test_a_command_without_a_study(objective: str) -> None:
    subprocess.run([sys.executable, "-m", "hpsearch", "train", objective, "--epochs", "1"], check=True)
    wait_for(has_no_process_left, "the end of the forked processes")


@pytest.mark.usefixtures("objective")
def test_code_that_ends_the_process_is_no_success(zygote: Zygote) -> None:
    ended = zygote.command(["smoke", "wine.py:Ending"], cwd=Path.cwd(), HPSEARCH_HOME=os.environ["HPSEARCH_HOME"])
    output, _ = ended.communicate()
    assert ended.returncode == 1
    assert "has ended the process with os._exit(0); remove the call" in output


@pytest.mark.usefixtures("objective")
def test_a_program_ends_with_the_command_although_a_thread_runs(zygote: Zygote) -> None:
    command = zygote.command(["smoke", "wine.py:Leaving"], cwd=Path.cwd(), HPSEARCH_HOME=os.environ["HPSEARCH_HOME"])
    assert command.wait() == 0
    wait_for(has_no_process_left, "the end of the program")


@pytest.mark.usefixtures("objective")
def test_code_that_asks_the_user_fails_in_the_check() -> None:
    """The standard input of the command may be a terminal, and the question is not visible."""
    reader, writer = os.pipe()
    command = ["run", "wine.py:Asking", "--workers", "0", "--tracking-uri", "http://127.0.0.1:1"]
    ended = subprocess.run(
        [sys.executable, "-m", "hpsearch", *command], stdin=reader, capture_output=True, text=True, check=False
    )
    os.close(reader)
    os.close(writer)
    assert ended.returncode == 2
    assert "EOFError" in ended.stderr


@pytest.mark.usefixtures("objective")
@pytest.mark.parametrize(("name", "code", "fault"), [("Deaf", 0, ""), ("Aborting", 2, "(SIGABRT)")])
def test_code_that_changes_the_process_of_the_command(zygote: Zygote, name: str, code: int, fault: str) -> None:
    variables = {key: os.environ[key] for key in ("HPSEARCH_HOME", "HPSEARCH_STORAGE_URL")}
    ended = zygote.command(_list_arguments(name), cwd=Path.cwd(), **variables)
    output, _ = ended.communicate()
    assert (ended.returncode, "Traceback" in output) == (code, False), output
    assert fault in output


@pytest.mark.usefixtures("objective")
def test_code_that_closes_files_of_the_command() -> None:
    command = [sys.executable, "-m", "hpsearch", *_list_arguments("Closing")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False), ended.stderr
    assert "closes file descriptors of hpsearch" in ended.stderr


def _list_arguments(name: str) -> list[str]:
    return ["run", f"wine.py:{name}", "--name", name, "--workers", "0", "--tracking-uri", "http://127.0.0.1:1"]


_IN_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


@pytest.mark.usefixtures("objective")
def test_code_that_asks_at_the_terminal_fails_in_the_check() -> None:
    """It would wait behind the progress line, and could leave the terminal without echo."""
    command = [sys.executable, "-m", "hpsearch", "run", "wine.py:AskingAtTheTerminal", "--workers", "0"]
    command += ["--tracking-uri", "http://127.0.0.1:1"]
    ended = subprocess.run(
        [sys.executable, "-c", _IN_A_TERMINAL, *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "No such device or address: '/dev/tty'" in ended.stdout


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("hpsearch.search.study.study.StoredStudy.objective", ObjectiveError("wine.py:1: SyntaxError: invalid syntax")),
        ("hpsearch.search.run.search.open_study_run", StorageError("MLflow experiment 'hpsearch' is deleted")),
        ("hpsearch.search.run.search.open_study_run", TrackingUnavailableError("no MLflow server answers")),
    ],
)
def test_an_error_after_the_creation_leaves_no_study(
    objective: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], function: str, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    command = ["run", objective, "--name", "broken", "--workers", "0", "--tracking-uri", "http://127.0.0.1:1"]
    with monkeypatch.context() as patch:
        patch.setattr(function, fail)
        assert run_command(command) in {1, 2}
    assert run_command(["show", "broken"]) == 2
    assert "no study 'broken'" in capsys.readouterr().err
    assert run_command([*command, "--trials", "3"]) == 0
