"""Ports that servers share with no other user."""

from __future__ import annotations

import errno
import socket
from contextlib import closing

import pytest

from hpsearch.storage.sockets import AFTER_CRASH, LOOPBACK, has_only_closed_connections, listen_exclusively


def _bind_with_reuse(port: int) -> socket.socket:
    """Bind a socket that does not listen, as another user can."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((LOOPBACK, port))
    return bound


def test_a_port_to_which_another_socket_is_bound_is_in_use() -> None:
    """A server that sets SO_REUSEADDR would listen, and the other socket could receive its connections."""
    with closing(_bind_with_reuse(0)) as bound, pytest.raises(OSError, match="in use") as raised:
        listen_exclusively(LOOPBACK, bound.getsockname()[1])
    assert raised.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_no_other_socket_can_be_bound_to_the_port_of_a_server(host: str) -> None:
    with closing(listen_exclusively(host, 0)) as listener, pytest.raises(OSError, match="in use"):
        _bind_with_reuse(listener.getsockname()[1])


def test_after_a_crash_closed_connections_do_not_block_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = listen_exclusively(LOOPBACK, 0)
    port = listener.getsockname()[1]
    client = socket.create_connection((LOOPBACK, port))
    listener.accept()[0].close()  # the server's end remains in TIME_WAIT
    assert not has_only_closed_connections(port)
    listener.close()
    client.close()
    assert has_only_closed_connections(port)
    with pytest.raises(OSError, match="in use"):
        listen_exclusively(LOOPBACK, port)
    monkeypatch.setenv(AFTER_CRASH, "1")
    listen_exclusively(LOOPBACK, port).close()
