"""Samplers with state: their data, equal suggestions in all processes, and no repeated configurations."""

from __future__ import annotations

import json
import math
import pickle
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import cmaes
import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from hpsearch import ObjectiveError
from hpsearch.search.errors import SearchError
from hpsearch.search.samplers import SamplerSpec
from hpsearch.search.samplers.cmaes_state import load_state
from hpsearch.search.samplers.grid_and_brute_force import list_configurations
from hpsearch.search.samplers.known_trials import make_sampler_study_view
from hpsearch.storage.rungs.rungs import Rungs
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from tests.conftest import execute
from tests.search.sampling.support import Small, Worker, branches, distinct, nine

GRID = {"lr": [0.01, 0.1, 1.0], "width": [8, 16, 24, 32]}


def plane(trial: optuna.Trial) -> None:
    trial.suggest_float("lr", 0.01, 1.0, log=True)
    trial.suggest_int("width", 8, 32, step=8)


def mixed(trial: optuna.Trial) -> None:
    plane(trial)
    trial.suggest_categorical("optimizer", ["adam", "sgd"])


def finite(trial: optuna.Trial) -> None:
    trial.suggest_categorical("lr", [0.01, 0.1, 1.0])
    trial.suggest_int("width", 8, 32, step=8)


LEARN: dict[str, dict[str, object]] = {
    "cmaes": {"popsize": 4},
    "cmaes margin": {"popsize": 4, "with_margin": True},
    "nsga2": {"population_size": 4},
    "nsga3": {"population_size": 4},
    "grid": {"search_space": GRID},
}


def sampler(key: str) -> dict[str, object]:
    return {"name": key.partition(" ")[0], **LEARN.get(key, {})}


def run(worker: Worker, *, end: Callable[[int], Outcome] = lambda _: Outcome.COMPLETE) -> dict[str, object]:
    claim = worker.claim()
    params = worker.suggest(claim)
    outcome = end(claim.number)
    badness = abs(math.log10(float(str(params["lr"]))) + 1) + int(str(params["width"])) / 32
    if outcome is Outcome.PRUNED:
        worker.claims.report(claim, 0, -badness)
    worker.claims.finish_attempt(claim, outcome, value=None if outcome is Outcome.FAILED else -badness)
    return params


@pytest.mark.parametrize(
    "key", ["nsga2", *(pytest.param(key, marks=pytest.mark.soak) for key in LEARN if key != "nsga2")]
)
def test_suggestions_do_not_depend_on_the_age_of_a_process(database_url: str, key: str) -> None:
    settings = {"sampler": sampler(key), "n_trials": 12}
    stays = Worker(database_url, plane, name="stays", **settings)
    found = [run(stays) for _ in range(12)]
    assert found == [run(Worker(database_url, plane, name="joins", **settings)) for _ in range(12)]
    assert distinct(found) == 12
    other = [run(Worker(database_url, plane, name="other", seed=1, **settings)) for _ in range(12)]
    assert found != other


def goes_on(url: str, name: str, key: str, trials: int) -> list[dict[str, object]]:
    space = finite if key == "brute_force" else mixed
    worker = Worker(url, space, name=name, sampler=sampler(key), n_trials=12)
    return [run(worker) for _ in range(trials)]


PROGRAM = """
import json, sys
from tests.search.sampling.test_samplers import two_of_each
print(json.dumps(two_of_each(sys.argv[1], "b")))
"""
KEYS = ("cmaes", "nsga2", "nsga3", "brute_force")


def two_of_each(url: str, name: str) -> list[list[dict[str, object]]]:
    return [goes_on(url, f"{key}-{name}", key, 2) for key in KEYS]


@pytest.mark.soak
@pytest.mark.slow
def test_all_processes_suggest_the_same(database_url: str) -> None:
    """The studies have the same state and a categorical parameter."""
    for key in KEYS:
        before = [goes_on(database_url, f"{key}-{name}", key, 6) for name in "ab"]
        assert before[0] == before[1]
    command = [sys.executable, "-c", PROGRAM, database_url]
    other = subprocess.run(command, capture_output=True, check=True)
    expected = two_of_each(database_url, "a")
    assert json.loads(other.stdout) == expected
    assert [distinct(found) for found in expected] == [2] * len(KEYS)


