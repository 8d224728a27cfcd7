"""Run a part of a test as a second user of the machine, without privileges; only root can do this."""

from __future__ import annotations

import json
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

UID = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user of the machine")


def act_as_second_user(act: Callable[[], Any]) -> Any:
    """Call a function in a forked process of the second user, and return its result, which must be JSON.

    A fork needs no access to the files of the Python installation, which the second user may not have.
    """
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            _become_second_user()
            os.write(writer, json.dumps(act()).encode())
            os._exit(0)
        except BaseException:
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    assert os.waitpid(pid, 0)[1] == 0, f"the function failed as the second user: {text}"
    return json.loads(text)


@contextmanager
def listen_as_second_user(serve: Callable[[socket.socket], None] | None = None, *, port: int = 0) -> Iterator[int]:
    """Listen in a forked process of the second user, and yield the port on 127.0.0.1.

    Args:
        serve: function that answers one client after the other; None answers no client.
        port: the port; 0 for any free port.
    """
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            _become_second_user()
            server = socket.create_server(("127.0.0.1", port))
            os.write(writer, f"{server.getsockname()[1]}\n".encode())
            while serve is not None:
                with suppress(OSError):
                    serve(server.accept()[0])
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        with os.fdopen(reader) as answer:
            yield int(answer.readline())
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _become_second_user() -> None:
    os.setgroups([])
    os.setgid(UID)
    os.setuid(UID)
    os.chdir("/")
