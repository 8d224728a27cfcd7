"""The file of the access token."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpsearch.storage.errors import StorageError
from hpsearch.storage.web.token import load_or_create_token, read_token


def test_a_new_token_is_private_and_kept(tmp_path: Path) -> None:
    assert read_token(tmp_path) is None
    token = load_or_create_token(tmp_path)
    assert load_or_create_token(tmp_path) == read_token(tmp_path) == token
    assert (tmp_path / "web-token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["a\nb", "\u00e9", "a\0b", "a b"])
def test_a_damaged_token_is_an_error_with_a_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / "web-token").write_text(text)
    with pytest.raises(
        StorageError, match=r"web-token' cannot be read \(it is damaged\): delete it, then run hpsearch up"
    ):
        read_token(tmp_path)
