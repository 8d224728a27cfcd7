"""A launcher removes its private folder; if it was killed, the next launcher removes it."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from docs.packages import ROOT
from hpsearch.search.fleet.rank_launcher import make_private_folder

LAUNCHER = """
import os, sys
from hpsearch.search.fleet.rank_launcher import make_private_folder
with make_private_folder() as folder:
    (folder / "ranks").touch()
    if not os.fork():  # a rank
        print(folder, flush=True)
        sys.stdin.read()
        os._exit(0)
    sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the parent of private folders."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@contextmanager
def launcher() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Start another process with a private folder and a child, which keeps both until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())


def test_a_private_folder_is_removed_with_its_process(place: Path) -> None:
    with make_private_folder() as folder:
        (folder / "ranks").touch()
        assert list(place.iterdir()) == [folder]
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not list(place.iterdir())


def test_a_private_folder_is_not_in_a_folder_in_which_others_may_rename_files(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher unpickles a file in its folder, which another user could replace."""
    monkeypatch.setenv("HPSEARCH_HOME", str(place / "home"))
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:  # others cannot reach the folders of pytest
        Path(shared).chmod(0o777)
        monkeypatch.setattr(tempfile, "tempdir", shared)
        with make_private_folder() as folder:
            assert folder.parent == place / "home" / "tmp"
            assert not list(Path(shared).iterdir())


@pytest.mark.soak
def test_the_folder_of_a_killed_launcher_is_removed_by_the_next_one(place: Path) -> None:
    """It keeps folders of live launchers, folders in use by processes of a killed launcher, and all other files."""
    (place / "hpsearch-ranks-file").touch()
    (place / "hpsearch-ranks-link").symlink_to(place, target_is_directory=True)
    others = {place / f"hpsearch-ranks-{name}" for name in ("file", "link", "renamed")}
    (place / "hpsearch-ranks-renamed").mkdir(mode=0o700)  # another user can give this name to a folder of this user
    with ExitStack() as stack:
        (killed, left), (_, kept) = (stack.enter_context(launcher()) for _ in range(2))
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        with make_private_folder() as folder:
            assert set(place.iterdir()) == {folder, left, kept} | others, "a rank of the killed one lives"
        assert killed.stdin is not None
        assert killed.stdout is not None
        killed.stdin.close()
        assert killed.stdout.read() == ""  # the rank has ended as well
        with make_private_folder() as folder:
            assert set(place.iterdir()) == {folder, kept} | others
