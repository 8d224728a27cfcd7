from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hpsearch.storage.embedded import postgres_account
from hpsearch.storage.embedded.postgres_account import find_account, make_postgres_folder
from hpsearch.storage.errors import StorageError


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, whose Postgres runs as another user")
def test_the_folder_is_private_before_it_belongs_to_the_user_of_postgres(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user could create the file with the password first."""
    modes = []
    monkeypatch.setattr(
        postgres_account.Account, "admit", lambda _, folder: modes.append(stat.S_IMODE(folder.stat().st_mode))
    )
    before = os.umask(0)
    try:
        make_postgres_folder(tmp_path)
    finally:
        os.umask(before)
    assert modes[0] == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, whose Postgres runs as another user")
def test_without_a_free_user_id_postgres_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_account, "_has_name", lambda _: True)
    with pytest.raises(StorageError, match=r"refuses to run as root.*run hpsearch as an ordinary user") as raised:
        find_account()
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, whose Postgres runs as another user")
def test_postgres_of_root_has_no_user_id_that_containers_of_another_user_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name for name in ("subuid", "subgid", "missing")]
    monkeypatch.setattr(postgres_account, "_SUBORDINATE_IDS", files)
    files[0].write_text("# rootless containers\nanna:100000:65536\n")
    files[1].write_text("bob:10000:55520\n")
    (data := tmp_path / "data").mkdir()
    os.chown(data, 65520, 65520)
    assert [find_account(folder).uid for folder in (None, data)] == [65520, 65520]
    files[1].write_text("bob:10000:55522\n")
    assert [find_account(folder).uid for folder in (None, data)] == [65522, 65522]
    files[0].write_text("1000:10000:65536")
    (moved,) = {find_account(folder).uid for folder in (None, data)}
    assert moved > 100_000


def test_a_user_id_without_a_name_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    with pytest.raises(StorageError, match="user id 4000000 has no entry in /etc/passwd"):
        find_account()
