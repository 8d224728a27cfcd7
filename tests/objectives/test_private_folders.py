"""Folders that only the user can write to."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.private_folders import (
    find_safe_temporary_folder,
    make_socket_folder,
    open_private_folder,
    use_private_compiler_cache,
)

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
OTHER_UID = 65534


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 128 + 15), ("SIGHUP", -1)])
def test_a_signal_removes_temporary_folders(tmp_path: Path, name: str, code: int) -> None:
    script = (
        "import os, signal; from hpsearch.search.process.signals import clean_up_on_hangup, exit_on_signals\n"
        "from hpsearch.objectives.private_folders import open_temporary_folder\n"
        "exit_on_signals(); clean_up_on_hangup()\n"
        "with open_temporary_folder() as folder:\n"
        f"    (folder / 'model').touch(); os.kill(os.getpid(), signal.{name})\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=False, timeout=60)
    assert done.returncode == code
    assert list(tmp_path.glob("hpsearch-*")) == []


def test_a_folder_is_closed_to_others(home: Path) -> None:
    folder = open_private_folder("prepared")
    folder.chmod(0o755)
    assert open_private_folder("prepared") == folder == home / "prepared"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not home.stat().st_mode & (stat.S_IWOTH | stat.S_IROTH)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("part", ["home", "home/prepared"])
def test_a_folder_of_another_user_is_rejected(home: Path, part: str) -> None:
    folder = home.parent / part
    folder.mkdir(parents=True)
    os.chown(folder, OTHER_UID, -1)
    with pytest.raises(ObjectiveError, match=f"{part}' belongs to uid {OTHER_UID}; set HPSEARCH_HOME"):
        open_private_folder("prepared")
    folder.rename(home.parent / "moved")
    folder.symlink_to(home.parent / "moved")
    with pytest.raises(ObjectiveError, match="belongs to uid"):
        open_private_folder("prepared")


@pytest.mark.parametrize(("mode", "is_private"), [(0o777, True), (0o1777, False), (0o700, False)])
def test_a_temporary_folder_in_which_others_may_rename_files_is_not_used(
    home: Path, monkeypatch: pytest.MonkeyPatch, mode: int, *, is_private: bool
) -> None:
    """Another user could replace folders in it, also private ones."""
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:  # others cannot reach the folders of pytest
        Path(shared).chmod(mode)
        monkeypatch.setattr(tempfile, "tempdir", shared)
        assert find_safe_temporary_folder() == (home / "tmp" if is_private else Path(shared))
        assert not list(Path(shared).iterdir())
        if is_private:
            (home / "tmp").rmdir()
            home.rmdir()
            home.touch()  # no folder can be created in it
            with pytest.raises(ObjectiveError, match=r"set TMPDIR to a folder that only you can write to$"):
                find_safe_temporary_folder()


def test_the_compiler_has_a_private_cache_unless_the_user_has_chosen_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    use_private_compiler_cache()
    assert os.environ[VARIABLE] == str(home / "compiled")
    monkeypatch.setenv(VARIABLE, str(Path(tempfile.gettempdir()) / "torchinductor_me"))  # as torch sets it
    use_private_compiler_cache()
    assert os.environ[VARIABLE] == str(home / "compiled")
    monkeypatch.setenv(VARIABLE, str(home / "chosen"))
    use_private_compiler_cache()
    assert os.environ[VARIABLE] == str(home / "chosen")


def test_a_chosen_cache_that_cannot_be_created_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/dev/null/x")
    with pytest.raises(ObjectiveError, match=r"^TORCHINDUCTOR_CACHE_DIR '/dev/null/x' cannot be created \(Not a dir"):
        use_private_compiler_cache()


_COMPILE = """
import os, sys
if sys.argv[1] == "preloaded":  # as in workers
    import torch._inductor
from hpsearch.objectives.private_folders import use_private_compiler_cache
use_private_compiler_cache()
import torch
torch.compile(lambda x: (x * 2).sin() + 1)(torch.ones(4))
"""


@pytest.mark.soak
@pytest.mark.parametrize("order", ["preloaded", "first"])
def test_compiled_code_is_only_in_the_private_folder(home: Path, tmp_path: Path, order: str) -> None:
    """Torch would compile a header of another user in /tmp/torchinductor_USER into each kernel."""
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    environment.pop(VARIABLE, None)
    subprocess.run([sys.executable, "-c", _COMPILE, order], env=environment, check=True)
    assert list((home / "compiled").rglob("*.so"))
    assert not list((tmp_path / "tmp").glob("torchinductor_*/*"))


def test_without_a_writable_home_the_compiler_has_a_new_private_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path / "file"))
    monkeypatch.delenv(VARIABLE, raising=False)
    use_private_compiler_cache()
    folder = Path(os.environ[VARIABLE])
    assert folder.name.startswith("hpsearch-compiled-")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    use_private_compiler_cache()
    assert Path(os.environ[VARIABLE]) == folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_sockets_that_another_user_has_created_again_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        monkeypatch.setattr(tempfile, "tempdir", parent)
        config = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
        monkeypatch.setitem(config, "tempdir", None)
        folder = Path(make_socket_folder())
        assert make_socket_folder() == str(folder)
        folder.rmdir()
        folder.mkdir(mode=0o700)
        os.chown(folder, 65534, -1)
        with pytest.raises(OSError, match="Permission denied"):
            make_socket_folder()


def test_a_folder_whose_path_is_too_long_for_sockets_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("a" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setitem(multiprocessing.process.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="File name too long"):
        make_socket_folder()
    assert list(long.iterdir()) == []
