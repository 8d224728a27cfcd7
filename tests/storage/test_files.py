"""The size of a folder, while others write and remove in it."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from hpsearch.storage.files import size_of


def test_the_size_of_a_folder_that_changes_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"x" * 1000)
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    own = size_of(tmp_path)
    assert own == 1000 + len(str(tmp_path / "kept")), "a link is as long as its target's name"
    end = threading.Event()

    def disturb() -> None:
        while not end.is_set():
            for number in range(20):
                (tmp_path / f"{number}" / "deep").mkdir(parents=True)
            for number in range(20):
                shutil.rmtree(tmp_path / f"{number}")

    other = threading.Thread(target=disturb)
    other.start()
    try:
        assert {size_of(tmp_path) for _ in range(300)} == {own}
    finally:
        end.set()
        other.join()
    assert size_of(tmp_path / "nothing") == 0
