"""Studies with checkpoints."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.search.worker.checkpointed import Study


@pytest.fixture(params=["file", "memory"])
def study(request: pytest.FixtureRequest, database_url: str, tmp_path: Path) -> Study:
    url = f"file://{tmp_path}/store" if request.param == "file" else f"memory://{uuid.uuid4().hex}"
    return Study(url, database_url, tmp_path)


@pytest.fixture
def folder_study(database_url: str, tmp_path: Path) -> Study:
    return Study(f"file://{tmp_path}/store", database_url, tmp_path)
