"""Hadoop's library `libhdfs.so`, which pyarrow would load from the working folder."""

from __future__ import annotations

import importlib
from contextlib import suppress

from hpsearch.working_folder import use_root_folder

HDFS_SCHEMES = ("hdfs", "viewfs")
_PACKAGE = "pyarrow"  # no dependency of hpsearch: without it, HDFS cannot be opened


def load_hdfs_library() -> None:
    """Load libhdfs with the root folder as the working folder. Call this before pyarrow opens HDFS.

    Pyarrow searches the library in the working folder before `HADOOP_HOME` and `ARROW_LIBHDFS_DIR`, and a file of
    another user there would run. It searches only once in a process, also if it finds no library.
    """
    with suppress(ImportError, OSError):
        pyarrow = importlib.import_module(_PACKAGE)
        with use_root_folder():
            pyarrow.have_libhdfs()
