"""Lists in messages, shortened to their first items."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice


def join_first(items: Collection[object], most: int = 3) -> str:
    """Return the first `most` items as text, and the number of the others: ``a, b, c and 2 more``."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, islice(items, most))) + more
