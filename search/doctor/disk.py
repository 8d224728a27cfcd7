"""The home: whether it can be written, and the room on its disk."""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path

from hpsearch.search.console import command
from hpsearch.search.doctor.check import Check, Found, failed, ok, warning
from hpsearch.storage.home import VARIABLE

LITTLE = 1_000_000_000  # bytes: a few runs with their checkpoints and plots
TOO_LITTLE = 100_000_000  # bytes: less than one

_ELSEWHERE = f"set {VARIABLE} to a folder on another disk"


def disk_checks(home: Path) -> list[Check]:
    """Return the checks of the folder where runs, logs and the outbox lie."""
    return [Check("home", partial(_writable, home)), Check("disk", partial(_room, home))]


def _writable(home: Path) -> Found:
    try:
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(b"hpsearch")
    except OSError as error:
        return failed(f"{home} cannot be written: {error.strerror or error}", f"mend that, or {_ELSEWHERE}")
    return ok(f"{home} can be written")


def _room(home: Path) -> Found:
    from rich.filesize import decimal

    free = shutil.disk_usage(home).free
    said, remedy = (
        f"{decimal(free)} free where {home} is",
        f"make room, such as with '{command('gc')}', or {_ELSEWHERE}",
    )
    if free < TOO_LITTLE:
        return failed(f"{said}, under {decimal(TOO_LITTLE)}", remedy)
    if free < LITTLE:
        return warning(f"{said}, under {decimal(LITTLE)}", remedy)
    return ok(said)
