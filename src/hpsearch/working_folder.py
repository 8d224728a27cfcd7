"""The working folder, which other users may be able to write to, while libraries search files in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpsearch.changeable_paths import find_changeable_part


def import_matplotlib() -> None:
    """Import matplotlib, without the style file of a working folder in which other users can create files.

    A style can start LaTeX with commands that read files. Call this before anything that imports matplotlib.
    """
    if "matplotlib" in sys.modules:
        return
    with suppress(OSError, ImportError):  # without a working folder there is no file
        if find_changeable_part(Path.cwd(), as_folder=True) is not None:
            with use_root_folder():
                import matplotlib  # noqa: F401 it reads the file during the import


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
