"""The token of the stack."""

from __future__ import annotations

import pytest

from hpsearch.storage.embedded.stack import StackInfo
from hpsearch.storage.web.token import read_token


@pytest.fixture
def token(stack: StackInfo) -> str:
    found = read_token(stack.home)
    assert found
    return found
