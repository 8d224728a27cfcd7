"""What killed backups and restores left behind."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

_ABANDONED = 24 * 3600.0  # seconds: of one that runs the folder is younger


def sweep(parent: Path, prefix: str) -> None:
    """Remove the folders in `parent` whose names begin so and that nobody can be at any more."""
    for folder in parent.iterdir():
        with suppress(OSError):
            if not folder.name.startswith(prefix):
                continue
            if time.time() - folder.stat().st_mtime > _ABANDONED:
                shutil.rmtree(folder, ignore_errors=True)
