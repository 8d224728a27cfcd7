"""A study stores the data of earlier studies when it is created, and rejects unusable ones in one line."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState, create_trial

from hpsearch import load_objective
from hpsearch.search.cli import run_command
from hpsearch.search.errors import SearchError
from hpsearch.search.freeze_thaw.warm_start import WARM_START_KEY
from hpsearch.search.samplers.suggest import make_sampler
from hpsearch.search.spec.spec import parse_spec
from hpsearch.search.study.create import create_or_join
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.storage.attributes import SPEC
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage

LR = FloatDistribution(1e-4, 1e-1, log=True)


@pytest.fixture
def storage(database_url: str) -> PostgresStorage:
    return open_storage(database_url, application_name="test")


@pytest.fixture
def objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert run_command(["init", "wine.py"]) == 0
    return load_objective("wine.py")


def made(storage: PostgresStorage, objective, name: str, **settings: object) -> StoredStudy:
    given = {
        "objective": "wine.py",
        "name": name,
        "sampler": {"name": "freeze_thaw", "random_fraction": 0},
        "default_first": False,
        **settings,
    }
    return create_or_join(storage, given, objective, inspect=lambda *_: {})[0]


def filled(storage: PostgresStorage, study: StoredStudy, count: int = 12, name: str = "lr", **shape: object) -> None:
    for place in range(count):
        params = {name: 10 ** (-4 + 3 * place / max(count, 1))}
        values = {epoch: 0.9 - 0.1 * abs(place - 8) for epoch in range(3)}
        kind = {"state": TrialState.PRUNED, "params": params, "distributions": {name: LR}, **shape}
        storage.create_new_trial(study.study_id, create_trial(intermediate_values=values, **kind))


def kept(study: StoredStudy) -> dict:
    return study.storage.get_study_system_attrs(study.study_id)[WARM_START_KEY]


def test_warm_start_data_are_copied_into_the_new_study(storage, objective):
    first = made(storage, objective, "first")
    filled(storage, first)
    filled(storage, first, 1, state=TrialState.RUNNING)
    second = made(storage, objective, "second", warm_start="first")
    assert second.spec.warm_start == ["first"]
    data = kept(second)
    assert [number for _, number, *_ in data["trials"]].count(12) == 1, (
        "a running trial counts with its reported values"
    )

    def suggestions() -> list[float]:
        found = []
        for number in range(2):
            study = optuna.load_study(study_name="second", storage=storage)
            which = {"study_seed": 0, "trial_number": number, "epochs": 3}
            study.sampler = make_sampler(second.spec.sampler, **which)
            found.append(study.ask().suggest_float("lr", 1e-4, 1e-1, log=True))
        return found

    before = suggestions()
    assert 10**-2.6 < before[0] < 10**-1.4, "the first is chosen: the best was trial 8, at 0.01"
    storage.delete_study(first.study_id)
    again = made(storage, objective, "second")
    assert again.spec == made(storage, objective, "second", warm_start=["first"]).spec
    assert kept(again) == data
    with pytest.raises(SearchError, match="warm_start: \\['first'\\] -> \\['other'\\]"):
        made(storage, objective, "second", warm_start=["other"])
    filled(storage, made(storage, objective, "cold"))
    with pytest.raises(SearchError, match="warm_start: None"):
        made(storage, objective, "cold", warm_start=["second"])


def test_unusable_earlier_studies_are_rejected_before_creation(storage, objective):
    filled(storage, made(storage, objective, "other_way", direction="minimize"))
    filled(storage, made(storage, objective, "other_space"), name="depth")
    filled(storage, made(storage, objective, "out_of_range"), 3, params={"lr": 7.0}, distributions={
        "lr": FloatDistribution(1.0, 9.0)})  # fmt: skip
    made(storage, objective, "empty")
    cases = {
        "nope": "--warm-start nope: no study 'nope'",
        "empty": "--warm-start empty: no trial has reported a value; run the study first",
        "other_way": "--warm-start other_way: this study is set to minimize .*; give a study with the same direction",
        "other_space": "--warm-start other_space: the study has none of the parameters of Wine",
        "out_of_range": "--warm-start out_of_range: no trial is in the new search space",
    }
    there = len(storage.get_all_studies())
    for name, words in cases.items():
        with pytest.raises(SearchError, match=words) as caught:
            made(storage, objective, "new", warm_start=[name])
        assert "\n" not in str(caught.value)
    assert len(storage.get_all_studies()) == there


def test_finalists_cannot_be_or_have_earlier_studies(storage, objective):
    first = made(storage, objective, "first")
    of = {"study": "first", "study_id": first.study_id, "top": 1, "trials": [0], "seeds": [1]}
    spec = parse_spec({**first.spec.model_dump(), "name": "first.finalists", "finalists_of": of})
    storage.create_filled_study(
        [optuna.study.StudyDirection.MAXIMIZE], "first.finalists", user_attrs={SPEC: spec.model_dump()}, trials=[]
    )
    with pytest.raises(SearchError, match="holds the finalists of 'first'; give --warm-start first instead"):
        made(storage, objective, "new", warm_start=["first.finalists"])
    assert load_study(storage, "first.finalists").spec.warm_start is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--sampler", "tpe", "--warm-start", "a"],
            "--warm-start is not available with the sampler tpe; use --sampler freeze_thaw",
        ),
        (["--sampler", "gp", "--warm-start", "a"], "--warm-start is not available with the sampler gp"),
        (["--sampler", "freeze_thaw", "--warm-start", "a,a"], "--warm-start names a twice"),
        (["--sampler", "freeze_thaw", "--warm-start", "a,"], "'' cannot be the name of a study"),
        (["--sampler", "freeze_thaw", "--name", "a", "--warm-start", "b,a"], "a is the study itself"),
    ],
)
def test_bad_input_is_an_error_of_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", "digits", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith("hpsearch: --warm-start")
    assert said.count("\n") == 1, said
