"""Measure the epochs that `--min-expected-gain` saves, and the quality that it loses, for several thresholds.

    python -m benchmarks.search_quality.stopping [--sampler freeze_thaw] [--objective digits] [--seeds 8]

Each search uses its whole budget; the epoch at which a threshold would have ended it is computed meanwhile. The loss
does not count improvements by trials that still run then.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import numpy as np
import optuna

from benchmarks.search_quality.problems import PROBLEMS
from benchmarks.search_quality.production import Production
from benchmarks.search_quality.simulation import History, Simulation, Work
from benchmarks.search_quality.surrogates import surrogate
from hpsearch.search.study.terminator import DECISION_FACTOR, MIN_ENDED_TRIALS, RemainingBudget, compute_expected_gain

THRESHOLDS = (0.0003, 0.001, 0.003, 0.01, 0.03)


@dataclass
class Judged:
    """A search method whose expected gain is computed as by a worker.

    Attributes:
        way: the search method.
        budget: total number of epochs.
        epochs: number of epochs of a full trial.
        gains: pairs of epochs spent and expected gain.
    """

    way: Production
    budget: int
    epochs: int
    gains: list[tuple[int, float]] = field(default_factory=list)
    judged: int = 0

    def next_work(self) -> Work:
        trials = self.way._trials
        begun, spent = len(trials.values), sum(map(len, trials.values.values()))
        ended = begun - len(trials.running)
        if ended >= max(MIN_ENDED_TRIALS, DECISION_FACTOR * self.judged):
            self.judged = ended
            trials.study._thread_local.cached_all_trials = None
            left = RemainingBudget(begun * (self.budget - spent) / spent, self.epochs)
            gain = compute_expected_gain(trials.study, left, seed=ended)
            self.gains += [] if gain is None else [(spent, gain)]
        return self.way.next_work()

    def report(self, trial: int, epoch: int, value: float) -> bool:
        return self.way.report(trial, epoch, value)

    def ends(self, threshold: float) -> int:
        """Return the number of epochs after which a threshold ends the search."""
        return next((spent for spent, gain in self.gains if gain < threshold), self.budget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sampler", default="freeze_thaw")
    parser.add_argument("--objective", choices=list(PROBLEMS), default="digits")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--budget", type=int, default=2000)
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    problem = PROBLEMS[given.objective]
    found: list[tuple[Judged, History]] = []
    for seed in range(given.seeds):
        way = Judged(Production(problem, given.sampler, "median", seed=seed), given.budget, problem.epochs)
        shape = {"maximize": problem.maximize, "workers": 8, "budget": given.budget, "seed": seed}
        found.append((way, Simulation(way, surrogate(given.objective, "gp"), **shape).run()))
    print("| threshold | epochs saved | mean loss | median | maximum |\n|---|---|---|---|---|")
    for threshold in THRESHOLDS:
        ends = [way.ends(threshold) for way, _ in found]
        sign = -1 if problem.maximize else 1
        lost = [sign * (h.at(end) - h.at(given.budget)) for end, (_, h) in zip(ends, found, strict=True)]
        saved = 1 - np.mean(ends) / given.budget
        print(f"| {threshold} | {saved:.0%} | {np.mean(lost):.4f} | {np.median(lost):.4f} | {max(lost):.4f} |")


if __name__ == "__main__":
    main()
