"""The attacker's storage and the victim's home."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage


@pytest.fixture
def storage(database_url: str) -> PostgresStorage:
    return open_storage(database_url, application_name="attacker")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str) -> Path:
    """Return the home folder of the victim, whose commands use the database of the attacker."""
    monkeypatch.setenv("HPSEARCH_STORAGE_URL", database_url)
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
