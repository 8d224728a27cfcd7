"""A worker that only suggests, and small search spaces."""

from __future__ import annotations

from collections.abc import Callable

import optuna

from hpsearch import Objective, TrainConfig
from hpsearch.search.samplers.suggest import suggest
from hpsearch.search.spec.spec import StudySpec, parse_spec
from hpsearch.storage.attributes import SPEC
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome

Space = Callable[[optuna.Trial], object]


class Small(Objective):
    """An objective that only suggests configurations."""

    def __init__(self, space: Space) -> None:
        self.space = space

    def suggest(self, trial):
        self.space(trial)
        return TrainConfig(lr=0.1)

    def data(self, seed):
        raise NotImplementedError

    def model(self, config, train):
        raise NotImplementedError


def nine(trial: optuna.Trial) -> None:
    trial.suggest_categorical("optimizer", ["adam", "sgd", "lion"])
    trial.suggest_int("width", 8, 24, step=8)


def branches(trial: optuna.Trial) -> None:
    """Suggest one of five configurations, or one with a number that is almost never equal twice."""
    kind = trial.suggest_categorical("kind", ["tree", "line", "curve"])
    if kind == "tree":
        trial.suggest_int("depth", 1, 3)
    elif kind == "line":
        trial.suggest_float("slope", 0.5, 1.0, step=0.5)
    else:
        trial.suggest_float("bend", 0.0, 1.0)


class Worker:
    """A worker's view of a study, with its own connections."""

    def __init__(self, url: str, space: Space = nine, *, name: str = "s", **settings: object) -> None:
        values = {"objective": "x", "metric": "accuracy", "direction": "maximize", "n_trials": 100, "epochs": 2}
        self.spec: StudySpec = parse_spec({"name": name, **values, **settings})
        self.storage: PostgresStorage = open_storage(url, application_name="test")
        self.study = optuna.create_study(
            study_name=name, direction="maximize", storage=self.storage, load_if_exists=True
        )
        self.storage.set_study_user_attr(self.study._study_id, SPEC, self.spec.model_dump())
        self.claims = Claims(self.storage.engine, self.study._study_id, worker="w")
        self.objective = Small(space)

    def claim(self) -> Claim:
        claim = self.claims.claim()
        assert isinstance(claim, Claim)
        return claim

    def suggest(self, claim: Claim) -> dict[str, object]:
        suggest(self.objective, self.study, claim, self.spec)
        return self.storage.get_trial(claim.trial_id).params

    def run(self, value: float = 1.0) -> dict[str, object]:
        claim = self.claim()
        params = self.suggest(claim)
        self.claims.finish_attempt(claim, Outcome.COMPLETE, value=value)
        return params


def distinct(configurations: list[dict[str, object]]) -> int:
    return len({tuple(sorted(params.items())) for params in configurations})
