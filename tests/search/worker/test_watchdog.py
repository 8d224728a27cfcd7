"""The end of a worker whose trial hangs after its training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpsearch.search.errors import SearchError
from hpsearch.search.worker.watchdog import Watchdog

_HANGS = """
import sys, threading
from hpsearch.search.worker.watchdog import Watchdog

def export():
    threading.Event().wait()

watchdog = Watchdog(None, stall_factor=None, end_timeout=float(sys.argv[1]))
watchdog.watch(lambda: print("released", flush=True))
with watchdog.limit("publishing the results"):
    pass
with watchdog.limit("publishing the results"):
    export()
"""


def test_an_export_that_hangs_releases_the_trial_and_ends_the_worker() -> None:
    command = [sys.executable, "-c", _HANGS, "0.5"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (1, "released\n")
    assert "publishing the results has not ended after 0.5 s (--barrier-timeout)" in ended.stderr
    assert "in export" in ended.stderr


_ORPHAN = """
import threading
from hpsearch.search.worker.watchdog import Watchdog

watchdog = Watchdog(None, stall_factor=None, end_timeout=60)
watchdog.watch(lambda: print("released", flush=True))
watchdog.watch_fleet(lambda: True, grace=0.5)
threading.Event().wait()
"""


def test_a_worker_without_its_fleet_ends_in_the_middle_of_a_long_epoch() -> None:
    ended = subprocess.run([sys.executable, "-c", _ORPHAN], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (1, "released\n")
    assert "has ended, and no step ended within 0.5 s; releasing the trial and exiting" in ended.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to another user")
@pytest.mark.parametrize("link", ["link", "link/alive"])
def test_a_heartbeat_follows_no_link_of_another_user(tmp_path: Path, link: str) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "link").symlink_to("private" if "/" in link else "private/alive")
    Watchdog(tmp_path / link, stall_factor=None, end_timeout=60).beat()
    (tmp_path / "private" / "alive").unlink()
    os.chown(tmp_path / "link", 65534, -1, follow_symlinks=False)
    with pytest.raises(SearchError, match="'link' is a link of another user; give the path without this link"):
        Watchdog(tmp_path / link, stall_factor=None, end_timeout=60)
    assert list((tmp_path / "private").iterdir()) == []


def test_a_heartbeat_creates_its_folder(tmp_path: Path) -> None:
    Watchdog(tmp_path / "new" / "folder" / "alive", stall_factor=None, end_timeout=60).beat()
    assert (tmp_path / "new" / "folder" / "alive").exists()


def test_a_folder_is_no_heartbeat(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match=r"^--heartbeat '.*': Is a directory; give another file$"):
        Watchdog(tmp_path, stall_factor=None, end_timeout=60)
