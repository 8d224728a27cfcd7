"""A pruning decision has a readable reason of one line, with the numbers that it depends on."""

from __future__ import annotations

import json
import math

import numpy as np
import optuna
import pytest
from optuna.trial import create_trial

from hpsearch.search.pruners.study_pruner import Decision, StoredOtherTrials, StudyPruner
from hpsearch.search.spec.spec import StudySpec
from tests.factories import spec_of


def decide(spec: StudySpec, finished: list[list[float]], curve: list[float]) -> Decision:
    """Return the decision after the last value of `curve`."""
    study = optuna.create_study(direction=spec.direction)
    for history in finished:
        study.add_trial(create_trial(value=0.0, intermediate_values=dict(enumerate(history))))
    trial = study.ask()
    for step, value in enumerate(curve):
        trial.report(value, step)
    frozen = study._storage.get_trial(trial._trial_id)
    return StudyPruner(spec, study._storage, study._study_id)(frozen, frozen.intermediate_values)


FINISHED = [[0.5, 0.8], [0.6, 0.9], [0.7, 1.0], [0.6, math.nan], [0.6]]


@pytest.mark.parametrize(
    ("pruner", "direction", "curve", "reason"),
    [
        (
            {"name": "median", "n_warmup_steps": 1},
            "maximize",
            [0.7, 0.2],
            "median pruner at epoch 2 of 20: best accuracy 0.7 is below 0.9, the median of 3 finished trials "
            "at that epoch",
        ),
        (
            {"name": "percentile", "n_warmup_steps": 1, "percentile": 50},
            "minimize",
            [1.5, 0.95],
            "percentile pruner at epoch 2 of 20: best accuracy 0.95 is above 0.9, which the best 50 % of 3 finished "
            "trials at that epoch reach",
        ),
        (
            {"name": "median", "n_warmup_steps": 0},
            "maximize",
            [math.nan],
            "median pruner at epoch 1 of 20: accuracy is NaN in all epochs",
        ),
        (
            {"name": "threshold", "lower": 0.25},
            "maximize",
            [0.125],
            "threshold pruner at epoch 1 of 20: accuracy 0.125 is below the threshold 0.25",
        ),
        (
            {"name": "threshold", "upper": 2.0},
            "minimize",
            [3.0],
            "threshold pruner at epoch 1 of 20: accuracy 3 is above the threshold 2",
        ),
        (
            {"name": "threshold", "upper": 2.0},
            "minimize",
            [math.nan],
            "threshold pruner at epoch 1 of 20: accuracy is NaN",
        ),
        (
            {"name": "successive_halving"},
            "maximize",
            [0.5, math.nan],
            "successive_halving pruner at epoch 2 of 20: accuracy is NaN",
        ),
        (
            {"name": "patient", "patience": 1, "min_delta": 0.1},
            "maximize",
            [0.2, 0.75, 0.5, 0.625],
            "patient pruner at epoch 4 of 20: best accuracy 0.625 is below 0.65 since epoch 3; best value before: 0.75",
        ),
        (
            {"name": "patient", "patience": 0, "wrapped": {"name": "median", "n_warmup_steps": 1}},
            "maximize",
            [0.7, 0.2],
            "median pruner at epoch 2 of 20: best accuracy 0.7 is below 0.9, the median of 3 finished trials "
            "at that epoch; best accuracy 0.2 is below 0.7 since epoch 2; best value before: 0.7",
        ),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_the_reason_of_a_pruning_decision(pruner, direction, curve, reason) -> None:
    decision = decide(spec_of(direction, **pruner), FINISHED, curve)
    assert decision.prune
    assert decision.reason == reason
    json.loads(json.dumps(decision.to_record()), parse_constant=pytest.fail)


def test_the_numbers_of_a_reason_are_stored_separately() -> None:
    decision = decide(spec_of(name="median", n_warmup_steps=1), FINISHED, [0.7, 0.2])
    assert decision.to_record() == {"pruner": "median", "epoch": 1, "value": 0.7, "cutoff": 0.9, "peers": 3}
    going_on = decide(spec_of(name="median", n_warmup_steps=1), FINISHED, [0.7, 0.95])
    assert (going_on.prune, going_on.reason, going_on.value, going_on.cutoff) == (False, "", 0.95, 0.9)


def test_pruning_starts_with_the_trial_that_completes_the_start_up() -> None:
    spec = spec_of(name="median", n_startup_trials=5, n_warmup_steps=0)
    assert not decide(spec, FINISHED[:4], [0.1]).prune
    assert decide(spec, FINISHED, [0.1]).prune


@pytest.mark.parametrize(
    "pruner",
    [{"name": "median", "n_warmup_steps": 3}, {"name": "percentile", "n_warmup_steps": 1, "interval_steps": 7}],
    ids=lambda pruner: pruner["name"],
)
def test_no_query_at_an_epoch_without_a_decision(pruner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredOtherTrials, "get_finished_trials", lambda _: pytest.fail("it read the finished trials"))
    assert not decide(spec_of(**pruner), FINISHED, [0.1, 0.1, 0.1]).prune


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_a_value_that_differs_from_the_cutoff_only_by_rounding_is_not_pruned(direction: str) -> None:
    """The median of 349 and 351 of 360 samples equals 350 of 360, but not in float32."""
    one, other, tied = (float(np.float32(n / 360)) for n in (349, 351, 350))
    assert tied != (one + other) / 2
    options = {"n_warmup_steps": 0, "n_startup_trials": 2, "n_min_trials": 2}
    spec = spec_of(name="median", direction=direction, **options)
    worse = tied - 1e-3 if direction == "maximize" else tied + 1e-3
    for value, is_pruned in ((tied, False), (tied - 1e-9, False), (tied + 1e-9, False), (worse, True)):
        assert decide(spec, [[one], [other]], [value]).prune == is_pruned
