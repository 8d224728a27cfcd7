"""Studies with several metrics or constraints, without any training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import optuna
import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpsearch.search.spec.spec import parse_spec
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.storage.attributes import SPEC, VIOLATIONS
from hpsearch.storage.study_storage.storage import PostgresStorage
from tests.factories import SPACE, WAYS


def trial(
    number: int,
    values: Sequence[float],
    state: TrialState = TrialState.COMPLETE,
    *,
    broken: Sequence[str] = (),
    over: Mapping[str, float] | None = None,
) -> FrozenTrial:
    """Return a trial with these values; its last epoch has the first. `over` is Optuna's constraints attribute."""
    return create_trial(
        state=state,
        values=list(values),
        params={"lr": 1e-3 * (number + 1), "kind": ("cnn", "mlp")[number % 2]},
        distributions=SPACE,
        intermediate_values={0: values[0] / 2, 1: values[0]},
        user_attrs={VIOLATIONS: list(broken)} if broken else {},
        system_attrs={f"constraints:{name}": by for name, by in (over or {}).items()},
    )


def study_of(
    storage: PostgresStorage,
    trials: Sequence[FrozenTrial],
    *,
    ways: Mapping[str, str] = WAYS,
    constraints: Mapping[str, str] | None = None,
    name: str = "s",
) -> StoredStudy:
    """Create a study of such trials; in their first epochs the other metrics are twice the final values."""
    made = optuna.create_study(study_name=name, directions=list(ways.values()), storage=storage)
    spec = {"name": name, "objective": "digits", "n_trials": len(trials), "epochs": 2, "directions": dict(ways)}
    spec |= {"metric": next(iter(ways)), "direction": next(iter(ways.values()))} if len(ways) == 1 else {}
    stored = parse_spec(spec | ({"constraints": dict(constraints)} if constraints else {}))
    storage.set_study_user_attr(made._study_id, SPEC, stored.model_dump())
    storage.import_trials(made._study_id, list(trials))
    study = load_study(storage, name)
    if stored.is_multi_objective:
        rows = [
            {"trial_id": each._trial_id, "step": step, "metrics": [value, *(v * (2 - step) for v in each.values[1:])]}
            for each in study.trials()
            for step, value in each.intermediate_values.items()
            if all(map(math.isfinite, each.values))
        ]
        insert = "INSERT INTO hpsearch_epoch_values (trial_id, step, metrics) VALUES (:trial_id, :step, :metrics)"
        with storage.engine.begin() as connection:
            connection.execute(sa.text(insert), rows)
    return study


# Two metrics: 0 and 1 are the Pareto front, 2 is dominated, 3 is better than all but infeasible, 4 was pruned.
BOUNDS = {"latency_ms": "<= 5", "model_mb": "<= 10"}
TRIALS = (
    trial(0, (0.9, 4.0)),
    trial(1, (0.7, 1.0)),
    trial(2, (0.6, 4.5)),
    trial(3, (0.95, 0.5), broken=["model_mb 12 is not <= 10"], over={"model_mb": 2.0, "latency_ms": -4.5}),
    trial(4, (0.5, 6.0), TrialState.PRUNED, over={"model_mb": -1.0, "latency_ms": 1.0}),
)
