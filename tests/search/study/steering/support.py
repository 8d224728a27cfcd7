"""Helpers for tests of the commands that steer a study."""

from __future__ import annotations

from collections.abc import Callable

import psycopg2

from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims


def take(claims: Claims) -> Claim:
    claim = claims.claim()
    assert isinstance(claim, Claim)
    return claim


Say = Callable[..., str]


def rows(url: str, statement: str) -> list[tuple[object, ...]]:
    connection = psycopg2.connect(url.replace("+psycopg2", ""))
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall()
    finally:
        connection.close()
