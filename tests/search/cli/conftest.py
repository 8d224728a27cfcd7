"""A folder that other users can reach."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def open_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a working folder that other users can search, unlike `tmp_path`."""
    folder = Path(tempfile.mkdtemp(prefix="hpsearch-test-")).resolve()
    folder.chmod(0o755)
    monkeypatch.chdir(folder)
    yield folder
    shutil.rmtree(folder)
