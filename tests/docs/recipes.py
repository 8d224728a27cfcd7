"""The code blocks of the recipes page; each is a complete objective."""

from __future__ import annotations

import re

from docs.packages import ROOT


def blocks(page: str, language: str) -> dict[str, str]:
    """Return the code blocks of a language on a how-to page, by the titles of its sections."""
    sections = _sections(page)
    found = {section.splitlines()[0]: re.findall(rf"```{language}\n(.*?)```", section, re.S) for section in sections}
    return {title: "\n".join(parts) for title, parts in found.items() if parts}


def _sections(page: str) -> list[str]:
    return (ROOT / "docs" / "how-to" / f"{page}.md").read_text().split("\n## ")[1:]


RECIPES = blocks("recipes", "python")
DIFFS = blocks("recipes", "diff")  # the changes that convert a script
assert len(RECIPES) == len(_sections("recipes"))


def name_in(recipe: str) -> str:
    """Return the name of the objective class or function."""
    return "".join(re.findall(r"^class (\w+)\(\w*Objective\)|^def (main)", recipe, re.M)[0])
