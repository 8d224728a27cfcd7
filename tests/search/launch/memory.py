"""Limits of memory by cgroups of version 1, for workers that the kernel's OOM killer ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import wait_for

CGROUPS = Path("/sys/fs/cgroup/memory")


def can_limit_memory() -> bool:
    """Return whether this process may create memory cgroups of version 1."""
    return os.access(CGROUPS / "cgroup.procs", os.W_OK)


@contextmanager
def memory_limit(pid: int, size: int) -> Iterator[None]:
    """Let a process allocate `size` more bytes during the block, in which the kernel's OOM killer ends it."""
    cgroup = CGROUPS / f"hpsearch-{pid}"
    cgroup.mkdir()
    try:
        (cgroup / "memory.limit_in_bytes").write_text(str(size))
        (cgroup / "cgroup.procs").write_text(str(pid))
        yield
        assert "oom_kill 1" in (cgroup / "memory.oom_control").read_text().splitlines()
    finally:
        remove_cgroup(cgroup)


def remove_cgroup(cgroup: Path) -> None:
    """Remove a cgroup and the cgroups below, once their processes have ended."""

    def removed() -> bool:
        try:
            for folder, _, _ in os.walk(cgroup, topdown=False):
                Path(folder).rmdir()
        except OSError:  # a process is still ending
            return False
        return True

    wait_for(removed, f"the processes in {cgroup} to end")
