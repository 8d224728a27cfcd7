"""A folder with the objective that `hpsearch init` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpsearch.objectives.template import write_template


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_template(tmp_path / "wine.py")
    return tmp_path
