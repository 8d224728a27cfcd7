"""A full disk for a part of a test, in this process only."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(file_size: int = 0) -> Iterator[None]:
    """Let all writes to files fail in this block after `file_size` bytes. Files can be created, as on a full disk.

    Python ignores SIGXFSZ, so that a write raises OSError.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
