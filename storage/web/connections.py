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

from hpsearch.storage.sockets import is_own_server


def check_server_end(connection: socket.socket) -> None:
    """Check that a process of this user has the other end of an open connection to 127.0.0.1.

    Raises:
        ConnectionRefusedError: another user's process has it.
    """
    port = connection.getpeername()[1]
    if not is_own_server(port, connection.getsockname()[1]):
        reason = f"port {port} belongs to a process of another user; restart the services with hpsearch up"
        raise ConnectionRefusedError(errno.ECONNREFUSED, reason)


class OwnServerConnection(http.client.HTTPConnection):
    """HTTP connection to an embedded service."""

    def connect(self) -> None:
        """Open the connection and check its other end."""
        super().connect()
        try:
            check_server_end(self.sock)
        except OSError:
            self.close()
            raise


class OwnServerHandler(urllib.request.HTTPHandler):
    """Handler of `urllib` for requests to embedded services."""

    def http_open(self, req: urllib.request.Request) -> Any:
        """Send the request on an `OwnServerConnection`."""
        return self.do_open(OwnServerConnection, req)
