"""Commands with full or closed outputs, on a full disk, in a deleted folder, and interrupted while they are loaded."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shutil
import signal
import stat
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.private_folders import open_private_folder
from hpsearch.search.cli import main, run_command
from hpsearch.search.error_lines import report_errors
from hpsearch.search.errors import SearchError
from hpsearch.search.process.exits import EXIT_FILE_VARIABLE, EXIT_UNAVAILABLE, EXIT_USER_ERROR
from hpsearch.search.report.table_file import write_table
from hpsearch.storage.errors import StorageError
from hpsearch.storage.home import HOME_VARIABLE, resolve_home
from tests.factories import LOOP_OBJECTIVE
from tests.full_disk import full_disk
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


def test_a_deleted_working_folder_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 2
    message = "hpsearch: the working directory was deleted; change to an existing folder\n"
    assert capsys.readouterr() == ("", message)


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


@pytest.mark.parametrize("command", [["studies"], ["doctor"]])
def test_a_command_imports_no_module_of_the_working_folder(
    tmp_path: Path, database_url: str, command: list[str]
) -> None:
    """Libraries try to import packages that are not installed, and the folder may belong to another user."""
    for name in ("colorama", "tornado", "redis", "boto3", "IPython", "xarray", "ujson"):
        (tmp_path / f"{name}.py").write_text("import pathlib; pathlib.Path(__file__).with_suffix('.imported').touch()")
    environment = {**os.environ, "HPSEARCH_HOME": str(tmp_path / "home"), "HPSEARCH_STORAGE_URL": database_url}
    program = Path(sys.executable).with_name("hpsearch")
    subprocess.run([program, *command], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert not list(tmp_path.glob("*.imported"))


_LIBRARY = """
#include <dlfcn.h>
__attribute__((constructor)) static void load(void) { dlopen("libcuda.so.1", RTLD_NOW); }
"""
_FOREIGN_LIBRARY = """
#include <stdio.h>
__attribute__((constructor)) static void load(void) { fclose(fopen("loaded", "w")); }
"""
_LOAD = """
import sys
sys.path.insert(0, sys.argv[1])
from hpsearch.cuda_library import load_cuda_library
load_cuda_library()
import ctypes, os
assert os.getcwd() == sys.argv[2]
ctypes.CDLL(sys.argv[1] + "/nvidia/cusparselt/lib/libcusparseLt.so.0")
"""


@pytest.mark.skipif(shutil.which("gcc") is None or sys.platform != "linux", reason="builds libraries with gcc on Linux")
def test_a_library_of_cuda_loads_no_file_of_the_working_folder(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "nvidia" / "cusparselt"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").touch()
    folder = tmp_path / "other"
    folder.mkdir()
    for code, target in (
        (_LIBRARY, package / "lib" / "libcusparseLt.so.0"),
        (_FOREIGN_LIBRARY, folder / "libcuda.so.1"),
    ):
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(target), "-Wl,-rpath,$ORIGIN:"]
        subprocess.run(command, input=code, text=True, check=True)
    command = [sys.executable, "-P", "-c", _LOAD, str(package.parents[1]), str(folder)]
    subprocess.run(command, cwd=folder, check=True)
    assert not (folder / "loaded").exists()


_OPEN_STORE = """
from hpsearch.storage.checkpoints.store import CheckpointStore
CheckpointStore("hdfs://127.0.0.1:9/checkpoints")
"""
_OPEN_ARTIFACTS = """
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from hpsearch.storage.mlflow.credentials import allow_credentials
from hpsearch.storage.mlflow.locations import restrict_artifact_locations
allow_credentials("http://127.0.0.1:9")
restrict_artifact_locations("http://127.0.0.1:9")
get_artifact_repository("hdfs://127.0.0.1:9/artifacts", "http://127.0.0.1:9").list_artifacts()
"""


@pytest.mark.skipif(shutil.which("gcc") is None or sys.platform != "linux", reason="builds libraries with gcc on Linux")
@pytest.mark.parametrize("code", [_OPEN_STORE, _OPEN_ARTIFACTS], ids=["checkpoints", "artifacts"])
def test_hdfs_loads_no_library_of_the_working_folder(tmp_path: Path, code: str) -> None:
    """The folder may belong to another user, and every worker's database role can write a checkpoint URL."""
    java, folder = tmp_path / "java", tmp_path / "other"
    (java / "lib" / "server").mkdir(parents=True)
    folder.mkdir()
    for source, target in (("", java / "lib" / "server" / "libjvm.so"), (_FOREIGN_LIBRARY, folder / "libhdfs.so")):
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(target)]
        subprocess.run(command, input=source, text=True, check=True)
    environment = {**os.environ, "JAVA_HOME": str(java)}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert "libhdfs" in done.stderr
    assert not (folder / "loaded").exists()


@pytest.mark.soak  # compiles for half a minute
def test_the_compiler_imports_no_modules_of_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "ctypes.py").write_text("open('imported', 'w')\nraise ImportError")
    home = tmp_path / "home"
    environment = {**os.environ, "HPSEARCH_HOME": str(home), "TORCHINDUCTOR_CACHE_DIR": str(home / "compiled")}
    settings = ["--set", "compile=true", "--set", "model.kind=mlp", "--epochs", "1", "--run-dir", "a"]
    command = [sys.executable, "-P", "-m", "hpsearch", "train", "digits", *settings]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert (tmp_path / "a" / "report.md").exists()
    assert not (tmp_path / "imported").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("owner", ["folder", "link"])
def test_artifacts_of_mlflow_are_not_in_a_folder_that_another_user_can_replace(
    open_folder: Path,
    database_url: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    owner: str,
) -> None:
    artifacts = open_folder / "artifacts"
    if owner == "link":
        (open_folder / "mine").mkdir()
        artifacts.symlink_to("mine")
    else:
        artifacts.mkdir()
    os.chown(artifacts, 65534, -1, follow_symlinks=False)
    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", database_url)
    assert run_command(["serve", "mlflow", "--port", "59333", "--artifacts", str(artifacts)]) == 2
    assert f"other users can change or replace '{artifacts}'" in capsys.readouterr().err


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


def test_a_lack_of_memory_is_one_line() -> None:
    code = _INTERRUPTED.replace("os.kill(os.getpid(), signal.Signals[sys.argv[1]])", "raise MemoryError")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "hpsearch: not enough memory; end other programs, or raise the limit of memory\n",
    )


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


def test_ctrl_c_while_the_interpreter_exits_is_silent() -> None:
    code = "import atexit, os; atexit.register(os.kill, os.getpid(), 2); from hpsearch.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_worker_reports_a_stop_before_it_is_loaded(tmp_path: Path) -> None:
    """Otherwise its fleet would attribute the exit to code of the objective."""
    environment = {**os.environ, EXIT_FILE_VARIABLE: str(tmp_path / "exit")}
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED, "SIGTERM"], env=environment, check=False)
    assert (done.returncode, (tmp_path / "exit").read_text()) == (143, "143")


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
