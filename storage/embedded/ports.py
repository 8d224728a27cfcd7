"""Free ports on the loopback address."""

from __future__ import annotations

import socket
import time

LOOPBACK = "127.0.0.1"


def is_free(port: int) -> bool:
    """Whether a server could listen on the port now."""
    with socket.socket() as listener:
        # As the servers do: a port in TIME_WAIT is free, one that somebody listens on is not.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def choose(remembered: int | None, *, patience: float = 0.0) -> int:
    """Return the remembered port if it is free, or comes to be within `patience` seconds, else another that is."""
    deadline = time.monotonic() + patience
    while remembered:
        if is_free(remembered):
            return remembered
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)  # a port's end wakes nobody
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        return port
