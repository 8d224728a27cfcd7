"""The benchmark itself: the counts of epochs, reproducibility, and the surrogates of training."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import optuna
import pytest
import torch

from benchmarks.search_quality.broad import Case, Search, lcbench_cases, search
from benchmarks.search_quality.comparison import Comparison, wins_and_losses
from benchmarks.search_quality.comparison import ratio as ratio_at
from benchmarks.search_quality.curves import DATA, read_curves
from benchmarks.search_quality.lcbench import NAMES, LCBenchObjective, make_configurations
from benchmarks.search_quality.live import HELD_OUT, TUNING, LiveObjective, LiveTraining
from benchmarks.search_quality.optuna_study import OptunaStudy
from benchmarks.search_quality.peers import Optuna
from benchmarks.search_quality.problems import PROBLEMS, Problem
from benchmarks.search_quality.production import Production
from benchmarks.search_quality.promotion import Promotion
from benchmarks.search_quality.results import Cell, Setting, ratio
from benchmarks.search_quality.simulation import History, Simulation, Way, Work
from benchmarks.search_quality.space import active, distributions, encode
from benchmarks.search_quality.stored import Stored
from benchmarks.search_quality.surrogates import Scores, Surrogate, first_seeds
from benchmarks.search_quality.ways import BASELINE, halving, median
from hpsearch.objectives.builtin.breast_cancer import BreastCancer
from hpsearch.search.samplers import SamplerSpec
from hpsearch.search.samplers.suggest import make_sampler

optuna.logging.set_verbosity(optuna.logging.WARNING)

PROBLEM = Problem(BreastCancer, "tuning")
LCBENCH = Problem(LCBenchObjective, "tuning")
BUDGET = 400


@dataclass(frozen=True)
class Slope:
    """Training whose values rise to a limit that depends on the learning rate, with noise."""

    epochs: int = 27

    def trial(self, params: Mapping[str, Any], random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        worth = -abs(math.log10(params["lr"]) + 2.5)
        true = worth - 1 / np.arange(1, self.epochs + 1)
        return true + 0.1 * random.standard_normal(self.epochs), true


@dataclass
class Watched:
    """A search method that records its calls."""

    way: Way
    reports: list[tuple[int, int, float]] = field(default_factory=list)
    given: list[Work] = field(default_factory=list)

    def next_work(self) -> Work | None:
        work = self.way.next_work()
        if work is not None:
            self.given.append(work)
        return work

    def report(self, trial: int, epoch: int, value: float) -> bool:
        self.reports.append((trial, epoch, value))
        return self.way.report(trial, epoch, value)


def simulate(way: Way, training: Any = None, *, seed: int = 0, workers: int = 8, budget: int = BUDGET) -> History:
    return Simulation(way, training or Slope(), PROBLEM.maximize, workers, budget, seed).run()


def without_times(history: History) -> dict[str, Any]:
    return {name: value for name, value in asdict(history).items() if name != "seconds"}


def random_params(number: int, problem: Problem = PROBLEM) -> dict[str, Any]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(number))
    trial = study.ask()
    problem.objective().configure(trial)
    return trial.params


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_search_depends_only_on_its_seed(sampler):
    first, second, other = (
        without_times(simulate(Production(PROBLEM, sampler, "median", seed=seed), seed=seed)) for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other


def test_each_epoch_is_counted_once():
    way = Watched(Production(PROBLEM, "random", "successive_halving", seed=0))
    history = simulate(way)
    assert history.epochs == len(way.reports) == BUDGET
    epochs: dict[int, list[int]] = {}
    for trial, epoch, _ in way.reports:
        epochs.setdefault(trial, []).append(epoch)
    assert all(reported == list(range(len(reported))) for reported in epochs.values())
    # The budget may end before the first epoch of the last trials.
    assert len(epochs) <= history.trials <= len(epochs) + 8
    assert history.full == sum(len(reported) == PROBLEM.epochs for reported in epochs.values()) > 0


def test_best_is_chosen_by_its_reported_value_and_measured_by_its_true_one():
    way = Watched(Production(PROBLEM, "random", "none", seed=0))
    history = simulate(way)
    values = np.array([value for _, _, value in way.reports])
    new = np.flatnonzero(values > np.maximum.accumulate([-np.inf, *values[:-1]]))
    assert history.spent == [int(place) + 1 for place in new]
    assert all(best not in values for best in history.best)


def test_workers_are_asynchronous():
    """Workers do not run in lockstep: later trials may end earlier."""
    way = Watched(Production(PROBLEM, "random", "none", seed=0))
    simulate(way)
    ended = [trial for trial, epoch, _ in way.reports if epoch == PROBLEM.epochs - 1]
    assert ended != sorted(ended)


def test_worker_without_work_waits_for_the_others():
    @dataclass
    class OneAtATime:
        begun: int = 0
        running: bool = False

        def next_work(self) -> Work | None:
            if self.running:
                return None
            self.running = True
            self.begun += 1
            return Work(self.begun - 1, 3, random_params(0))

        def report(self, trial: int, epoch: int, value: float) -> bool:
            self.running = epoch < 2
            return True

    assert simulate(OneAtATime(), budget=30).trials == 10


@pytest.mark.parametrize("pruner", ["median", "hyperband", {"name": "successive_halving", "reduction_factor": 3}])
def test_hpsearch_prunes_the_same_trials_as_optuna(pruner):
    pruners = {"median": median(), "hyperband": optuna.pruners.HyperbandPruner(1, PROBLEM.epochs, 3)}
    theirs = pruners[pruner] if isinstance(pruner, str) else halving()

    class SameConfigurations(Optuna):
        def next_work(self) -> Work:
            trials: OptunaStudy = self._trials
            sampler = SamplerSpec.parse({"name": "random"})
            trials.study.sampler = make_sampler(sampler, study_seed=0, trial_number=len(trials.values), epochs=27)
            return super().next_work()

    way, other = (
        Watched(Production(PROBLEM, "random", pruner, seed=0)),
        Watched(SameConfigurations(PROBLEM, optuna.samplers.RandomSampler(0), theirs, seed=0)),
    )
    simulate(way)
    simulate(other)
    assert way.reports == other.reports
    assert min(Counter(trial for trial, _, _ in way.reports).values()) < PROBLEM.epochs  # some trial was pruned


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "pruner"), [("tpe", "median"), ("random", "successive_halving")])
def test_searches_in_postgres_and_in_memory_are_equal(sampler, pruner):
    way, other = (Watched(make(PROBLEM, sampler, pruner, seed=0)) for make in (Stored, Production))
    simulate(way)
    simulate(other)
    assert way.reports == other.reports


@pytest.mark.slow
def test_asha_in_postgres_promotes_a_fraction_of_the_trials():
    way = Watched(Stored(PROBLEM, "random", "asha", seed=0))
    history = simulate(way)
    assert max(Counter((trial, epoch) for trial, epoch, _ in way.reports).values()) == 1  # no epoch is repeated
    reached = Counter(epoch + 1 for _, epoch, _ in way.reports)
    assert reached[3] > 2 * reached[4] > 2 * reached[10] > 0  # rungs after epochs 3 and 9
    assert any(work.params is None for work in way.given)
    assert history.epochs == len(way.reports) == BUDGET


@pytest.mark.slow
@pytest.mark.parametrize(("made", "pruner"), [(Production, "median"), (Stored, "asha")])
def test_search_with_a_number_of_trials_ends_with_the_last_trial(made, pruner):
    problem = replace(PROBLEM, trials=20)
    way = made(problem, "random", pruner, seed=0)
    history = Simulation(way, Slope(), problem.maximize, workers=8, budget=10**6, seed=0, trials=20).run()
    assert history.trials == 20
    assert 20 + 26 <= history.epochs < 20 * 27
    assert history.full >= 1


def test_reference_promotes_the_best_third_once_per_rung_and_resumes_them():
    class Checked(Promotion):
        def next_work(self) -> Work:
            work = super().next_work()
            if work.params is None:
                values = self.rungs[{3: 0, 9: 1, 27: 2}[work.until]]
                better = sum(value > values[work.trial] for value in values.values())
                assert better < len(values) // 3
            return work

    way = Watched(Checked(random_params, PROBLEM.maximize, PROBLEM.epochs))
    history = simulate(way, budget=1000)
    assert max(Counter((work.trial, work.until) for work in way.given).values()) == 1
    assert {work.until for work in way.given} == {1, 3, 9, 27}
    assert max(Counter((trial, epoch) for trial, epoch, _ in way.reports).values()) == 1  # no epoch is repeated
    assert history.full >= 1


def test_oracle_beats_random_search():
    problem, training = PROBLEMS["denoise"], Surrogate("denoise", "trees")

    @dataclass
    class Oracle:
        begun: int = 0

        def next_work(self) -> Work:
            candidates = [random_params(50 * self.begun + number, problem) for number in range(50)]
            self.begun += 1
            worths = [training.true(params)[-1] for params in candidates]
            return Work(self.begun - 1, problem.epochs, candidates[int(np.argmax(worths))])

        def report(self, trial: int, epoch: int, value: float) -> bool:
            return True

    budget = 12 * problem.epochs
    oracle = simulate(Oracle(), training, budget=budget)
    random = [
        simulate(Production(problem, "random", "none", seed=seed), training, seed=seed, budget=budget)
        for seed in range(5)
    ]
    assert all(oracle.best[-1] > history.best[-1] for history in random)


@pytest.mark.parametrize("name", PROBLEMS)
def test_curves_are_complete_and_match_their_objective(name):
    problem, curves = PROBLEMS[name], read_curves(name)
    jobs = [(curve.configuration, curve.seed) for curve in curves]
    assert jobs == problem.jobs[: len(jobs)]
    assert len(first_seeds(curves)) >= 30
    assert all(len(curve.values) == problem.epochs for curve in curves)
    assert all(active(problem.objective, curve.params) == curve.params for curve in curves)
    assert (DATA / f"{name}.csv.gz").stat().st_size < 300_000


def test_one_objective_has_categorical_and_conditional_parameters():
    curves, objective = read_curves("digits"), PROBLEMS["digits"].objective
    active_names = {frozenset(curve.params) for curve in curves}
    assert len(active_names) == 4  # two networks, each with two optimizers
    assert len({encode(objective, curve.params).size for curve in curves}) == 1
    assert set().union(*active_names) == set(distributions(objective))


def test_scores_keep_the_order_and_are_invertible():
    values = np.array([[0.5, 0.9, 0.9], [0.1, 0.7, np.nan]])
    scores = Scores.of(values, maximize=True)
    found = scores.score(values)
    assert found[0, 1] == found[0, 2] == found.min()
    assert found[1, 2] == found[1, 0] == found.max()
    known = np.isfinite(values)
    assert scores.value(found)[known] == pytest.approx(values[known])


@pytest.mark.parametrize("maximize", [True, False])
def test_scores_better_than_all_trained_values_are_extrapolated(maximize):
    scores = Scores.of(np.array([1.0, 2.0, 3.0, 5.0]), maximize=maximize)
    best = scores.score(np.array([5.0 if maximize else 1.0]))
    beyond = scores.value(best - np.array([0.0, 0.1, 0.2]))
    steps = np.diff(beyond)
    assert beyond[0] == (5.0 if maximize else 1.0)
    assert steps == pytest.approx([steps[0]] * 2)
    assert (steps > 0).all() if maximize else (steps < 0).all()


def test_ratio_compares_epochs_to_the_quality_of_the_baseline():
    def arriving(at: int) -> History:
        return History(spent=[1, at], best=[0.0, 1.0], epochs=150)

    slow, fast = [arriving(at) for at in (40, 80, 90)], [arriving(at) for at in (20, 40, 45)]
    never = [History(spent=[1], best=[0.0], epochs=150)] * 3
    cells = [Cell("denoise", "gp", {BASELINE: slow, "fast": fast, "never": never})]
    setting = Setting(budget=100, workers=8)
    assert ratio(BASELINE, cells, setting).middle == pytest.approx(1.0)
    assert ratio("fast", cells, setting).middle == pytest.approx(0.5)
    found = ratio("fast", cells, setting)
    assert found.low < 0.5 < found.high
    assert ratio("never", cells, setting).middle == pytest.approx(150 / (40 * 80 * 90) ** (1 / 3))


def test_comparison_at_fractions_of_the_budget():
    base = History(spent=[1, 40, 80], best=[0.0, 1.0, 2.0])
    fast = Comparison("one", History(spent=[1, 10, 90], best=[0.0, 1.5, 3.0]), base, budget=100, best=4.0)
    assert math.exp(fast.log_ratio(0.5)) == pytest.approx(10 / 40)
    assert math.exp(fast.log_ratio(1.0)) == pytest.approx(90 / 80)
    assert [fast.regret(fraction) for fraction in (0.25, 0.5, 1.0)] == [2.5, 2.5, 1.0]
    never = Comparison("two", History(spent=[1], best=[0.5]), base, budget=100, best=4.0)
    assert math.exp(never.log_ratio(1.0)) == pytest.approx(150 / 80)
    assert math.exp(never.log_ratio(0.5)) == pytest.approx(75 / 40)
    assert [wins_and_losses([fast, never], fraction) for fraction in (0.25, 0.5, 1.0)] == ["2 / 0", "1 / 1", "1 / 1"]
    found = ratio_at([fast, never], 1.0)
    assert found.middle == pytest.approx(math.sqrt(90 * 150) / 80)
    assert found.low == pytest.approx(90 / 80)
    assert found.high == pytest.approx(150 / 80)


def test_lcbench_tasks_are_split_by_their_position(tmp_path):
    space = [{"name": "epoch"}, {"name": "OpenML_task_id", "choices": ["5", "3", "9", "1"]}]
    (tmp_path / "config_space.json").write_text(json.dumps({"hyperparameters": space}))
    names = {use: [case.name for case in lcbench_cases(tmp_path, use, 0.3)] for use in ("tuning", "held out")}
    assert names == {"tuning": ["5", "9"], "held out": ["3", "1"]}


def test_lcbench_configurations_cover_the_search_space():
    space = distributions(LCBenchObjective)
    assert set(NAMES) == set(space)
    for row in make_configurations(np.random.default_rng(0).uniform(size=(20, len(NAMES)))):
        for name, value in zip(NAMES, row, strict=True):
            assert space[name]._contains(space[name].to_internal_repr(value))
    bounds = make_configurations(np.repeat([[0.0], [1.0]], len(NAMES), axis=1))
    assert bounds == pytest.approx(np.array([[space[name].low, space[name].high] for name in NAMES]).T)
    assert tuple(LCBenchObjective().configure(optuna.trial.FixedTrial(random_params(0, LCBENCH)))) == NAMES


@pytest.mark.parametrize("objective", [*TUNING, *HELD_OUT])
def test_live_training_is_reproducible_and_stops_with_the_search(objective: type[LiveObjective]) -> None:
    params = random_params(1, Problem(objective, "tuning"))
    reference, again = (LiveTraining(objective).trial(params, np.random.default_rng(2)) for _ in range(2))
    shown, true = (list(curve[:3]) for curve in reference)
    torch.rand(7)  # other trainings in between
    assert [again[1][epoch] for epoch in range(3)] == true
    assert [again[0][epoch] for epoch in range(3)] == shown
    assert reference[0].run.trained == 3


def test_missing_files_of_lcbench_are_one_line(tmp_path):
    command = [sys.executable, "-m", "benchmarks.search_quality.broad", "--lcbench", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].endswith(
        f"--lcbench {tmp_path} has no model.onnx; lcbench.py describes how to get it"
    )


@dataclass(frozen=True)
class KnownSlope(Slope):
    """Training that can be identified."""

    def digest(self) -> str:
        return "slope"

    def best_known(self) -> float:
        return 0.0


def test_kept_searches_are_not_repeated_and_have_the_best_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.search_quality.broad.KEPT", tmp_path)
    case = Case("slope", PROBLEM, KnownSlope())
    one = Search(case, BASELINE, seed=0, trainings=2, workers=2)
    first = search(one)
    assert first.epochs == 2 * PROBLEM.epochs
    assert search(one) == first  # the CPU time too, so it was not repeated
    assert len(list(case.folder.glob("*.json"))) == 1
    assert case.best_seen() == max(0.0, *first.best)
