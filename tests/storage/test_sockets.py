"""Ports that servers share with no other user."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from hpsearch.storage.embedded import state
from hpsearch.storage.errors import StorageError
from hpsearch.storage.sockets import LOOPBACK, find_client_user, listen_exclusively
from tests.second_user import needs_root

_OPTIONS = (socket.SO_REUSEADDR, socket.SO_REUSEPORT)


def _listen(host: str, port: int) -> socket.socket:
    (listener,) = listen_exclusively(host, port)
    return listener


def _bind(port: int) -> socket.socket:
    """Bind a socket that does not listen."""
    bound = socket.socket()
    for option in _OPTIONS:
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
    bound.bind((LOOPBACK, port))
    return bound


@contextmanager
def _as_second_user() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@needs_root
def test_a_port_to_which_another_user_has_bound_a_socket_is_in_use() -> None:
    """A server that sets SO_REUSEADDR would listen, and the other socket could receive its connections."""
    with _as_second_user():
        bound = _bind(0)
    with closing(bound), pytest.raises(OSError, match="in use") as raised:
        listen_exclusively(LOOPBACK, bound.getsockname()[1])
    assert raised.value.errno == errno.EADDRINUSE


@needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_another_user_cannot_bind_a_socket_to_the_port_of_a_server(host: str) -> None:
    with (
        closing(_listen(host, 0)) as listener,
        _as_second_user(),
        pytest.raises(OSError, match="in use"),
    ):
        _bind(listener.getsockname()[1])


def test_two_servers_of_a_user_share_no_port() -> None:
    with closing(_listen(LOOPBACK, 0)) as listener, pytest.raises(OSError, match="in use"):
        listen_exclusively(LOOPBACK, listener.getsockname()[1])


def test_closed_connections_do_not_block_the_port() -> None:
    listener = _listen(LOOPBACK, 0)
    port = listener.getsockname()[1]
    client = socket.create_connection((LOOPBACK, port))
    listener.accept()[0].close()  # the server's end remains in TIME_WAIT
    listener.close()
    client.close()
    _listen(LOOPBACK, port).close()


@needs_root
def test_another_user_cannot_take_the_port_of_closed_connections() -> None:
    listener = _listen(LOOPBACK, 0)
    port = listener.getsockname()[1]
    client = socket.create_connection((LOOPBACK, port))
    listener.accept()[0].close()
    listener.close()
    client.close()
    with _as_second_user():
        bound = _bind(port)  # Linux allows this
    with closing(bound), pytest.raises(OSError, match="in use"):
        listen_exclusively(LOOPBACK, port)


def test_without_a_free_port_no_other_port_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(_listen(LOOPBACK, 0)) as listener:
        monkeypatch.setattr(state, "_PORTS", (listener.getsockname()[1],))
        with pytest.raises(StorageError, match=r"almost all ports of 127\.0\.0\.1 are in use"):
            state.choose_port()
    assert state.choose_port() in state._PORTS


@needs_root
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell the users of connections")
def test_the_user_of_a_connection_that_is_bound_to_a_device_is_found() -> None:
    """The kernel finds a listener on the client's port instead."""
    with closing(socket.create_server((LOOPBACK, 0))) as server:
        port = server.getsockname()[1]
        with _as_second_user():
            client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        client.bind((LOOPBACK, 0))
        client_port = client.getsockname()[1]
        with closing(client), closing(socket.create_server((LOOPBACK, client_port))):  # it sets SO_REUSEADDR
            client.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
            client.connect((LOOPBACK, port))
            assert find_client_user(port, client_port) == 65534
