"""HTTP connections to the embedded services, which are used only if a process of this user accepts them.

Another user's process may have taken the port of a stopped service. It must receive no request, and no artifact may be
written where its answers say.
"""

from __future__ import annotations

import errno
import http.client
import socket
import urllib.request
from typing import Any

from hpsearch.storage.sockets import LOOPBACK, connect_to_loopback, is_own_server


def connect_to_own_server(port: int, timeout: float | None) -> socket.socket:
    """Return a connection to a process of this user that serves a port of 127.0.0.1.

    Raises:
        ConnectionRefusedError: no process, or another user's process, serves the port.
        OSError: the connection failed for another reason.
    """
    opened = connect_to_loopback(port, timeout)
    if not is_own_server(port, opened.getsockname()[1]):
        opened.close()
        reason = f"port {port} belongs to a process of another user; restart the services with hpsearch up"
        raise ConnectionRefusedError(errno.ECONNREFUSED, reason)
    return opened


class OwnServerConnection(http.client.HTTPConnection):
    """HTTP connection to an embedded service."""

    def connect(self) -> None:
        """Open the connection."""
        if self.host != LOOPBACK:  # another server, to which an embedded service redirects
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{self.host} is no address of an embedded service")
        self.sock = connect_to_own_server(self.port, self.timeout)


class OwnServerHandler(urllib.request.HTTPHandler):
    """Handler of `urllib` for requests to embedded services."""

    def http_open(self, req: urllib.request.Request) -> Any:
        """Send the request on an `OwnServerConnection`."""
        return self.do_open(OwnServerConnection, req)
