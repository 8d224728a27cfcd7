"""The configuration of a checkpoint, which others can replace, does not reach the objective."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hpsearch import LoopObjective, TrainConfig
from hpsearch.search.errors import SearchError
from hpsearch.search.study.checkpoint_origin import replace_config
from tests.search.study.untrusted.support import Mine, make_trial


@dataclasses.dataclass
class Config:
    lr: float
    start: str = "zeros.pt"


class Loop(LoopObjective):
    name, metric, direction, epochs = "loop", "score", "maximize", 2

    def suggest(self, trial: Any) -> Config:
        return Config(trial.suggest_float("lr", 0.1, 1.0))

    def run(self, trial: Any) -> None:
        raise NotImplementedError


def test_the_objective_gets_its_own_configuration() -> None:
    forged = {"config": {"lr": 0.5, "model": {"start": "/elsewhere"}}, "epoch": 1}
    best = replace_config(Mine(), make_trial(0.5), forged)
    assert TrainConfig.from_dict(best["config"]) == TrainConfig(lr=0.5, model={"start": "zeros.pt", "tag": "trial-3"})
    assert best["epoch"] == 1
    loop = replace_config(Loop(), make_trial(0.5), {"config": {"lr": 0.5, "start": "/elsewhere", "more": 1}})
    assert loop["config"] == {"lr": 0.5, "start": "zeros.pt"}


def test_parameters_that_the_objective_does_not_suggest_any_more_are_an_error() -> None:
    with pytest.raises(SearchError, match=r"^trial 3: .*lr.* not 2\.0.*; restore the search space of the study$"):
        replace_config(Mine(), make_trial(2.0), {"config": {}})
