"""Compare search methods at budgets in trials: the quality of the best configuration, and the epochs spent.

    python -m benchmarks.search_quality.budgets [--trials 24 100 500] [--seeds 20] [--objectives NAME ...]

With a fixed number of trials, the number of epochs depends on the pruner: methods that pause most trials early spend a
fraction. The table therefore has both: the epochs, and the share of random configurations whose true value is better
than that of the best one found (lower is better; geometric means). `ahead` is the share of searches whose best
configuration has a better true value than that of the baseline with the same seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import optuna

from benchmarks.search_quality.parallel import run_all
from benchmarks.search_quality.problems import PROBLEMS
from benchmarks.search_quality.simulation import Simulation
from benchmarks.search_quality.surrogates import FAMILIES, Family, surrogate
from benchmarks.search_quality.ways import WAYS, make

BASELINE = "hpsearch tpe + median"
COMPARED = (BASELINE, "hpsearch freeze_thaw + median", "hpsearch tpe + asha", "hpsearch freeze_thaw + asha")
RANDOM = 10_000  # random configurations, among which the best one found is ranked
NO_END = 10**9  # epochs: only the number of trials ends a search


@dataclass(frozen=True)
class Bounded:
    """A search with a budget in trials."""

    objective: str
    family: Family
    way: str
    trials: int
    seed: int
    workers: int


@dataclass(frozen=True)
class Found:
    """The result of a search: the true value of the best configuration, and the epochs spent."""

    best: float
    epochs: int


def search(one: Bounded) -> Found:
    problem = replace(PROBLEMS[one.objective], trials=one.trials)
    training, way = surrogate(one.objective, one.family), make(one.way, problem, one.seed)
    bounds = {"workers": one.workers, "budget": NO_END, "seed": one.seed, "trials": one.trials}
    history = Simulation(way, training, problem.maximize, **bounds).run()
    return Found(history.best[-1], history.epochs)


@cache
def random_losses(objective: str, family: Family) -> np.ndarray:
    """Return the true last values of random configurations [RANDOM] as losses, in ascending order."""
    problem, training = PROBLEMS[objective], surrogate(objective, family)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    values = []
    for _ in range(RANDOM):
        trial = study.ask()
        problem.objective().configure(trial)
        values.append(training.true(trial.params)[-1])
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    losses = np.array(values) * (-1.0 if problem.maximize else 1.0)
    return np.sort(losses)


def share_better(one: Bounded, found: Found) -> float:
    """Return the share of random configurations that are truly better; half of one configuration if none is."""
    loss = -found.best if PROBLEMS[one.objective].maximize else found.best
    return max(0.5, float(np.searchsorted(random_losses(one.objective, one.family), loss))) / RANDOM


def lines(ways: list[str], done: dict[Bounded, Found]) -> Iterator[str]:
    yield "| trials | method | epochs | random ones that are better | ahead of the baseline |"
    yield "|---|---|---|---|---|"
    for trials in sorted({one.trials for one in done}):
        for way in ways:
            mine = [one for one in done if (one.trials, one.way) == (trials, way)]
            shares = [share_better(one, done[one]) for one in mine]
            ahead = [_ahead(one, done[one], done[replace(one, way=BASELINE)]) for one in mine]
            epochs = np.mean([done[one].epochs for one in mine])
            yield f"| {trials} | {way} | {epochs:.0f} | {np.exp(np.mean(np.log(shares))):.2%} | {np.mean(ahead):.0%} |"


def _ahead(one: Bounded, mine: Found, base: Found) -> float:
    sign = 1 if PROBLEMS[one.objective].maximize else -1
    return 0.5 + 0.5 * float(np.sign(sign * (mine.best - base.best)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--trials", nargs="+", type=int, default=[24, 100, 500])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(COMPARED))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--workers", type=int, default=8, help="simulated workers per search")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    ways = list(dict.fromkeys([BASELINE, *given.ways]))
    cells = [(name, family) for name in given.objectives for family in FAMILIES]
    for cell in cells:
        surrogate(*cell)  # fit once for all processes
    searches = [
        Bounded(name, family, way, trials, seed, given.workers)
        for seed in range(given.seeds)
        for trials in given.trials
        for name, family in cells
        for way in ways
    ]
    done = run_all(search, searches, given.processes)
    for line in lines(ways, done):
        print(line, flush=True)


if __name__ == "__main__":
    main()
