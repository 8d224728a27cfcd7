"""Ports that no other user shares, and the users of connections on this machine.

No other user's process may receive or use a secret.
"""

from __future__ import annotations

import _socket
import errno
import os
import re
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import cast

LOOPBACK = "127.0.0.1"
_ANYWHERE = "0.0.0.0"  # noqa: S104 an address to compare with, not to listen on

# Constants and structures of linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h.
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_ALL_STATES, _ESTABLISHED, _LISTEN, _NO_COOKIE = 0xFFFFFFFF, 1, 10, b"\xff" * 8
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBBI")  # the start of inet_diag_req_v2: family, protocol, extensions, padding, states
_ANSWER = struct.Struct("=xB2x4s56xII")  # inet_diag_msg: state, both ports, uid, inode

_TABLE = Path("/proc/net/tcp")

# Objectives and programs replace `socket.socket` and `socket.getaddrinfo`, for example to use a SOCKS proxy or IPv6
# only. The services of this machine must stay reachable, because a service that does not answer is restarted.
PlainSocket = cast(
    type[socket.socket], next(each for each in _socket.socket.__subclasses__() if each.__module__ == "socket")
)


def connect_to_loopback(port: int, timeout: float | None) -> socket.socket:
    """Return a connection to a port of 127.0.0.1.

    Raises:
        OSError: no process accepts the connection within the timeout in seconds.
    """
    _check_port(port)
    opened = PlainSocket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        opened.settimeout(timeout)
        opened.connect((LOOPBACK, port))
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        opened.close()
        raise
    return opened


def listen_exclusively(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on a port to which no other user has bound a socket, one for each address of the host.

    Servers usually bind with SO_REUSEADDR. Other users can then bind sockets to the port before the server listens, and
    connect these to the ports of clients. Linux gives the connections of such clients to these sockets.

    Raises:
        OSError: the address is in use or invalid.
    """
    listeners = bind_exclusively(host, port)
    try:
        for listener in listeners:
            listener.listen()
            if _count_listeners(listener.getsockname()[1]) > len(listeners):  # another process started at the same time
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    except BaseException:
        close_all(listeners)
        raise
    return listeners


def bind_exclusively(host: str, port: int) -> list[socket.socket]:
    """Return bound sockets, as for `listen_exclusively`.

    With SO_REUSEPORT, Linux accepts a port that has only sockets of the same user, and closed connections, which
    remain for a minute. Because two servers of the user could share the port too, a port with a server is rejected.
    """
    _check_port(port)
    if port and _count_listeners(port):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    found = _socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    made: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            made.append(PlainSocket(family, kind, protocol))
            if family == socket.AF_INET6:
                made[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            option = socket.SO_REUSEPORT if sys.platform == "linux" else socket.SO_REUSEADDR
            made[-1].setsockopt(socket.SOL_SOCKET, option, 1)
            made[-1].bind(address)
    except BaseException:
        close_all(made)
        raise
    return made


def _check_port(port: int) -> None:
    if not 0 <= port < 1 << 16:  # from a damaged file; getaddrinfo would take another port
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def close_all(sockets: Iterable[socket.socket]) -> None:
    """Close sockets."""
    for each in sockets:
        each.close()


def _count_listeners(port: int) -> int:
    """Return the number of sockets that listen on the port, on any address; 0 where this is unknown."""
    count = 0
    with suppress(OSError):  # other systems than Linux, and hosts without IPv6, have no such table
        for path in (_TABLE, Path(f"{_TABLE}6")):
            for _, ends, _, state, *_ in map(str.split, path.read_text(encoding="ascii").splitlines()[1:]):
                count += state == f"{_LISTEN:02X}" and int(ends.rpartition(":")[2], 16) == port
    return count


def is_own_server(port: int, client_port: int | None = None) -> bool:
    """Return whether this user serves a port of 127.0.0.1; True where this is unknown. See `find_server_users`."""
    users = find_server_users(port, client_port)
    return users is None or users == {os.geteuid()}


def find_server_users(port: int, client_port: int | None = None) -> set[int] | None:
    """Return the ids of the users who serve a port of 127.0.0.1: empty without a listener, None if unknown (not Linux).

    Args:
        port: the port.
        client_port: the port of the client's end of an open connection, to include the user of its other end. A check
            before the connection is opened leaves time for another process to take the port.
    """
    if sys.platform != "linux":
        return None
    try:
        if (listener := _find_socket(port, 0)) is None:
            return set()
        # After the listener: a connection that no process has accepted has no inode, and belongs to the listener.
        accepted = _find_socket(port, client_port) if client_port else None
    except OSError:
        return None
    return {uid for uid, inode in filter(None, (listener, accepted)) if inode}


def find_client_user(port: int, client_port: int) -> int | None:
    """Return the id of the user whose process opened a connection to a port of 127.0.0.1; None if unknown.

    If the connection has ended, the result may belong to a later connection with the same ports. So check
    `is_established` after the call.

    Args:
        port: the port of the server.
        client_port: the port of the client's end of the connection.
    """
    if sys.platform != "linux":
        return None
    try:
        found = _find_socket(client_port, port)
    except OSError:
        return None
    return found[0] if found and found[1] else None  # a closed socket has no inode, and the user id 0


def is_established(connection: socket.socket) -> bool:
    """Return whether both ends of a TCP connection are open; True where this is unknown (not Linux).

    A server can receive a request whose client has already ended the connection. Then a connection of another user may
    have the same ports.
    """
    if sys.platform != "linux":
        return True
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == bytes([_ESTABLISHED])
    except OSError:
        return False


def _find_socket(port: int, client_port: int) -> tuple[int, int] | None:
    """Return user id and inode of the socket with one end of a connection; `client_port` is 0 for a listener.

    Netlink takes 20 µs, but may lack the kernel module `tcp_diag`. The table of all sockets takes milliseconds.
    """
    try:
        found = _ask_netlink(port, client_port)
    except OSError:
        found = None
    return found or _read_table(port, client_port)


def _ask_netlink(port: int, client_port: int) -> tuple[int, int] | None:
    if sys.platform != "linux":
        return None
    server, client = (socket.inet_aton(host) + bytes(12) for host in (LOOPBACK, LOOPBACK if client_port else _ANYWHERE))
    ports = struct.pack("!HH", port, client_port)
    ends = ports + server + client + bytes(4) + _NO_COOKIE
    request = _REQUEST.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0, _ALL_STATES) + ends
    with PlainSocket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(_HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + request)
        answer = kernel.recv(4096)
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    state, found, uid, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    # If the kernel finds no connection, such as one that is bound to a device, it returns a listener of the port. Two
    # clients can have the same ports if one is bound to a device, but only one of them is connected.
    is_right = (found == ports and state == _ESTABLISHED) if client_port else state == _LISTEN
    return (uid, inode) if is_right else None


def _read_table(port: int, client_port: int) -> tuple[int, int] | None:
    loopback, anywhere = (f"{struct.unpack('=I', socket.inet_aton(host))[0]:08X}" for host in (LOOPBACK, _ANYWHERE))
    if client_port:
        ends = rf" {loopback}:{port:04X} {loopback}:{client_port:04X} {_ESTABLISHED:02X}"
    else:
        ends = rf" (?:{loopback}|{anywhere}):{port:04X} {anywhere}:0000 {_LISTEN:02X}"
    found = re.search(rf"{ends} \S+ \S+ \S+ +(\d+) +\d+ (\d+) ", _TABLE.read_text(encoding="ascii"))
    return (int(found[1]), int(found[2])) if found else None
