"""Hyperband's brackets (Li et al. 2018, algorithm 1), dealt out as Optuna does: a function of study name and number."""

from __future__ import annotations

import math
from functools import cache
from zlib import crc32


@cache
def shares(min_resource: int, max_resource: int, reduction_factor: int) -> tuple[int, ...]:
    """Return how many of every ``sum(shares)`` trials each bracket gets; none, where no bracket fits."""
    # In floating point, as in Optuna: log(243, 3) is a little less than 5.
    brackets = math.floor(math.log(max_resource / min_resource, reduction_factor)) + 1
    return tuple(
        math.ceil(brackets * reduction_factor ** (brackets - 1 - bracket) / (brackets - bracket))
        for bracket in range(brackets)
    )


def bracket_of(study_name: str, number: int, shares: tuple[int, ...]) -> int:
    """Return the bracket of a trial, from 0, the one that prunes earliest."""
    ticket = crc32(f"{study_name}_{number}".encode()) % sum(shares)
    for bracket, share in enumerate(shares):
        ticket -= share
        if ticket < 0:
            return bracket
    raise AssertionError("the ticket is less than the sum of the shares")