@pytest.mark.parametrize("key", ["cmaes", "nsga2", "nsga3"])
def test_concurrent_first_suggestions_differ(database_url: str, key: str) -> None:
    first = Worker(database_url, plane, sampler=sampler(key))
    for _ in range(5):
        run(first)
    workers = [first, *(Worker(database_url, plane, sampler=sampler(key)) for _ in range(3))]
    claims = [worker.claim() for worker in workers]
    suggested = [worker.suggest(claim) for worker, claim in zip(workers, claims, strict=True)]
    assert distinct(suggested) == 4


def attrs(worker: Worker, prefix: str) -> dict[int, object]:
    return {
        trial.number: value
        for trial in worker.study.get_trials(deepcopy=False)
        for key, value in trial.system_attrs.items()
        if key == prefix
    }


def test_cmaes_approaches_the_optimum(database_url: str) -> None:
    worker = Worker(database_url, plane, sampler=sampler("cmaes"))
    found = [abs(math.log10(float(str(run(worker)["lr"]))) + 1) for _ in range(40)]
    assert sum(found[-10:]) < 0.75 * sum(found[:10])


def test_cmaes_stores_its_generations_in_trials_and_continues_after_a_resume(database_url: str) -> None:
    worker = Worker(database_url, plane, sampler=sampler("cmaes margin"))
    run(worker)
    claims = [worker.claim() for _ in range(6)]
    lost, *others = claims
    params = worker.suggest(lost)
    noted = dict(worker.storage.read_trial(lost.trial_id).system_attrs)
    assert noted["cmawm:generation"] == 0
    worker.claims.finish_attempt(lost, Outcome.LOST, retry=True)
    for claim in others:
        worker.suggest(claim)
        worker.claims.finish_attempt(claim, Outcome.COMPLETE, value=1.0)
    again = Worker(database_url, plane, sampler=sampler("cmaes margin"))
    taken = again.claim()
    assert taken.trial_id == lost.trial_id
    assert again.suggest(taken) == params
    assert again.storage.read_trial(lost.trial_id).system_attrs == noted, "it is of the generation that it was"
    again.claims.finish_attempt(taken, Outcome.COMPLETE, value=1.0)
    run(again)
    assert attrs(again, "cmawm:generation")[7] == 1
    assert any("cmawm:optimizer:0" in t.system_attrs for t in again.study.get_trials(deepcopy=False))


class RunCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


class ForgedDtype:
    """A dtype with fields outside of its items, with which NumPy reads and writes other memory."""

    def __reduce__(self) -> tuple[Any, ...]:
        return np.dtype, ("V8",), (3, "|", None, ("a",), {"a": (np.dtype("O"), 4096)}, 8, 1, 27)


@pytest.mark.parametrize("attack", [RunCode(), ForgedDtype(), [cmaes.CMA], {"a": 1}, b""], ids=lambda a: str(type(a)))
def test_the_stored_state_of_cmaes_cannot_run_code(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: object
) -> None:
    monkeypatch.chdir(tmp_path)
    worker = Worker(database_url, plane, sampler=sampler("cmaes"))
    run(worker)
    optimizer = cmaes.CMA(mean=np.zeros(2), sigma=1.0)
    optimizer._mean = attack
    for state in (attack, optimizer, 2):
        with pytest.raises(SearchError, match="trial 7: the stored state of the sampler cmaes is rejected"):
            load_state(pickle.dumps(state).hex(), 7)
    insert = "INSERT INTO trial_system_attributes (trial_id, key, value_json) VALUES (1, 'cma:optimizer:0', '\"{}\"')"
    execute(database_url, insert.format(pickle.dumps(attack).hex()))
    with pytest.raises(SearchError, match="trial 0: the stored state of the sampler cmaes is rejected"):
        run(worker)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["CMA", "SepCMA", "CMAwM", "learning rate"])
def test_the_loaded_state_of_cmaes_equals_the_stored_one(kind: str) -> None:
    options: dict[str, Any] = {"mean": np.full(3, 0.5), "sigma": 0.2, "bounds": np.array([[0.0, 1.0]] * 3)}
    if kind == "CMAwM":
        options["steps"] = np.array([0.1, 0.0, 0.2])
    elif kind == "learning rate":
        options["lr_adapt"] = True
    stored = getattr(cmaes, kind, cmaes.CMA)(**options, seed=1)
    for generation in range(4):
        points = [stored.ask() for _ in range(stored.population_size)]
        told = [point[1] if kind == "CMAwM" else point for point in points]
        stored.tell([(point, float(np.sum(point**2) + generation)) for point in told])
        state = pickle.dumps(stored)
        loaded, stored = load_state(state.hex(), 0), pickle.loads(state)
        assert type(loaded) is type(stored)
        for each in (loaded, stored):
            getattr(each, "_cma", each)._rng = np.random.RandomState(generation)
        assert np.array_equal(loaded.ask(), stored.ask())


