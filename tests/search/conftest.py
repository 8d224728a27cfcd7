"""A study with runs and models on the MLflow server of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.stack import StackInfo
from storage.studies import open_storage
from storage.tracking import Tracking
from tests.search.promoting import Tracked, track


@pytest.fixture(scope="session")
def tracking(stack: StackInfo) -> Tracking:
    return Tracking(stack.tracking_uri)


@pytest.fixture
def tracked(database_url: str, tracking: Tracking, tmp_path: Path) -> Tracked:
    """Trials 0 to 2 COMPLETE, the second one the best, and trial 3 PRUNED."""
    return track(open_storage(database_url, application_name="test"), tracking, tmp_path, values=[0.5, 0.9, 0.8, None])
