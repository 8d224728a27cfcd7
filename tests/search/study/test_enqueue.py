"""Enqueued configurations are validated completely, run first, and run once."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from hpsearch import LoopObjective, ObjectiveError, load_objective
from hpsearch.objectives.references import BUILTIN
from hpsearch.search.errors import SearchError
from hpsearch.search.spec.resolve import check_settings
from hpsearch.search.study.control import extend_study
from hpsearch.search.study.create import create_or_join
from hpsearch.search.study.enqueue import default_params, enqueue, read_rows
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.storage.attributes import ORIGIN
from hpsearch.storage.study_storage.storage import open_storage


class Wide(LoopObjective):
    metric, direction = "distance", "minimize"

    def suggest(self, trial):
        return {
            "lr": trial.suggest_float("lr", 0.01, 1.0, log=True),
            "width": trial.suggest_int("width", 8, 32, step=8),
            "kind": trial.suggest_categorical("kind", ["a", "b", None, True, 3]),
        }

    def run(self, trial):
        raise NotImplementedError


class Started(Wide):
    defaults = {"lr": 0.1, "kind": "b"}  # noqa: RUF012 as users write it


class Misspelt(Wide):
    defaults = {"lr": 0.1, "knid": "b"}  # noqa: RUF012 as users write it


def rows(tmp_path: Path, text: str, name: str = "rows.csv") -> list[Any]:
    path = tmp_path / name
    path.write_text(text)
    return read_rows(path, Wide())


def fixed(trials: list[Any]) -> list[dict[str, Any]]:
    return [trial.system_attrs["fixed_params"] for trial in trials]


def study_of(url: str, objective: LoopObjective, enqueued: list[Any] = (), **settings: Any) -> StoredStudy:  # type: ignore[assignment]
    storage = open_storage(url, application_name="test")
    given = {"objective": "x.py", "name": "s", **settings}
    return create_or_join(storage, given, objective, inspect=lambda *_: {}, enqueued=enqueued)[0]


def test_a_table_is_read_with_the_types_of_the_search_space(tmp_path: Path) -> None:
    found = rows(tmp_path, "lr, width,kind\n1e-1,16,a\n0.5,,none\n,8,TRUE\n\n1,32,3.0\n")
    assert fixed(found) == [
        {"lr": 0.1, "width": 16, "kind": "a"},
        {"lr": 0.5, "kind": None},
        {"width": 8, "kind": True},
        {"lr": 1.0, "width": 32, "kind": 3},
    ]
    assert [trial.user_attrs[ORIGIN] for trial in found] == [f"rows.csv, line {line}" for line in (2, 3, 4, 6)]
    objects = '{"lr": 0.1, "kind": null}\n\n{"width": 8}\n'
    assert fixed(rows(tmp_path, objects, "rows.jsonl")) == [{"lr": 0.1, "kind": None}, {"width": 8}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr\n0.1\n5\n", "line 3: parameter 'lr' must be in [0.01, 1.0], not 5"),
        ("lr\nfast\n", "line 2: parameter 'lr' must be a number, not 'fast'"),
        ("lr\n1_0e-3\n", "line 2: parameter 'lr' must be a number, not '1_0e-3'"),
        ("width\n9\n", "line 2: parameter 'width' must be in [8, 32] with step 8, not 9"),
        pytest.param(
            f"width\n{10**400}\n", "line 2: parameter 'width' must be in [8, 32] with", id="too large for a float"
        ),
        ("kind\nc\n", "line 2: parameter 'kind' must be one of 'a', 'b', None, True, 3, not 'c'"),
        ("lr,witdh\n0.1,8\n", "line 2: parameter 'witdh' does not exist in Wide; did you mean 'width'?"),
        ("lr,lr\n0.1,0.1\n", "line 1: column 'lr' appears twice"),
        ("lr;width\n0.1;8\n", "line 1: the columns are separated by ';'; separate them by ','"),
        ("lr,\n0.1,\n", "line 1: a column has no name"),
        ("lr,width\n0.1\n", "line 2: the line has 1 cell, but line 1 has 2"),
        ("lr,kind\n0.1,a\n0.2,a\n1e-1,a\n", "line 4 repeats line 2"),
        ("lr,kind\n,\n", "line 2: no parameter has a value"),
        ("lr\n", "contains no configuration"),
        ("", "contains no configuration"),
    ],
)
def test_a_mistake_in_a_table_is_one_line_with_its_location(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SearchError) as caught:
        rows(tmp_path, text)
    assert words in str(caught.value)
    assert str(caught.value).startswith("--enqueue ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("rows.txt", "", "unknown file type '.txt'; use .csv or .jsonl"),
        ("rows.jsonl", "{", "line 1: invalid JSON"),
        ("rows.jsonl", "[1]", "line 1: [1] is not an object"),
        ("rows.jsonl", '{"lr": "0.1"}', "line 1: parameter 'lr' must be a number, not '0.1'"),
        ("rows.jsonl", '{"lr": 0.1, "lr": 0.2}', "line 1: invalid JSON: the key 'lr' appears twice; remove one"),
        pytest.param("rows.jsonl", "[" * 100_000, "line 1: invalid JSON: maximum recursion depth exceeded", id="deep"),
    ],
)
def test_an_unreadable_table_is_an_error_of_one_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(SearchError) as caught:
        rows(tmp_path, text, name)
    assert words in str(caught.value)
    (tmp_path / "large.csv").touch()
    os.truncate(tmp_path / "large.csv", 10**9)
    with pytest.raises(SearchError, match=r"large\.csv has 1,000,000,000 bytes, more than 100,000,000; split the file"):
        read_rows(tmp_path / "large.csv", Wide())
    with pytest.raises(SearchError, match=r"nowhere\.csv cannot be read"):
        read_rows(tmp_path / "nowhere.csv", Wide())


def test_the_api_accepts_a_dictionary_or_a_list() -> None:
    assert fixed(read_rows({"lr": 0.1}, Wide())) == [{"lr": 0.1}]
    found = read_rows([{"lr": 0.1}, {"width": 8}], Wide())
    assert fixed(found) == [{"lr": 0.1}, {"width": 8}]
    assert [trial.user_attrs[ORIGIN] for trial in found] == ["params, configuration 1", "params, configuration 2"]
    with pytest.raises(SearchError, match=r"params: configuration 2: parameter 'lr' must be in \[0.01, 1.0\], not 5"):
        read_rows([{"lr": 0.1}, {"lr": 5}], Wide())


def test_a_study_starts_with_the_default_and_then_enqueued_trials(database_url: str, tmp_path: Path) -> None:
    given = rows(tmp_path, "lr,width,kind\n0.5,8,a\n0.1,24,b\n")  # the second is the default
    study = study_of(database_url, Started(), given)
    trials = study.trials()
    assert fixed(trials) == [{"lr": 0.1, "width": 24, "kind": "b"}, {"lr": 0.5, "width": 8, "kind": "a"}]
    assert [trial.user_attrs[ORIGIN] for trial in trials] == ["default", "rows.csv, line 2"]
    study_of(database_url, Started(), given)
    assert len(study.trials()) == 2, "joined, it has each once"


def test_no_default_trial_without_a_default_or_on_request(database_url: str) -> None:
    assert study_of(database_url, Wide(), name="none").trials() == []
    assert study_of(database_url, Started(), name="off", default_first=False).trials() == []
    grid = {"name": "grid", "search_space": {"lr": [0.1], "width": [8], "kind": ["a"]}}
    assert study_of(database_url, Started(), name="grid", sampler=grid).trials() == []


def test_a_default_outside_of_the_space_is_rejected_before_creation(database_url: str) -> None:
    with pytest.raises(ObjectiveError, match=r"Misspelt.defaults: parameter 'knid' .*--no-default-first"):
        study_of(database_url, Misspelt())
    with pytest.raises(SearchError, match="no study 's'"):
        load_study(open_storage(database_url, application_name="test"), "s")
    assert study_of(database_url, Misspelt(), default_first=False).trials() == []


@pytest.mark.parametrize("name", BUILTIN)
def test_the_defaults_of_built_in_objectives_are_in_their_spaces(name: str) -> None:
    objective = load_objective(name)
    params = default_params(objective)
    assert params is not None
    assert params == dict(objective.defaults), "all parameters are named"


def test_concurrent_equal_enqueues_create_one_trial(database_url: str, tmp_path: Path) -> None:
    study_of(database_url, Wide())
    given = rows(tmp_path, "lr\n0.1\n0.2\n0.5\n")
    start, made = threading.Barrier(4), []

    def work() -> None:
        study = load_study(open_storage(database_url, application_name="test"), "s")
        start.wait()
        made.append(enqueue(study, given))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [0, 0, 0, 3]
    study = load_study(open_storage(database_url, application_name="test"), "s")
    assert fixed(study.trials()) == [{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.5}]
    longer = rows(tmp_path, "lr\n0.1\n0.2\n0.5\n0.7\n")
    assert enqueue(study, longer) == 1


def test_enqueue_writes_nothing_if_the_budget_is_too_small(database_url: str, tmp_path: Path) -> None:
    given = rows(tmp_path, "lr\n0.1\n0.2\n0.5\n")
    with pytest.raises(SearchError, match="3 trials exceed the budget of 2"):
        study_of(database_url, Wide(), given, n_trials=2)
    study = study_of(database_url, Wide(), n_trials=2)
    with pytest.raises(SearchError, match="3 trials exceed the budget of 2"):
        enqueue(study, given)
    with pytest.raises(SearchError, match="4 trials exceed the budget of 3"):
        extend_study(study, "+1", rows(tmp_path, "lr\n0.1\n0.2\n0.5\n0.6\n"))
    assert study.trials() == []
    assert study.budget == 2
    done = extend_study(study, "+1", given)
    assert (done.new_budget, done.enqueued_trials, study.budget) == (3, 3, 3)
    assert len(study.trials()) == 3


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ({"lr": [0.1]}, "sampler.search_space: parameter 'width' of Wide is missing"),
        ({"lr": [5.0], "width": [8], "kind": ["a"]}, "sampler.search_space: parameter 'lr' must be in"),
        ({"lr": [0.1], "width": [8], "kind": ["a"]}, "--trials 50: grid has 1 configuration and runs each once"),
    ],
)
def test_mistakes_in_a_grid_are_reported_before_its_size(database_url: str, grid: dict[str, Any], words: str) -> None:
    settings = {"sampler": {"name": "grid", "search_space": grid}, "n_trials": 50}
    check_settings({"objective": "x.py", **settings})
    with pytest.raises(SearchError, match=re.escape(words)):
        study_of(database_url, Wide(), **settings)
    assert open_storage(database_url, application_name="test").get_all_studies() == []


def test_a_grid_rejects_enqueued_configurations(database_url: str, tmp_path: Path) -> None:
    grid = {"name": "grid", "search_space": {"lr": [0.1], "width": [8], "kind": ["a"]}}
    with pytest.raises(SearchError, match="not available with sampler grid; extend"):
        study_of(database_url, Wide(), rows(tmp_path, "lr\n0.1\n"), sampler=grid)
