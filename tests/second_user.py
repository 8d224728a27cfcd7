"""Run a part of a test as a second user of the machine, without privileges; only root can do this."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
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
            os.setgroups([])
            os.setgid(UID)
            os.setuid(UID)
            os.chdir("/")
            os.write(writer, json.dumps(act()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    assert text, "the function failed as the second user"
    return json.loads(text)
