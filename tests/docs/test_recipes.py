"""Every recipe is an objective that trains, smokes what it says, and reaches what it is for."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from docs.rooms import ROOT
from objectives import load_objective
from objectives.training import Trainer
from objectives.training.reports.describe import search_space

TEXT = (ROOT / "docs" / "how-to" / "recipes.md").read_text()
RECIPES = dict(zip(re.findall(r"^## (.+)$", TEXT, re.M), re.findall(r"```python\n(.*?)```", TEXT, re.S), strict=True))


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_trains(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path))
    path = tmp_path / "recipe.py"
    path.write_text(RECIPES[title])
    names = re.findall(r"^class (\w+)\(Objective\)", RECIPES[title], re.M)
    objective = load_objective(f"{path}:{names[0]}")
    assert search_space(objective)
    config = dataclasses.replace(objective.default_config())
    history = Trainer(objective, config, epochs=3, seed=0, device="cpu").fit().history
    values = [record.metrics[f"val_{objective.metric}"] for record in history]
    better = max(values[1:]) if objective.direction == "maximize" else -min(values[1:])
    assert better >= (values[0] if objective.direction == "maximize" else -values[0])
