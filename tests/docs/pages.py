"""Read the documentation pages."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from docs.packages import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(path: Path) -> Iterator[list[str]]:
    """Yield the words of each command in a page's shell blocks, line by line."""
    for block in re.findall(r"^```sh\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            if words := shlex.split(line, comments=True):
                yield words


@functools.cache
def names_in(path: str) -> set[str]:
    """Return the names of tests and classes in a file."""
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
