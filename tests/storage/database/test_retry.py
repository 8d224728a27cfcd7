"""Retries of database statements."""

from __future__ import annotations

import pytest

from hpsearch.storage.database import retry
from hpsearch.storage.database.retry import limit_retries, retrying


class AwayError(Exception):
    pass


def test_an_interrupted_command_waits_briefly_for_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_FIRST_WAIT", 0.001)
    attempts = []

    def fail() -> None:
        attempts.append(1)
        raise AwayError

    with limit_retries(0.0), pytest.raises(AwayError):
        retrying(also=AwayError)(fail)
    assert len(attempts) == 2
    with pytest.raises(AwayError):
        retrying(0.0, also=AwayError)(fail)
