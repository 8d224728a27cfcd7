"""Names with what there is to say of each, in as many columns as the terminal has."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

_WIDEST = 120  # longer lines of words are hard to read
_ROOM = 36  # columns that words need beside the names
_LEFT = 34  # columns of the names
_INDENT = "    "


def listed(rows: Iterable[tuple[str, str]], columns: int) -> Iterator[str]:
    """Lines of a name and its words: beside it, or below where there is no room. Nothing is cut, no word torn."""
    columns = min(columns, _WIDEST)
    found = list(rows)
    left = min(max((len(name) for name, _ in found), default=0), _LEFT) + 2
    for name, words in found:
        if columns - left >= _ROOM and len(name) + 2 <= left:
            yield from _wrapped(f"{name:{left}}{words}", columns, " " * left)
        else:
            yield from _wrapped(name, columns, _INDENT)
            yield from _wrapped(_INDENT + words, columns, _INDENT) if words else ()


def _wrapped(text: str, columns: int, indent: str) -> list[str]:
    return textwrap.wrap(text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
