"""The blocks of the page of recipes, each a whole objective."""

from __future__ import annotations

import re

from docs.rooms import ROOT

_SECTIONS = (ROOT / "docs" / "how-to" / "recipes.md").read_text().split("\n## ")[1:]


def _blocks(language: str) -> dict[str, str]:
    found = {section.splitlines()[0]: re.findall(rf"```{language}\n(.*?)```", section, re.S) for section in _SECTIONS}
    return {title: "\n".join(blocks) for title, blocks in found.items() if blocks}


RECIPES = _blocks("python")
DIFFS = _blocks("diff")  # what it took to make one of a script
assert len(RECIPES) == len(_SECTIONS)


def name_in(recipe: str) -> str:
    """The class, or the function, that is the objective."""
    return "".join(re.findall(r"^class (\w+)\(\w*Objective\)|^def (main)", recipe, re.M)[0])