def test_an_enqueued_configuration_is_not_a_sample_of_cmaes(database_url: str) -> None:
    worker = Worker(database_url, plane, sampler=sampler("cmaes"))
    for _ in range(2):
        run(worker)
    worker.study.enqueue_trial({"lr": 0.5})
    assert run(worker)["lr"] == 0.5
    run(worker)
    assert sorted(attrs(worker, "cma:generation")) == [1, 3]


@pytest.mark.parametrize("state", ["pruned", "paused", "diverged"])
def test_cmaes_can_use_pruned_trials(database_url: str, state: str) -> None:
    """It uses trials of two generations, of which only one is complete."""

    def generations(consider: bool) -> set[object]:
        name = f"{state}-{consider}"
        options = {"name": "cmaes", "popsize": 4, "consider_pruned_trials": consider}
        worker = Worker(database_url, plane, name=name, sampler=options)
        worker.study = make_sampler_study_view(worker.study)
        rungs = Rungs("asha", (1,), 2, 10, maximize=True)
        worker.claims = Claims(worker.storage.engine, worker.study._study_id, worker="w", rungs=rungs)
        run(worker)
        for number in range(9):
            claim = worker.claim()
            worker.suggest(claim)
            worker.claims.report(claim, 0, math.nan if state == "diverged" and number % 2 else float(number))
            if state == "paused":
                assert not worker.claims.report_rung(claim, 0, float(number)).is_promoted
            else:
                worker.claims.finish_attempt(claim, Outcome.PRUNED if state == "pruned" else Outcome.INFEASIBLE)
        states = {"pruned": "PRUNED", "paused": "WAITING", "diverged": "PRUNED"}
        assert [t.state.name for t in worker.study.get_trials()] == ["COMPLETE", *[states[state]] * 9]
        return set(attrs(worker, "cma:generation").values())

    assert generations(consider=False) == {0}
    assert generations(consider=True) >= {0, 1, 2}


def test_generations_are_stored_in_trials_and_pruned_ones_are_no_parents(database_url: str) -> None:
    worker = Worker(database_url, plane, sampler=sampler("nsga2"))
    for _ in range(16):
        run(worker, end=lambda number: Outcome.PRUNED if number % 2 else Outcome.COMPLETE)
    kept = attrs(worker, "NSGAIISampler:generation")
    assert [kept[number] for number in range(16)] == [0] * 7 + [1] * 8 + [2]
    parents = worker.storage.get_study_system_attrs(worker.study._study_id)["NSGAIISampler:parent:1"]
    numbers = {t.number for t in worker.study.get_trials(deepcopy=False) if t._trial_id in parents}
    assert numbers == {0, 2, 4, 6}


def points() -> set[tuple[object, ...]]:
    return set(product(GRID["lr"], GRID["width"]))


def of_grid(params: dict[str, object]) -> tuple[object, object]:
    return params["lr"], params["width"]


