"""Pieces of Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table without empty columns; cells may hold Markdown."""
    columns = [(name, *cells) for name, *cells in zip(head, *rows, strict=True) if any(cells)]
    head, *rows = zip(*columns, strict=True)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += [
        "| " + " | ".join(safe(" ".join(cell.split())).replace("|", "\\|") for cell in row) + " |" for row in rows
    ]
    return "\n".join(lines)


def words_of(thing: Any) -> str:
    """The first paragraph of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("``", "`")


def paragraphs(text: str) -> str:
    """Text in paragraphs, each on one line; of a package's docstring without its list of imports."""
    parts = [" ".join(part.split()) for part in text.replace("``", "`").split("\n\n")]
    return "\n\n".join(safe(part) for part in parts if not part.startswith("Imports: "))


def safe(text: str) -> str:
    """Text whose angle brackets are no tags."""
    return re.sub(r"<(?=[a-zA-Z/])", "&lt;", text)


def code(text: str) -> str:
    """Text as code; nothing stays nothing."""
    return f"`{text}`" if text else ""
