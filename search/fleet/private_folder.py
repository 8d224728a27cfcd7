"""A launcher's own folder, which is removed with it; what killed ones have left is removed by the next."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "hpsearch-ranks-"


@contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder for this process and those it forks; before that remove those of this user whose processes died.

    Who lives holds the lock of its folder: a killed process lets go of it, and no other can have its number.
    """
    _remove_left()
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))  # under a name that nobody looks at: it is not locked yet
    held = os.open(made, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    folder = made.rename(made.with_name(made.name.removeprefix(".")))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _remove_left() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # its process lives, or another launcher has just removed it
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(held).st_uid == os.getuid():
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)
