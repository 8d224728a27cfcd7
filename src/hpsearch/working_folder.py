"""The working folder, which other users may be able to write to, while libraries search files in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def use_root_folder() -> Iterator[None]:
    """Make the root folder the working folder of this process in this block.

    Raises:
        OSError: the working folder cannot be opened.
    """
    before = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.chdir("/")
        yield
    finally:
        os.fchdir(before)
        os.close(before)
