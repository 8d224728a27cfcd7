"""Every recipe is an objective whose metric improves with training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpsearch import load_objective
from hpsearch.objectives.fit import fit
from hpsearch.objectives.training.config import RunPlan
from hpsearch.search.study.create import sample_search_space
from tests.docs.recipes import DIFFS, RECIPES, name_in


@pytest.mark.slow
@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=pytest.mark.soak) if title.startswith("Images") else title for title in RECIPES]
)
def test_a_recipe_trains(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path))
    path = tmp_path / "recipe.py"
    path.write_text(RECIPES[title])
    objective = load_objective(f"{path}:{name_in(RECIPES[title])}")
    assert sample_search_space(objective)[0]
    history = fit(objective, objective.default_config(), RunPlan(3, 0, 0), device="cpu").history
    values = [record.metrics[f"val_{objective.metric}"] for record in history]
    assert max(values[1:]) >= values[0] if objective.direction == "maximize" else min(values[1:]) <= values[0]


@pytest.mark.parametrize("title", DIFFS)
def test_a_script_becomes_an_objective_with_few_changed_lines(title: str) -> None:
    lines = DIFFS[title].splitlines()
    added = [line[1:].strip() for line in lines if line.startswith("+")]
    assert len(lines) <= 15
    assert not [line for line in added if line not in re.split(r"\n\s*", RECIPES[title])]
