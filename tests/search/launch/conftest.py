from __future__ import annotations

from pathlib import Path

import pytest

from hpsearch.storage.embedded.stack import StackInfo
from tests.search.launch.site import Site


@pytest.fixture
def site(tmp_path: Path, database_url: str, stack: StackInfo) -> Site:
    return Site(tmp_path, database_url, stack.tracking_uri)
