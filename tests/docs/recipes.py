"""The blocks of the page of recipes, each a whole objective."""

from __future__ import annotations

import re

from docs.rooms import ROOT

TEXT = (ROOT / "docs" / "how-to" / "recipes.md").read_text()
RECIPES = dict(zip(re.findall(r"^## (.+)$", TEXT, re.M), re.findall(r"```python\n(.*?)```", TEXT, re.S), strict=True))


def name_in(recipe: str) -> str:
    """The class, or the function, that is the objective."""
    return "".join(re.findall(r"^class (\w+)\(\w*Objective\)|^def (main)", recipe, re.M)[0])
