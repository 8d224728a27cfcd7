"""Compare searches of a method with those of the baseline, at a quarter, half and all of the budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.search_quality.results import Ratio
from benchmarks.search_quality.simulation import History

FRACTIONS = {"quarter": 0.25, "half": 0.5, "all": 1.0}  # of the budget
NEVER = 1.5  # a search that has not reached the target counts as reaching it after this multiple of the budget
RESAMPLES = 500


@dataclass(frozen=True)
class Comparison:
    """A search and the baseline's with the same seed; higher values are better.

    Attributes:
        problem: name of the problem.
        mine: history of the method.
        base: history of the baseline.
        budget: number of epochs of each search.
        best: best true value that is known.
    """

    problem: str
    mine: History
    base: History
    budget: int
    best: float

    def log_ratio(self, fraction: float) -> float:
        """Return the log ratio of the epochs to the baseline's quality at a fraction of the budget, to its own."""
        target = self.base.at(int(fraction * self.budget))
        mine, base = (one.reached(target, maximize=True) for one in (self.mine, self.base))
        assert base is not None
        never = NEVER * fraction * self.budget
        return float(np.log(never if mine is None else min(mine, never)) - np.log(base))

    def regret(self, fraction: float) -> float:
        return self.best - self.mine.at(int(fraction * self.budget))

    @property
    def final_regret(self) -> float:
        """Regret of the best trial that reached its last epoch; NaN if there is none."""
        return math.nan if self.mine.final is None else self.best - self.mine.final

    def lead(self, fraction: float) -> float:
        """Return the difference to the baseline's quality, which is positive if the method is better."""
        epochs = int(fraction * self.budget)
        return self.mine.at(epochs) - self.base.at(epochs)


def ratio(comparisons: list[Comparison], fraction: float) -> Ratio:
    """Return the geometric mean of the ratios of epochs.

    The interval is a bootstrap over problems and, in each, over seeds.
    """
    logs: dict[str, list[float]] = {}
    for one in comparisons:
        logs.setdefault(one.problem, []).append(one.log_ratio(fraction))
    groups = [np.array(group) for group in logs.values()]
    random = np.random.default_rng(0)
    means = []
    for _ in range(RESAMPLES):
        drawn = [groups[place] for place in random.integers(len(groups), size=len(groups))]
        means.append(np.mean([random.choice(group, len(group)).mean() for group in drawn]))
    low, high = np.percentile(means, [2.5, 97.5])
    middle = np.mean([group.mean() for group in groups])
    return Ratio(*(float(np.exp(value)) for value in (middle, low, high)))


def wins_and_losses(comparisons: list[Comparison], fraction: float) -> str:
    leads = np.array([one.lead(fraction) for one in comparisons])
    return f"{(leads > 0).sum()} / {(leads < 0).sum()}"


def overall(comparisons: Mapping[str, list[Comparison]]) -> Iterator[str]:
    """Yield a table with a line per method."""
    columns = [f"{what}, {name}" for what in ("ratio", "regret", "wins / losses") for name in FRACTIONS]
    columns += ["regret of full trials", "trials", "full", "decisions, s per 1,000 epochs"]
    yield f"| method | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for way, ours in comparisons.items():
        numbers = [
            *(str(ratio(ours, fraction)) for fraction in FRACTIONS.values()),
            *(f"{np.mean([one.regret(fraction) for one in ours]):.2f}" for fraction in FRACTIONS.values()),
            *(wins_and_losses(ours, fraction) for fraction in FRACTIONS.values()),
            f"{np.mean([one.final_regret for one in ours]):.2f}",
            f"{np.mean([one.mine.trials for one in ours]):.0f}",
            f"{np.mean([one.mine.full for one in ours]):.0f}",
            f"{np.mean([1000 * one.mine.seconds / one.mine.epochs for one in ours]):.1f}",
        ]
        yield f"| {way} | {' | '.join(numbers)} |"


def by_problem(comparisons: Mapping[str, list[Comparison]]) -> Iterator[str]:
    """Yield a table with a line per problem: ratio, regret, wins and losses of each method at the end of the budget."""
    yield f"| problem | {' | '.join(comparisons)} |"
    yield "|---" * (len(comparisons) + 1) + "|"
    for problem in dict.fromkeys(one.problem for ours in comparisons.values() for one in ours):
        cells = []
        for ours in comparisons.values():
            here = [one for one in ours if one.problem == problem]
            regret = np.mean([one.regret(1.0) for one in here])
            cells.append(f"{ratio(here, 1.0).middle:.2f}, {regret:.2f}, {wins_and_losses(here, 1.0)}")
        yield f"| {problem} | {' | '.join(cells)} |"
