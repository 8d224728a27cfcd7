"""MkDocs hooks: add files of the project's root as pages, and replace links to sources by their text.

A link to a source file works on a code host. The site contains no source files, so the link would be broken there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
FROM_THE_ROOT = ("CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages from the project's root."""
    for name in FROM_THE_ROOT:
        text = (ROOT / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, files: Files, **_: Any) -> str:
    """Replace links to files outside of the site by their text."""
    here = Path(page.file.src_uri).parent

    def shown(link: re.Match[str]) -> str:
        target = link[3]
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        inside = _normal(here / target)
        if inside.startswith("../") and inside[3:] in FROM_THE_ROOT:
            up = "../" * len(here.parts)
            return f"[{link[2]}]({up}{inside[3:]}{link[4] or ''})"
        found = files.get_file_from_path(inside)
        return link[2] if found is None or found.inclusion.is_excluded() else link[0]

    return LINK.sub(shown, markdown)


def _normal(path: Path) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)