def test_killed_workers_leave_no_gap_in_a_grid(database_url: str) -> None:
    """Four concurrent workers; every third trial loses two of them, before and after its suggestion."""
    settings = {"sampler": sampler("grid"), "n_trials": 12}
    Worker(database_url, plane, **settings)
    died = Counter[int]()

    def work() -> None:
        while True:
            worker = Worker(database_url, plane, **settings)
            claim = worker.claims.claim()
            if not isinstance(claim, Claim):
                return
            if claim.number % 3 == 0 and claim.attempt < 3:
                died[claim.number] += 1
                if claim.attempt == 2:
                    worker.suggest(claim)
                worker.claims.finish_attempt(claim, Outcome.LOST, retry=True)
                continue
            worker.suggest(claim)
            worker.claims.finish_attempt(claim, Outcome.COMPLETE, value=1.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    look = Worker(database_url, plane, **settings)
    trials = look.study.get_trials()
    assert died == dict.fromkeys((0, 3, 6, 9), 2)
    assert [t.state for t in trials] == [TrialState.COMPLETE] * 12
    assert {of_grid(t.params) for t in trials} == points()


def test_part_of_a_grid_is_spread_over_it_and_another_seed_has_another_part(database_url: str) -> None:
    def part(seed: int) -> list[tuple[object, object]]:
        worker = Worker(database_url, plane, name=f"s{seed}", sampler=sampler("grid"), n_trials=12, seed=seed)
        return [of_grid(run(worker)) for _ in range(4)]

    assert len({lr for lr, _ in part(0)}) > 1
    assert part(0) != part(1)


def test_enqueued_trials_take_no_point_of_the_grid(database_url: str) -> None:
    worker = Worker(database_url, plane, sampler=sampler("grid"), n_trials=12)
    for _ in range(2):
        worker.study.enqueue_trial({"lr": 0.5, "width": 8})
    found = [of_grid(run(worker)) for _ in range(12)]
    assert found[:2] == [(0.5, 8)] * 2
    without = Worker(database_url, plane, name="without", sampler=sampler("grid"), n_trials=12)
    assert found[2:] == [of_grid(run(without)) for _ in range(10)]


def test_brute_force_runs_no_configuration_twice(database_url: str) -> None:
    worker = Worker(database_url, nine, sampler={"name": "brute_force"}, n_trials=9)
    waiting = [worker.claim() for _ in range(7)]
    kept = [worker.suggest(claim) for claim in waiting]
    for claim in waiting:
        worker.claims.finish_attempt(claim, Outcome.RELEASED)
    # New trials, which no worker claims while other trials wait.
    for _ in range(2):
        trial_id = worker.storage.create_new_trial(worker.study._study_id)
        number = worker.storage.get_trial(trial_id).number
        kept.append(worker.suggest(Claim(trial_id, number, 1)))
    assert distinct(kept) == 9


def test_every_configuration_of_a_space_with_branches_is_counted() -> None:
    def forked(trial: optuna.Trial) -> None:
        kind = trial.suggest_categorical("kind", ["tree", "line", None])
        if kind == "tree":
            trial.suggest_int("depth", 1, 3)
        elif kind == "line":
            trial.suggest_float("slope", 0.0, 0.3, step=0.1)
            trial.suggest_float("only", 1.0, 1.0)

    found = list(list_configurations(Small(forked).suggest))
    assert len(found) == 3 + 4 + 1
    assert distinct(found) == 8
    spec = SamplerSpec.parse({"name": "brute_force"}).fit_to_objective(Small(forked))
    assert spec.max_trials() == 8
    assert spec.model_dump()["configurations"] == 8


@pytest.mark.parametrize(
    ("options", "space", "words"),
    [
        (
            {"name": "brute_force"},
            branches,
            "brute_force cannot search Small: parameter 'bend' has infinitely many",
        ),
        (
            {"name": "grid", "search_space": {"lr": [5.0], "width": [8]}},
            plane,
            "parameter 'lr' must be in [0.01, 1.0], not 5.0",
        ),
        (
            {"name": "grid", "search_space": {"lr": [0.1], "width": [9]}},
            plane,
            "parameter 'width' must be in [8, 32] with step 8, not 9",
        ),
        (
            {"name": "grid", "search_space": {"lr": ["x"], "width": [8]}},
            plane,
            "parameter 'lr' must be a number, not 'x'",
        ),
        ({"name": "grid", "search_space": {"lr": [0.1]}}, plane, "parameter 'width' of Small is missing"),
        (
            {"name": "grid", "search_space": {**GRID, "widht": [8]}},
            plane,
            "search_space: parameter 'widht' does not exist in Small; did you mean 'width'?",
        ),
        (
            {"name": "grid", "search_space": {**GRID, "optimizer": ["adam", "lion"]}},
            mixed,
            "parameter 'optimizer' must be one of 'adam', 'sgd', not 'lion'",
        ),
    ],
)
def test_an_incompatible_sampler_is_an_error_of_one_line(
    options: dict[str, object], space: Callable[[optuna.Trial], object], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        SamplerSpec.parse(options).fit_to_objective(Small(space))
    assert "\n" not in str(caught.value)


def test_an_error_in_the_search_space_is_an_objective_error() -> None:
    class Broken(Small):
        def suggest(self, trial):
            raise ValueError("a bug")

    for options in ({"name": "brute_force"}, {"name": "grid", "search_space": GRID}):
        with pytest.raises(ObjectiveError, match=r"Broken.suggest: .*test_samplers.py:\d+: ValueError: a bug"):
            SamplerSpec.parse(options).fit_to_objective(Broken(plane))


def test_a_grid_of_the_command_line_may_have_exponents() -> None:
    grid = SamplerSpec.parse({"name": "grid", "search_space": {"lr": ["1e-3", "1E-2"], "kind": ["a", "e5"]}})
    assert grid.options["search_space"] == {"lr": [0.001, 0.01], "kind": ["a", "e5"]}
