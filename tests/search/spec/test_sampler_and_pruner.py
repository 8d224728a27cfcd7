"""The table of samplers and pruners in the documentation states which combinations a new study accepts."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hpsearch import Objective, TrainConfig
from hpsearch.search.errors import SearchError
from hpsearch.search.pruners import PrunerSpec
from hpsearch.search.samplers import SamplerSpec
from hpsearch.search.spec.resolve import resolve_spec
from hpsearch.search.spec.spec import StudySpec, parse_spec, parse_stored_spec

PAGE = Path(__file__).parents[3] / "docs/how-to/samplers.md"

OPTIONS: dict[str, dict[str, Any]] = {
    "grid": {"search_space": {"lr": [0.1]}},
    "optunahub": {"package": "samplers/x", "ref": "0" * 40},
    "nsga2": {"population_size": 10},
    "nsga3": {"population_size": 10},
    "threshold": {"upper": 1.0},
}


class Any9(Objective):
    metric, direction, epochs, n_trials = "accuracy", "maximize", 9, 100

    def suggest(self, trial):
        return TrainConfig(lr=trial.suggest_float("lr", 1e-3, 1.0))

    def data(self, seed):
        raise NotImplementedError

    def model(self, config, train):
        raise NotImplementedError


def read_table() -> dict[tuple[str, str], str]:
    """Return the cell of each sampler and pruner."""
    section = PAGE.read_text().partition("## Samplers with pruners\n")[2].partition("\n## ")[0]
    head, _, *rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    names = [[re.findall(r"`(\w+)`", cell) for cell in (column, *(row[0] for row in rows))] for column in head[1:]]
    found: dict[tuple[str, str], str] = {}
    for column, (pruners, *samplers) in enumerate(names, 1):
        for row, of_row in zip(rows, samplers, strict=True):
            found |= dict.fromkeys(product(of_row, pruners), row[column].strip())
    return found


TABLE = read_table()


def kind(name: str) -> dict[str, Any]:
    return {"name": name, **OPTIONS.get(name, {})}


def resolve(sampler: str, pruner: str) -> StudySpec:
    settings = {"n_trials": 1} if sampler == "grid" else {}
    settings |= {"folds": 5} if pruner == "wilcoxon" else {}
    return resolve_spec(
        {"objective": "x", "name": "s", "sampler": kind(sampler), "pruner": kind(pruner), **settings}, Any9()
    )


@pytest.mark.parametrize(("sampler", "pruner"), [*product(SamplerSpec.registry, PrunerSpec.registry)])
def test_the_table_states_whether_a_combination_is_accepted(sampler: str, pruner: str) -> None:
    cell = TABLE[sampler, pruner]
    if cell.startswith("yes"):
        spec = resolve(sampler, pruner)
        assert (spec.sampler.name, spec.pruner.name) == (sampler, pruner)
        return
    assert cell == "rejected"
    with pytest.raises(SearchError, match=f"--sampler {sampler} is not available with --pruner {pruner}") as caught:
        resolve(sampler, pruner)
    assert "\n" not in str(caught.value)


def test_the_table_has_no_other_names() -> None:
    assert set(TABLE) == set(product(SamplerSpec.registry, PrunerSpec.registry))


def test_an_existing_study_keeps_a_combination_that_is_rejected_now() -> None:
    values = {
        "name": "s",
        "objective": "x",
        "metric": "accuracy",
        "direction": "maximize",
        "n_trials": 100,
        "epochs": 9,
    }
    stored = parse_stored_spec({**values, "sampler": kind("nsga2"), "pruner": kind("asha")})
    given = {"objective": stored.objective, "sampler": kind("nsga2"), "pruner": kind("asha")}
    assert resolve_spec(given, Any9(), stored) == stored


@pytest.mark.parametrize(("sampler", "pruner"), [("nsga2", "none"), ("nsga3", "none"), ("tpe", "asha"), (None, "asha")])
def test_with_several_metrics_the_default_pruner_suits_the_sampler(sampler: str | None, pruner: str) -> None:
    values = {
        "name": "s",
        "objective": "x",
        "directions": "accuracy=maximize,loss=minimize",
        "n_trials": 100,
        "epochs": 9,
    }
    spec = parse_spec({**values, **({"sampler": kind(sampler)} if sampler else {})})
    assert spec.pruner.name == pruner
