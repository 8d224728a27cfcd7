"""Lists in messages, shortened to their first items."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice


def join_first(items: Collection[object], most: int = 3) -> str:
    """Return the first `most` items as text, and the number of the others: ``a, b, c and 2 more``."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, islice(items, most))) + more


def list_trials(numbers: Collection[int], most: int = 5) -> str:
    """Return the numbers of trials as text: ``trial 3``, or ``trials 3, 5 and 2 more``."""
    return f"trial{'s' if len(numbers) > 1 else ''} {join_first(numbers, most)}"
