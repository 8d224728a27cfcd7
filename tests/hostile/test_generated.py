"""Generated hostile commands end with a documented exit code and a short message, and leave nothing."""

from __future__ import annotations

import io
import shlex
import shutil
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest

from hpsearch.search.cli import run_command
from hpsearch.search.process.signals import ENDING_SIGNALS
from hpsearch.storage.study_storage.storage import open_storage
from tests.factories import LOOP_OBJECTIVE
from tests.hostile.generator import NEW_STUDY, Case, Generator

pytestmark = pytest.mark.slow

DOCUMENTED = {0, 1, 2, 3}


class Shell:
    """Runs commands in this process and collects the violations of the rules."""

    def __init__(self, folder: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder, self._url, self._capsys = folder, url, capsys
        self._storage = open_storage(url, application_name="test")
        self._others = set(psutil.Process().children())  # services of the tests
        self._threads = set(threading.enumerate())
        self.codes: list[int] = []
        self.violations: list[str] = []

    def close(self) -> None:
        self._storage.engine.dispose()

    def run(self, case: Case) -> None:
        """Run a command in an empty folder, and add its violations."""
        before = self._list_studies()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HPSEARCH_STORAGE_URL", self._url)
            patch.setenv("HPSEARCH_TRACKING_URI", "http://127.0.0.1:1")
            patch.setenv("HPSEARCH_HOME", case.home)
            for name, value in case.environment.items():
                patch.setenv(name, value)
            patch.chdir(self._folder)
            patch.setattr("sys.stdin", io.StringIO())
            patch.setattr("sys.excepthook", sys.excepthook)  # torch replaces it
            handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
            print(f"{case}", flush=True)  # the last line after a timeout
            self._capsys.readouterr()
            try:
                code: int | str = run_command(case.arguments)
            except pytest.fail.Exception:  # a timeout
                raise
            except BaseException as error:
                code = repr(error)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        output = self._capsys.readouterr()
        faults = self._find_faults(code, output.out, output.err)
        left = {path.name for path in self._folder.iterdir()} - {
            case.home,
            *case.arguments,
        }  # a given home may be created
        if code == 2 and left:
            faults.append(f"left the files {sorted(left)}")
        for path in self._folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if code == 2 and (created := self._list_studies() - before):
            faults.append(f"left the studies {created}")
        self._delete_new_studies()
        if faults:
            words = [f"{name}={shlex.quote(value)}" for name, value in case.environment.items()]
            words.append(f"HPSEARCH_HOME={shlex.quote(case.home)}")
            text = f"{' '.join(words)} hpsearch {shlex.join(case.arguments)}: {'; '.join(faults)}"
            self.violations.append(text.encode("ascii", "backslashreplace").decode())
        if isinstance(code, int):
            self.codes.append(code)

    def _find_faults(self, code: int | str, out: str, err: str) -> list[str]:
        faults = [] if code in DOCUMENTED else [f"exit code {code}"]
        if "Traceback" in out + err:
            faults.append("a traceback")
        if code == 2 and not 1 <= err.count("\n") <= 3:
            faults.append(f"{err.count(chr(10))} lines of errors: {err[:300]}")
        if children := set(psutil.Process().children()) - self._others:
            faults.append(f"left the processes {[child.cmdline() for child in children]}")
        # fsspec keeps one daemon thread per process for its asynchronous file systems, such as http.
        threads = {thread for thread in threading.enumerate() if thread.name != "fsspecIO"} - self._threads
        if threads:
            faults.append(f"left the threads {threads}")
        return faults

    def _list_studies(self) -> set[str]:
        return {study.study_name for study in self._storage.get_all_studies()}

    def _delete_new_studies(self) -> None:
        for study in self._storage.get_all_studies():
            if study.study_name.startswith(NEW_STUDY):
                self._storage.delete_study(study._study_id)


@pytest.mark.parametrize(
    ("seed", "number"),
    [(0, 60), *(pytest.param(seed, 700, marks=pytest.mark.soak) for seed in (1, 2, 3))],
)
def test_generated_commands_follow_the_rules(
    database_url: str, open_folder: Path, tmp_path: Path, monkeypatch, capsys, seed: int, number: int
) -> None:
    monkeypatch.setattr("hpsearch.search.fleet.fork_server.can_fork", lambda: False)
    monkeypatch.setattr("hpsearch.storage.database.connect.STARTUP_RETRY_SECONDS", 0.0)
    objective = open_folder / "cheap.py"
    objective.write_text(LOOP_OBJECTIVE)
    (working := tmp_path / "working").mkdir()
    shell = Shell(working, database_url, capsys)
    try:
        shell.run(Case(["run", str(objective), "--name", "known", "--workers", "0"], {}, str(open_folder / "plain")))
        assert shell.codes == [0], shell.violations
        generator = Generator(seed, open_folder, objective=str(objective), study="known")
        for _ in range(number):
            shell.run(generator.make_case())
    finally:
        shell.close()
    assert not shell.violations, "\n".join(shell.violations)
    assert {0, 2} <= set(shell.codes)
