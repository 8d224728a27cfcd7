"""What a worker makes of errors."""

from __future__ import annotations

import pytest

from search.worker.attempt import _as_text


@pytest.mark.parametrize(
    ("message", "text"),
    [("nul\0byte", "nulbyte"), ("half \ud800 a character", "half \\ud800 a character"), ("ü 中\n", "ü 中\n")],
)
def test_what_an_exception_says_fits_into_files_and_databases(message: str, text: str) -> None:
    assert _as_text(message) == text
    assert text.encode()
