from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hpsearch.storage.embedded import data_directory


def test_locks_are_inherited_and_exclusive(tmp_path: Path) -> None:
    lock = data_directory.try_lock(tmp_path)
    assert lock is not None
    holder = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(lock,))
    os.close(lock)
    assert data_directory.try_lock(tmp_path) is None
    assert data_directory.read_lock_holder(tmp_path) == os.uname().nodename
    holder.communicate()
    lock = data_directory.try_lock(tmp_path)
    assert lock is not None
    os.close(lock)
