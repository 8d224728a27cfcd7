"""A search without training, and finalists that a simulated worker trains with synthetic values."""

from __future__ import annotations

from collections.abc import Callable

import optuna
from optuna.trial import FrozenTrial, create_trial

from hpsearch.search.finalists import Finalists, read_finalists
from hpsearch.search.spec.spec import parse_spec
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.storage.attributes import INFEASIBLE, REFIT, RESPLIT_SCORE, SPEC, VIOLATIONS
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.trials.claim_results import Claim, NoTrialAvailable
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from tests.factories import SPACE, WAYS, spec_of

Say = Callable[..., str]


VALUES = [0.5, 0.9, 0.7, 0.9, 0.8]


def params(number: int) -> dict[str, object]:
    return {"lr": 1e-2 / (number + 3), "kind": "cnn"}


def finished(number: int, value: float, **changes: object) -> FrozenTrial:
    return create_trial(value=value, params={**params(number), **changes}, distributions=SPACE)


def search(
    storage: PostgresStorage, name: str, trials: list[FrozenTrial], *, budget: int | None = None, **settings: object
) -> StoredStudy:
    study = optuna.create_study(study_name=name, direction="maximize", storage=storage)
    spec = spec_of(name="median").model_dump()
    spec |= {"name": name, "n_trials": len(trials) if budget is None else budget, **settings}
    storage.set_study_user_attr(study._study_id, SPEC, spec)
    storage.import_trials(study._study_id, trials)
    return load_study(storage, name)


def search_several(
    storage: PostgresStorage, name: str, trials: list[FrozenTrial], *, ways: dict[str, str] = WAYS, **settings: object
) -> StoredStudy:
    """Create a finished multi-objective search."""
    study = optuna.create_study(study_name=name, directions=list(ways.values()), storage=storage)
    base = {"name": name, "objective": "digits", "n_trials": len(trials), "epochs": 4}
    spec = parse_spec({**base, "directions": ways, **settings})
    storage.set_study_user_attr(study._study_id, SPEC, spec.model_dump())
    storage.import_trials(study._study_id, trials)
    return load_study(storage, name)


def ended(number: int, *values: float, like: int | None = None, broken: str | None = None) -> FrozenTrial:
    """Return a multi-objective trial, optionally with the parameters of trial `like`, and optionally infeasible."""
    given = params(number if like is None else like)
    attrs = {} if broken is None else {VIOLATIONS: [broken]}
    return create_trial(values=values, params=given, distributions=SPACE, user_attrs=attrs)


def train(
    chosen: StoredStudy,
    value_of: Callable[[int, int], float | list[float] | None],
    *,
    trials: int | None = None,
    fresh: dict[str, object] | None = None,
) -> None:
    """Simulate a worker for waiting trials with synthetic values; None diverges; `fresh` is stored with each."""
    claims = Claims(chosen.storage.engine, chosen.study_id, worker="host:1")
    of = chosen.spec.finalists_of
    assert of is not None
    done = 0
    while trials is None or done < trials:
        claim = claims.claim()
        if isinstance(claim, NoTrialAvailable):
            break
        assert isinstance(claim, Claim)
        value = value_of(*of.get_trial_and_seed(claim.number))
        if value is None:
            claims.finish_attempt(claim, Outcome.INFEASIBLE, attrs={INFEASIBLE: True})
        else:
            claims.finish_attempt(
                claim, Outcome.COMPLETE, value=value, attrs={} if fresh is None else {RESPLIT_SCORE: fresh}
            )
        done += 1


def train_runs(made: StoredStudy, losses: list[float | None], *, value: float | list[float] = 1.0) -> None:
    """Simulate a worker for the next trials of a refit with synthetic training losses; None diverges."""
    claims = Claims(made.storage.engine, made.study_id, worker="host:1")
    for loss in losses:
        claim = claims.claim()
        assert isinstance(claim, Claim)
        if loss is None:
            claims.finish_attempt(claim, Outcome.INFEASIBLE, attrs={INFEASIBLE: True})
        else:
            claims.finish_attempt(claim, Outcome.COMPLETE, value=value, attrs={REFIT: {"train_loss": loss}})


def table(study: StoredStudy) -> Finalists:
    found = read_finalists(study)
    assert found is not None
    return found
