"""TPE and GP compare trials after equal numbers of epochs: a longer training is not taken for a better one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import optuna
import pytest
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpsearch.search.pruners.study_pruner import StudyPruner
from hpsearch.search.samplers.bohb import RANDOM_FRACTION, EqualEpochsGPSampler, EqualEpochsTPESampler
from hpsearch.search.samplers.equal_epochs import MIN_COMPARED, EqualEpochsView, choose_step
from hpsearch.search.samplers.known_trials import make_sampler_study_view
from hpsearch.storage.attributes import INFEASIBLE
from hpsearch.storage.trials.finishing import Outcome
from tests.factories import X
from tests.search.sampling.support import Worker

COMPLETE, PRUNED, RUNNING, WAITING = TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING, TrialState.WAITING
TWO = ("maximize", "minimize")
TPE_OPTIONS = {"multivariate": True, "group": True, "constant_liar": True}

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")  # of `group`


def add(study: optuna.Study, state: TrialState, curve: Sequence[float], *, x: float = 0.5, **shape: object) -> int:
    best = (max if study.direction == optuna.study.StudyDirection.MAXIMIZE else min)(curve, default=None)
    value = best if state == COMPLETE else None
    values = dict(enumerate(curve))
    kind = {"params": {"x": x}, "distributions": {"x": X}, "intermediate_values": values}
    study.add_trial(create_trial(state=state, value=value, **kind, **shape))
    return len(study.trials) - 1


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
    trial_id = study._storage.create_new_trial(study._study_id)  # `ask` would take a paused trial
    found = optuna.Trial(study, trial_id).suggest_float("x", 0.0, 1.0)
    study._storage.set_trial_state_values(trial_id, TrialState.FAIL)
    study.sampler = sampler_of
    return found


def shown(study: optuna.Study, least: int = MIN_COMPARED) -> dict[int, FrozenTrial]:
    return {trial.number: trial for trial in EqualEpochsView(study, least)._get_trials()}


@pytest.mark.parametrize(
    ("last_steps", "least", "expected"),
    [([8, 8, 2, 2, 0], 2, 8), ([8, 8, 2, 2, 0], 3, 2), ([8, 8, 2, 2, 0], 5, 0), ([8, 2], 3, 0), ([-1, -1, 4], 2, 0)],
)
def test_the_step_is_the_last_one_that_enough_trials_have_reached(
    last_steps: list[int], least: int, expected: int
) -> None:
    assert choose_step(last_steps, least) == expected


def test_trials_have_their_best_values_after_the_same_epoch() -> None:
    study = optuna.create_study(direction="maximize")
    full = add(study, COMPLETE, [0.1, 0.5, 0.4, 0.9])
    pruned = add(study, PRUNED, [0.3, 0.2, 0.1])
    early = add(study, PRUNED, [0.8])
    running = add(study, RUNNING, [0.1, 0.6, 0.7, 0.8])
    new = add(study, RUNNING, [0.9])
    diverged = add(study, PRUNED, [0.7, math.nan], user_attrs={INFEASIBLE: True})
    found = shown(study, 3)
    assert {number: trial.state for number, trial in found.items()} == {
        **dict.fromkeys((full, pruned, running, diverged), COMPLETE),
        new: RUNNING,
    }
    assert early not in found
    assert [found[number].value for number in (full, pruned, running)] == [0.5, 0.3, 0.7]
    assert found[diverged].value == 0.3
    assert study.trials[pruned].state == PRUNED


def test_at_least_one_trial_more_than_parameters_is_compared() -> None:
    study = optuna.create_study()
    names = [f"x{index}" for index in range(12)]
    kind = {"params": dict.fromkeys(names, 0.5), "distributions": dict.fromkeys(names, X)}
    for number in range(20):
        epochs = 4 if number < 12 else 1
        study.add_trial(create_trial(state=PRUNED, **kind, intermediate_values=dict.fromkeys(range(epochs), 1.0)))
    assert len(shown(study)) == 20
    study.add_trial(create_trial(state=PRUNED, **kind, intermediate_values=dict.fromkeys(range(4), 1.0)))
    assert len(shown(study)) == 13


def test_diverged_trials_have_the_largest_violations() -> None:
    """Optuna's GP sampler raises an error if a trial lacks a constraint."""
    study = optuna.create_study(direction="maximize")
    kept = add(study, PRUNED, [0.5], constraints={"mb": -1.0})
    large = add(study, PRUNED, [0.6], constraints={"mb": 2.0})
    diverged = add(study, PRUNED, [math.nan], user_attrs={INFEASIBLE: True})
    unknown = add(study, PRUNED, [0.7])
    found = shown(study, 1)
    assert {number: trial.constraints for number, trial in found.items()} == {
        kept: {"mb": -1.0},
        large: {"mb": 2.0},
        diverged: {"mb": 2.0},
    }
    assert unknown not in found


SAMPLERS: dict[str, tuple[Callable[[int], BaseSampler], Callable[[int], BaseSampler]]] = {
    "tpe": (
        lambda seed: EqualEpochsTPESampler(seed=seed, **TPE_OPTIONS),
        lambda seed: TPESampler(seed=seed, **TPE_OPTIONS),
    ),
    "gp": (lambda seed: EqualEpochsGPSampler(seed=seed), lambda seed: GPSampler(seed=seed)),
}


