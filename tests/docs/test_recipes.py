"""Every recipe is an objective that trains, and gets better by it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.rooms import ROOT
from objectives import fit, load_objective
from objectives.training.reports.describe import search_space

TEXT = (ROOT / "docs" / "how-to" / "recipes.md").read_text()
RECIPES = dict(zip(re.findall(r"^## (.+)$", TEXT, re.M), re.findall(r"```python\n(.*?)```", TEXT, re.S), strict=True))


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_trains(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path))
    path = tmp_path / "recipe.py"
    path.write_text(RECIPES[title])
    name = re.findall(r"^class (\w+)\(\w*Objective\)|^def (main)", RECIPES[title], re.M)[0]
    objective = load_objective(f"{path}:{''.join(name)}")
    assert search_space(objective)
    history = fit(objective, objective.default_config(), epochs=3, seed=0, device="cpu").history
    values = [record.metrics[f"val_{objective.metric}"] for record in history]
    assert max(values[1:]) >= values[0] if objective.direction == "maximize" else min(values[1:]) <= values[0]
