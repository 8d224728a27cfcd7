"""Errors and their causes."""

from __future__ import annotations

import errno

import pytest

from hpsearch.causes import iterate_causes
from hpsearch.storage.errors import find_full_disk
from hpsearch.storage.mlflow.health import describe_error, is_unreachable


@pytest.fixture
def cycle() -> ValueError:
    """Return an error that is its own cause."""
    error = ValueError("a")
    error.__cause__ = error
    return error


def test_an_error_that_is_its_own_cause_has_one_cause(cycle: ValueError) -> None:
    assert list(iterate_causes(cycle)) == [cycle]
    assert find_full_disk(cycle) is None
    assert not is_unreachable(cycle)
    assert describe_error(cycle) == "a"


def test_the_cause_of_an_error_is_found() -> None:
    outer = RuntimeError("outer")
    outer.__context__ = full = OSError(errno.ENOSPC, "full")
    assert find_full_disk(outer) is full
    assert find_full_disk(None) is None