@pytest.mark.parametrize(
    ("name", "directions"),
    [("tpe", ["minimize"]), ("tpe", TWO), ("gp", ["minimize"]), pytest.param("gp", TWO, marks=pytest.mark.soak)],
    ids=["tpe, one metric", "tpe, two metrics", "gp, one metric", "gp, two metrics"],
)
def test_without_pruned_trials_the_suggestions_are_those_of_optuna(name: str, directions: Sequence[str]) -> None:
    ours, optunas = SAMPLERS[name]
    study = study_of(directions, [COMPLETE] * 24)
    for seed in range(3):
        assert suggested(study, ours(seed)) == suggested(study, optunas(seed))


@pytest.mark.parametrize("state", [PRUNED, WAITING], ids=["pruned", "paused"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_trial_that_trained_longer_is_not_taken_for_a_better_one(name: str, state: TrialState) -> None:
    """The nine trials with the most epochs are poor, and those near 0.8 are best after the first epoch."""
    study = optuna.create_study(direction="maximize")
    for number in range(9):
        add(study, state, [0.3] * 9, x=0.16 + 0.01 * number)
    for number in range(60):
        x = number / 59
        add(study, state, [0.5 - abs(x - 0.8)], x=x)
    view, (ours, optunas) = make_sampler_study_view(study), SAMPLERS[name]
    found = [abs(suggested(view, ours(seed)) - 0.8) for seed in range(8)]
    assert max(found) < 0.3
    assert max(abs(suggested(view, optunas(seed)) - 0.8) for seed in range(8)) > 0.4


def test_a_fraction_of_the_trials_is_random_only_with_several_metrics() -> None:
    for directions, fraction in ((TWO, RANDOM_FRACTION), (["minimize"], 0.0)):
        study = study_of(directions, [COMPLETE, PRUNED] * 12)
        drawn = [
            suggested(study, EqualEpochsTPESampler(seed=seed)) == suggested(study, RandomSampler(seed))
            for seed in range(200)
        ]
        assert sum(drawn) / 200 == pytest.approx(fraction, abs=0.08)


def test_pruned_trials_do_not_matter_with_enough_complete_ones() -> None:
    states = [COMPLETE] * MIN_COMPARED + [PRUNED]
    seeds = range(8)
    for directions in (["minimize"], TWO):
        few, many = study_of(directions, states), study_of(directions, states + [PRUNED] * 8)
        samplers = [EqualEpochsTPESampler(seed=seed) for seed in seeds]
        guided = [seed for seed in seeds if len(directions) == 1 or not samplers[seed]._is_random]
        assert [suggested(few, EqualEpochsTPESampler(seed=s)) for s in guided] == [
            suggested(many, EqualEpochsTPESampler(seed=s)) for s in guided
        ]


def search(url: str, sampler: Mapping[str, object]) -> tuple[list[dict[str, object]], list[TrialState]]:
    """Run 30 trials of 9 epochs with successive halving; return their parameters and states."""

    def plane(trial: optuna.Trial) -> None:
        trial.suggest_float("lr", 1e-4, 1.0, log=True)
        trial.suggest_float("momentum", 0.0, 1.0)

    pruner = {"name": "successive_halving", "reduction_factor": 4}
    worker = Worker(url, plane, name=str(sampler["name"]), sampler=sampler, pruner=pruner, epochs=9, n_trials=30)
    worker.study = make_sampler_study_view(worker.study)
    decide = StudyPruner(worker.spec, worker.storage, worker.study._study_id)
    found = []
    for _ in range(30):
        claim = worker.claim()
        params = worker.suggest(claim)
        quality = -abs(math.log10(float(str(params["lr"]))) + 2) - abs(float(str(params["momentum"])) - 0.9)
        values = {}
        for epoch in range(9):
            values[epoch] = quality - 1 / (epoch + 1)
            worker.claims.report(claim, epoch, values[epoch])
            if epoch < 8 and decide(worker.storage.get_trial(claim.trial_id), values).prune:
                worker.claims.finish_attempt(claim, Outcome.PRUNED, value=values[epoch])
                break
        else:
            worker.claims.finish_attempt(claim, Outcome.COMPLETE, value=values[8])
        found.append(params)
    return found, [trial.state for trial in worker.study.get_trials(deepcopy=False)]


@pytest.mark.soak
def test_gp_with_a_pruner_is_not_random_search(database_url: str) -> None:
    """Optuna's sampler would need ten complete trials before its first suggestion."""
    startup = 10
    found, states = search(database_url, {"name": "gp", "n_startup_trials": startup})
    drawn, _ = search(database_url, {"name": "random"})
    assert states[:startup].count(COMPLETE) < startup // 2
    assert found[:startup] == drawn[:startup]
    assert not [params for params in found[startup:] if params in drawn]
    near = [abs(math.log10(float(str(params["lr"]))) + 2) for params in found]
    assert statistics.median(near[-10:]) < 0.5 * statistics.median(near[:10])
