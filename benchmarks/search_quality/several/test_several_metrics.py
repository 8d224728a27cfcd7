"""The simulation of multi-objective searches: hypervolume, promotions, and agreement with the code of peers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna
import pytest

from benchmarks.search_quality.problems import PROBLEMS, Problem
from benchmarks.search_quality.several.peers import as_intended, as_shipped
from benchmarks.search_quality.several.problems import parameters, reference, two_metrics
from benchmarks.search_quality.several.production import Production
from benchmarks.search_quality.several.run import ratio
from benchmarks.search_quality.several.simulation import SeveralMetrics, Worth
from benchmarks.search_quality.simulation import Work
from hpsearch.objectives.builtin.breast_cancer import BreastCancer
from hpsearch.storage.rungs.fronts import compute_front_ranks

PROBLEM = Problem(BreastCancer, "tuning")


@dataclass(frozen=True)
class Slope:
    """Training whose accuracy rises to a limit that depends on the learning rate; wide networks are slightly better."""

    problem: Problem = PROBLEM
    maximize: tuple[bool, bool] = (True, False)
    directions: Sequence[str] = ("maximize", "minimize")

    def trial(self, params: Mapping[str, Any], random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        true = -abs(np.log10(params["lr"]) + 2.5) + params["width"] / 100 - 1 / np.arange(1, 28)
        costs = np.full(27, float(params["width"]))
        return np.column_stack([true + 0.1 * random.standard_normal(27), costs]), np.column_stack([true, costs])


@dataclass
class Watched:
    """A search method that records its calls."""

    way: Any
    reports: list[tuple[int, int, list[float]]] = field(default_factory=list)
    given: list[Work] = field(default_factory=list)

    def next_work(self) -> Work:
        self.given.append(self.way.next_work())
        return self.given[-1]

    def report(self, trial: int, epoch: int, value: list[float]) -> bool:
        self.reports.append((trial, epoch, value))
        return self.way.report(trial, epoch, value)


def simulate(sampler: str, *, budget: int = 300, seed: int = 0) -> tuple[Watched, SeveralMetrics]:
    training: Any = Slope()
    way = Watched(Production(training, sampler, {"name": "asha", "min_resource": 1}, seed=seed))
    shape: Any = {"higher": training.maximize, "reference": (3.0, 128.0)}
    simulation = SeveralMetrics(way, training, True, 8, budget, seed, **shape)
    simulation.run()
    return way, simulation


@pytest.mark.parametrize("sampler", ["random", "tpe", "nsga2", "freeze_thaw"])
def test_search_depends_only_on_its_seed(sampler: str) -> None:
    first, second, other = (simulate(sampler, seed=seed, budget=80)[0].reports for seed in (1, 1, 2))
    assert first == second
    assert first != other


def test_first_fronts_are_promoted_once_per_rung_and_resumed() -> None:
    way, simulation = simulate("random")
    assert max(Counter((trial, epoch) for trial, epoch, _ in way.reports).values()) == 1
    reached = Counter(epoch + 1 for _, epoch, _ in way.reports)
    assert reached[1] > 2 * reached[2] > 2 * reached[4] > 0
    assert any(work.params is None for work in way.given)
    at_first = {trial: value for trial, epoch, value in way.reports if epoch == 0}
    promoted = {trial for trial, epoch, _ in way.reports if epoch == 1}
    ranks = compute_front_ranks(np.array([[-a, b] for a, b in at_first.values()]))
    mean = {
        kind: np.mean([rank for trial, rank in zip(at_first, ranks, strict=True) if (trial in promoted) == kind])
        for kind in (True, False)
    }
    assert mean[True] + 1 < mean[False]
    assert simulation.history.epochs == len(way.reports) == 300


def test_front_is_chosen_by_reported_vectors_and_measured_by_true_ones() -> None:
    simulation = SeveralMetrics(
        None,  # type: ignore[arg-type]  # unused
        None,  # type: ignore[arg-type]  # unused
        False,
        1,
        10,
        0,
        higher=(False, False),
        reference=(10.0, 10.0),
    )

    def note(trial: int, shown: tuple[float, float], true: tuple[float, float]) -> float:
        simulation.history.epochs += 1
        simulation._note(trial, np.array(shown), np.array(true))
        return simulation.worth.volume[-1]

    assert note(0, (5.0, 5.0), (6.0, 5.0)) == 4 * 5
    assert note(0, (6.0, 5.0), (1.0, 5.0)) == 4 * 5  # no better epoch of the trial
    assert note(1, (4.0, 4.0), (9.0, 4.0)) == 1 * 6  # reported as better, but truly worse
    assert note(2, (1.0, 9.0), (2.0, 9.0)) == 1 * 6 + 8 * 1 - 1 * 1
    assert simulation.worth.spent == [1, 3, 4]
    assert simulation.worth.max_volume(2) == simulation.worth.max_volume(4) == 20.0
    assert simulation.worth.reached(13.0) == 1


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("breast_cancer", {"layers": 0, "width": 64}, 31),
        ("breast_cancer", {"layers": 1, "width": 8}, 31 * 8 + 9),
        ("denoise", {"width": 64, "code": 8}, 65 * 64 + 65 * 8 + 9 * 64 + 65 * 64),
    ],
)
def test_parameters_counts_those_of_the_network(name: str, params: dict[str, int], expected: int) -> None:
    drawn = optuna.create_study(sampler=optuna.samplers.RandomSampler(0)).ask()
    PROBLEMS[name].objective().configure(drawn)
    assert parameters(PROBLEMS[name], {**drawn.params, **params}) == expected


@pytest.mark.slow
def test_half_of_random_configurations_are_better_than_the_reference() -> None:
    training, worst = two_metrics("gan", "trees"), reference("gan", "trees")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(7))
    losses = []
    for _ in range(200):
        trial = study.ask()
        training.problem.objective().configure(trial)
        shown, true = training.trial(trial.params, np.random.default_rng(0))
        losses.append(true[-1])
        assert shown[:, 1].std() == pytest.approx(0.05 / np.log(10), rel=0.4)  # noise of the seconds
    assert 0.35 < (np.array(losses)[:, 0] < worst[0]).mean() < 0.65
    assert (np.array(losses)[:, 1] <= worst[1]).mean() > 0.98


def test_as_shipped_equals_syne_tune_and_differs_from_the_intended_ranks() -> None:
    priorities = pytest.importorskip("syne_tune.optimizer.schedulers.multiobjective.multiobjective_priority")
    random = np.random.default_rng(0)
    for count in (1, 2, 5, 40):
        losses = random.random((count, 2))
        assert as_shipped(losses).tolist() == priorities.NonDominatedPriority()(losses).tolist()
    line = np.array([[3.0, 3.0], [1.0, 1.0], [2.0, 2.0]])
    assert as_intended(line).tolist() == [2, 0, 1]
    assert as_shipped(line).tolist() == [1, 2, 0]  # the indices of the sorted vectors


def test_infinite_ratio_is_shown_as_over_1() -> None:
    found = ratio({"a": np.array([0.2, 0.3, np.inf]), "b": np.array([0.4, 0.1, np.inf])})
    assert (found.middle, found.arrived) == (0.4, pytest.approx(4 / 6))
    assert str(dataclasses.replace(found, high=np.inf)).startswith("0.40 [")
    assert "over 1" in str(dataclasses.replace(found, high=np.inf))
    assert Worth([1, 5], [0.5, 0.4]).reached(0.6) is None
