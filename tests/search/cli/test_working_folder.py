"""Commands in working folders that are deleted, or to which other users can add files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpsearch.search.cli import main, run_command


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
