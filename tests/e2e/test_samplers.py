"""Each kind of sampler searches with the command line and killed workers; finite samplers complete."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from optuna.trial import TrialState

from hpsearch.search.samplers.suggest import derive_seed
from tests.e2e.support import CHEAP, Cli

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("search")]

GRID = "search_space={lr: [1e-2, 0.1], width: [8, 16], kind: [a, b]}"


@pytest.mark.parametrize(
    ("sampler", "options", "trials"),
    [
        pytest.param("cmaes", ["popsize=4"], 12, marks=pytest.mark.soak),
        pytest.param("nsga2", ["population_size=4"], 12, marks=pytest.mark.soak),
        ("grid", [GRID], None),
        pytest.param("brute_force", [], None, marks=pytest.mark.soak),
    ],
)
def test_each_kind_of_sampler_works_while_workers_are_killed(
    cli: Cli, tmp_path: Path, sampler: str, options: list[str], trials: int | None
) -> None:
    given = [part for option in options for part in ("--sampler-option", option)]
    budget = [] if trials is None else ["--trials", str(trials)]
    objective = f"{CHEAP}:Few" if sampler == "brute_force" else f"{CHEAP}:Cheap"
    command = ("run", objective, "--name", sampler, "--sampler", sampler, *given, "--pruner", "none", *budget)
    cli(*command, "--workers", "2", DEATHS=str(tmp_path))
    found = cli.study(sampler).trials
    assert [t.number for t in found] == list(range(trials or 8))
    assert {t.state for t in found} == {TrialState.COMPLETE}
    died = {number for number in range(len(found)) if derive_seed(0, "trial", number) % 2 == 1}
    assert {t.number for t in found if t.user_attrs["hpsearch:attempt"] == 2} == died
    assert len(died) == len(list(tmp_path.iterdir())) > 1
    configurations = {tuple(sorted(t.params.items())) for t in found}
    assert len(configurations) == len(found)
    if sampler == "grid":
        values = product([("kind", "a"), ("kind", "b")], [("lr", 0.01), ("lr", 0.1)], [("width", 8), ("width", 16)])
        assert configurations == set(values)
        refused = cli("extend", "grid", "--trials", "+1", code=2)
        assert "--trials 9: grid has 8 configurations and runs each once" in refused
        assert "Traceback" not in refused
    if sampler == "brute_force":
        assert "the budget is spent" in cli(*command)  # joins the study, whose spec has the computed number


def test_a_grid_that_is_too_large_is_rejected_before_the_study_is_created(cli: Cli) -> None:
    option = "search_space={lr: [5.0], width: [8], kind: [a]}"
    refused = cli("run", CHEAP + ":Cheap", "--name", "no.grid", "--sampler", "grid", "--sampler-option", option, code=2)
    assert "sampler.search_space: parameter 'lr' must be in [0.01, 1.0], not 5.0" in refused
    assert "no.grid" not in cli("studies")
