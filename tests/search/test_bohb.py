"""BOHB for several metrics with pruned trials: TPE on complete trials, and some random suggestions."""

from __future__ import annotations

from collections.abc import Sequence

import optuna
import pytest
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import TrialState, create_trial

from hpsearch.search.samplers.bohb import MIN_COMPLETE, RANDOM_FRACTION, BOHBSampler, _CompleteTrials
from hpsearch.search.samplers.known_trials import make_sampler_study_view
from hpsearch.storage.attributes import INFEASIBLE
from tests.factories import X

COMPLETE, PRUNED, RUNNING = TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING
TWO = ("maximize", "minimize")

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")  # of `group`


def study_of(directions: Sequence[str], states: Sequence[TrialState]) -> optuna.Study:
    """Return a study in which each complete trial has another value, and pruned trials have intermediate values."""
    study = optuna.create_study(directions=directions)
    for number, state in enumerate(states):
        x = ((number * 7) % 19) / 19
        pruned = {"intermediate_values": {0: x}} if state == PRUNED else {}
        values = [x, x * x][: len(directions)] if state == COMPLETE else None
        study.add_trial(create_trial(state=state, values=values, params={"x": x}, distributions={"x": X}, **pruned))
    return study


def suggested(study: optuna.Study, sampler: BaseSampler) -> float:
    """Return the next suggestion without a trace in the study."""
    sampler_of, study.sampler = study.sampler, sampler
    trial = study.ask()
    found = trial.suggest_float("x", 0.0, 1.0)
    study.tell(trial, state=TrialState.FAIL)
    study.sampler = sampler_of
    return found


@pytest.mark.parametrize(
    "study",
    [study_of(["minimize"], [COMPLETE, PRUNED] * 12), study_of(TWO, [COMPLETE] * 24)],
    ids=["one metric", "none was pruned"],
)
def test_bohb_equals_tpe_for_one_metric_or_without_pruned_trials(study: optuna.Study) -> None:
    options = {"multivariate": True, "group": True, "constant_liar": True}
    for seed in range(8):
        assert suggested(study, BOHBSampler(seed=seed, **options)) == suggested(study, TPESampler(seed=seed, **options))


def test_a_fraction_of_the_trials_is_random() -> None:
    study = study_of(TWO, [COMPLETE, PRUNED] * 12)
    drawn = [suggested(study, BOHBSampler(seed=seed)) == suggested(study, RandomSampler(seed)) for seed in range(200)]
    assert sum(drawn) / 200 == pytest.approx(RANDOM_FRACTION, abs=0.08)


def test_values_of_pruned_trials_are_ignored_once_enough_are_complete() -> None:
    """The sampler ignores the values of other trials, but uses running, diverged and infeasible ones."""
    states = [COMPLETE, PRUNED] * MIN_COMPLETE + [RUNNING]
    study = study_of(TWO, states)
    shape = {"state": PRUNED, "params": {"x": 0.5}, "distributions": {"x": X}, "intermediate_values": {0: 0.5}}
    diverged = create_trial(**shape, user_attrs={INFEASIBLE: "diverged"})
    large = create_trial(**shape, constraints={"model_mb": 3.0})
    slow_to_learn = create_trial(**shape, constraints={"accuracy": 0.4})
    for trial in (diverged, large, slow_to_learn):
        study.add_trial(trial)
    numbers = {trial.number for trial in _CompleteTrials(study)._get_trials(states=(COMPLETE, PRUNED, RUNNING))}
    assert numbers == {*range(0, 2 * MIN_COMPLETE, 2), 2 * MIN_COMPLETE, 2 * MIN_COMPLETE + 1, 2 * MIN_COMPLETE + 2}

    few = study_of(TWO, states[2:])
    assert len(_CompleteTrials(few)._get_trials(states=(COMPLETE, PRUNED, RUNNING))) == len(states) - 2


def test_pruned_trials_do_not_matter_with_enough_complete_ones() -> None:
    states = [COMPLETE] * MIN_COMPLETE + [PRUNED]
    seeds = [seed for seed in range(12) if not BOHBSampler(seed=seed)._is_random]
    few, many = study_of(TWO, states), study_of(TWO, states + [PRUNED] * 8)
    assert [suggested(few, BOHBSampler(seed=s)) for s in seeds] == [suggested(many, BOHBSampler(seed=s)) for s in seeds]
    assert any(
        suggested(few, BOHBSampler(seed=s)) != suggested(make_sampler_study_view(few), TPESampler(seed=s))
        for s in seeds
    )
