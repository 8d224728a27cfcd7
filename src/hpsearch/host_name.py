"""The name of this machine."""

from __future__ import annotations

import platform


def get_host_name() -> str:
    """Return the host name. Bytes in it that are no UTF-8, which a database would reject, become question marks."""
    return platform.node().encode(errors="replace").decode()
