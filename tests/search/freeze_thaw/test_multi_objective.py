"""The sampler on two metrics: it improves the Pareto front, satisfies constraints, and is deterministic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import optuna
import pytest
import torch
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpsearch.search.freeze_thaw.forecast_text import SUGGESTION_REASON_KEY, format_suggestion_reason
from hpsearch.search.freeze_thaw.gp_dataset import HYPERPARAMETERS_KEY
from hpsearch.search.freeze_thaw.multi_objective import (
    MultiObjectiveSuggester,
    build_secondary_curves,
    get_max_violation,
    log_expected_hypervolume_improvement,
    sample_non_dominated,
)
from hpsearch.search.freeze_thaw.sampler import FreezeThawSampler
from hpsearch.search.samplers.known_trials import SamplerStudyView, make_sampler_study_view
from hpsearch.storage.attributes import INFEASIBLE, VALUES
from hpsearch.storage.rungs.fronts import compute_hypervolume
from tests.factories import X
from tests.search.freeze_thaw.support import EPOCHS

MAXIMIZE = [True, False]


class Search:
    """A search for accurate, small models: `x` raises the size, and helps only at the right `y`."""

    def __init__(self, *, trials: int = 0, broken_above: float = math.inf) -> None:
        self.kept: dict[int, dict[int, list[float]]] = {}
        inner = optuna.create_study(directions=["maximize", "minimize"])
        self.study: SamplerStudyView = make_sampler_study_view(inner, lambda: self.kept)
        self.broken_above = broken_above
        for number in range(trials):
            self.run(RandomSampler, number)

    def run(self, sampler: Callable[[int], BaseSampler], number: int) -> tuple[float, float]:
        """Run a trial and return its configuration; every third trial completes."""
        self.study.sampler = sampler(number)
        self.study._thread_local.cached_all_trials = None
        trial_id = self.study._storage.create_new_trial(self.study._study_id)
        trial = optuna.Trial(self.study, trial_id)
        x, y = trial.suggest_float("x", 0.0, 1.0), trial.suggest_float("y", 0.0, 1.0)
        accuracy, size = math.sqrt(x) * math.exp(-30 * (y - 0.3) ** 2), x
        steps = range(EPOCHS) if number % 3 == 0 else range(1)
        self.kept[trial_id] = {step: [accuracy - 0.3 / (step + 1), size] for step in steps}
        for step in steps:
            self.study._storage.set_trial_intermediate_value(trial_id, step, self.kept[trial_id][step][0])
        trial.set_constraint("model_mb", size - self.broken_above if math.isfinite(self.broken_above) else -1.0)
        whole = len(steps) == EPOCHS
        state, values = (TrialState.COMPLETE, self.kept[trial_id][EPOCHS - 1]) if whole else (TrialState.WAITING, None)
        self.study._storage.set_trial_state_values(trial_id, state, values)
        return x, y

    def worth(self, configurations: Sequence[tuple[float, float]]) -> float:
        """Return the hypervolume of configurations after their last epoch."""
        losses = [(-math.sqrt(x) * math.exp(-30 * (y - 0.3) ** 2), x) for x, y in configurations]
        return compute_hypervolume(np.array(losses), (0.0, 1.0))


def curves(seed: int) -> FreezeThawSampler:
    return FreezeThawSampler(seed=seed, epochs=EPOCHS, random_fraction=0.0)


@pytest.mark.soak
def test_multi_objective_search_beats_random_search():
    def worth(sampler: Callable[[int], BaseSampler], start: int) -> float:
        search = Search()
        return search.worth([search.run(sampler, start + number) for number in range(40)])

    most = Search().worth([(x, 0.3) for x in np.linspace(0.0, 1.0, 200)])
    lost = {sampler: np.mean([most - worth(sampler, 300 * i) for i in range(3)]) for sampler in (curves, RandomSampler)}
    assert lost[curves] < 0.7 * lost[RandomSampler]


def test_suggestions_are_repeatable_and_each_metric_has_its_own_process():
    found = []
    for _ in range(2):
        search = Search(trials=14)
        found.append([search.run(curves, 100), search.run(curves, 101)])
        kept = search.study._storage.get_study_system_attrs(search.study._study_id)
        assert kept[HYPERPARAMETERS_KEY]["theta"] != kept[f"{HYPERPARAMETERS_KEY}:1"]["theta"]
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_suggestions_satisfy_constraints():
    search = Search(trials=20, broken_above=0.4)
    found = [search.run(curves, 100 + 3 * number)[0] for number in range(8)]
    assert sorted(found)[5] <= 0.42


def test_without_feasible_trials_violations_are_minimized():
    search = Search(trials=14, broken_above=-0.1)
    assert search.run(curves, 100)[0] < 0.3


def test_a_suggestion_stores_the_prediction_of_each_metric():
    search = Search(trials=14)
    search.run(curves, 100)
    note = search.study._storage.get_all_trials(search.study._study_id)[-1].system_attrs[SUGGESTION_REASON_KEY]
    assert [low <= value <= high for value, (low, high) in zip(note["foreseen"], note["band"], strict=True)] == [
        True
    ] * 2
    assert note["near"] is None or note["near"] < 14
    shown = {"foreseen": [0.96214, 12.0], "band": [[0.94811, 0.97123], [11.5, 12.5]], "near": 3}
    assert format_suggestion_reason(shown) == "forecast 0.9621 (0.9481 to 0.9712), 12 (11.5 to 12.5); near trial 3"


def test_the_expected_hypervolume_gain_equals_that_of_draws():
    random = np.random.default_rng(0)
    mean, deviation = np.array([[0.0, 0.5], [1.0, -0.5]]), np.array([[0.5, 1.0], [0.2, 0.7]])
    vectors = random.standard_normal((40, 2))
    draws = mean[:, None] + deviation[:, None] * random.standard_normal((2, 20_000, 2))
    expected = [(torch.from_numpy(mean[:, j].copy()), torch.from_numpy(deviation[:, j].copy())) for j in range(2)]
    weights = random.uniform(0.1, 2.0, 40)
    found = (
        log_expected_hypervolume_improvement(expected, *map(torch.from_numpy, (vectors, np.log(weights)))).exp().numpy()
    )
    counted = ((draws[:, :, None] <= vectors).all(3) * weights).sum(2).mean(1)
    assert found == pytest.approx(counted, rel=0.05)


FRONTS = {
    "none": np.empty((0, 2)),
    "few": np.array([[0.2, 0.7], [0.5, 0.4], [0.8, 0.1]]),
    "near the corner": np.array([[0.004, 0.003], [0.001, 0.006]]),
    "beyond the box": np.array([[-0.1, 0.5], [0.5, 1.5]]),
    "three metrics": np.array([[0.2, 0.7, 0.3], [0.5, 0.4, 0.6], [0.1, 0.9, 0.9]]),
}


@pytest.mark.parametrize("name", FRONTS)
def test_samples_represent_the_volume_that_no_trial_dominates(name):
    best = FRONTS[name]
    low, high = np.zeros(best.shape[1]), np.ones(best.shape[1])
    vectors, weights = sample_non_dominated(np.random.default_rng(0), best, low, high, 6_000)
    assert not (best[:, None] <= vectors).all(2).any()
    assert np.all((vectors >= low) & (vectors <= high))
    volume = 1 - (compute_hypervolume(np.maximum(best, 0.0), high) if len(best) else 0.0)
    assert np.exp(weights).sum() / 6_000 == pytest.approx(volume, rel=0.05)
    middle = 0.5 * (low + high)  # samples below it represent the volume of a smaller box
    within = np.exp(weights)[(vectors <= middle).all(1)].sum() / 6_000
    left = np.prod(middle) - (compute_hypervolume(np.maximum(best, 0.0), middle) if len(best) else 0.0)
    assert within == pytest.approx(left, rel=0.15, abs=1e-3)


def test_a_constant_metric_does_not_affect_the_suggestion():
    best = np.array([[0.2, 0.7, 3.0]])
    vectors, weights = sample_non_dominated(
        np.random.default_rng(0), best, np.array([0.0, 0.0, 3.0]), np.array([1.0, 1.0, 3.0]), 6_000
    )
    assert np.all(vectors[:, 2] == 3.0)
    assert np.exp(weights).sum() / 6_000 == pytest.approx(1 - 0.8 * 0.3, rel=0.05)
    assert not (best <= vectors).all(1).any()


def test_a_constraint_that_one_trial_violates_gives_a_finite_feasibility():
    search = Search(trials=40, broken_above=0.999)
    trials = [trial({0: (0.1, 5.0)}, params={"x": 0.5 + number / 3000}) for number in range(1500)]
    sampler = MultiObjectiveSuggester(EPOCHS, np.random.default_rng(0))
    broken = np.array([1.0, *[-1.0] * 1499])
    found = [sampler._fit_feasibility(search.study, trials, {"x": X}, broken) for _ in range(3)]
    assert all(each is None or np.isfinite(each[1]) for each in found)


def test_a_pareto_front_at_the_ideal_point_leaves_only_that_point():
    vectors, weights = sample_non_dominated(np.random.default_rng(0), np.zeros((1, 2)), np.zeros(2), np.ones(2), 100)
    assert (vectors.tolist(), weights.tolist()) == ([[0.0, 0.0]], [0.0])


def trial(values: dict[int, tuple[float, float]], /, **shape: object) -> FrozenTrial:
    attrs = {VALUES: {str(step): list(each) for step, each in values.items()}}
    first = {step: each[0] for step, each in values.items()}
    kind = {"state": TrialState.PRUNED, "params": {"x": 0.5}, "distributions": {"x": X}}
    return create_trial(**{**kind, "intermediate_values": first, "system_attrs": attrs, **shape})


def test_a_metric_that_is_constant_during_training_is_known_after_one_epoch():
    trials = [trial({0: (0.1, 5.0)}), trial({0: (0.1, 9.0), 1: (0.5, 9.2), 2: (0.4, 9.1)}), trial({})]
    assert build_secondary_curves(trials, MAXIMIZE, EPOCHS) == [[{EPOCHS: 5.0}, {EPOCHS: 9.1}, {}]]


def test_a_changing_metric_has_the_value_of_the_best_epoch_so_far():
    trials = [trial({0: (0.1, 5.0), 1: (0.5, 1.0), 2: (0.4, 7.0)}), trial({0: (math.nan, 6.0), 1: (0.2, 2.0)})]
    assert build_secondary_curves(trials, MAXIMIZE, EPOCHS) == [[{1: 5.0, 2: 1.0, 3: 1.0}, {2: 2.0}]]


def test_only_constraints_on_constant_metrics_count_before_a_trial_is_complete():
    assert math.isnan(get_max_violation(trial({0: (0.1, 5.0)})))
    broken = trial({0: (0.1, 5.0)}, user_attrs={INFEASIBLE: "diverged"})
    broken.set_constraint("model_mb", 0.5)
    broken.set_constraint("parameters", -2.0)
    assert get_max_violation(broken) == 0.5


def test_a_bound_on_a_changing_metric_counts_for_ended_trials_only():
    waiting = trial({0: (0.1, 5.0)}, state=TrialState.WAITING)
    waiting.set_constraint("accuracy", 0.8)
    assert math.isnan(get_max_violation(waiting))
    waiting.set_constraint("model_mb", -1.0)
    assert get_max_violation(waiting) == -1.0
    ended = trial({0: (0.1, 5.0)}, state=TrialState.COMPLETE, values=[0.1, 5.0])
    ended.set_constraint("accuracy", 0.8)
    assert get_max_violation(ended) == 0.8


def test_without_values_of_a_metric_suggestions_are_random():
    search = Search(trials=14)
    search.kept.clear()
    (x, y), (other, _) = search.run(curves, 100), search.run(curves, 101)
    assert x != other
    drawn = optuna.create_study(sampler=RandomSampler(100)).ask()
    assert (x, y) == (drawn.suggest_float("x", 0.0, 1.0), drawn.suggest_float("y", 0.0, 1.0))


def test_suggestions_are_random_if_all_trials_diverged():
    search = Search()
    for number in range(12):
        diverged = trial({0: (math.nan, 1.0)}, user_attrs={INFEASIBLE: "diverged"}, params={"x": number / 12})
        search.study.add_trial(diverged)
    assert 0.0 <= search.run(curves, 100)[0] <= 1.0
