"""Compare the surrogates with real trainings: a line per objective and kind of surrogate.

    python -m benchmarks.search_quality.fidelity

All numbers except for the counts are Spearman correlations. `held out`: between the predicted and the trained last
value of configurations that the surrogate was not fitted to; `random`: the same without configurations suggested by
TPE. `seeds`: between the last values with two seeds, which no surrogate can exceed by much; in brackets the number of
pairs. `early`: between the trained values after 3 epochs and after the last; `early, simulated`: the same for simulated
trials of these configurations.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import optuna
from scipy.stats import spearmanr

from benchmarks.search_quality.curves import read_curves
from benchmarks.search_quality.problems import PROBLEMS
from benchmarks.search_quality.surrogates import FAMILIES, Surrogate, surrogate

EARLY = 2  # the third epoch
HEADER = "| objective | curves | diverged | kind | held out | random | seeds | early | early, simulated |"


def seed_correlation(name: str) -> tuple[float, int]:
    """Return the rank correlation of the last values with two seeds, and the number of pairs."""
    by_configuration: dict[int, list[float]] = {}
    for curve in read_curves(name):
        by_configuration.setdefault(curve.configuration, []).append(curve.values[-1])
    pairs = [(first, other) for first, *others in by_configuration.values() for other in others]
    return rank_correlation(*np.array(pairs).T), len(pairs)


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return Spearman's correlation, without pairs that have a NaN."""
    both = np.isfinite(one) & np.isfinite(other)
    return float(spearmanr(one[both], other[both]).statistic)


def line(found: Surrogate) -> str:
    """Return a line of the table."""
    values = np.array([curve.values for curve in found.curves])
    drawn = np.array([not curve.chosen for curve in found.curves])
    scores = found.scores.score(values)
    random = np.random.default_rng(0)
    simulated = np.array([found.trial(curve.params, random)[0] for curve in found.curves])
    seeds, pairs = seed_correlation(found.name)
    numbers = [
        rank_correlation(found.held_out[:, -1], scores[:, -1]),
        rank_correlation(found.held_out[drawn, -1], scores[drawn, -1]),
    ]
    early = [rank_correlation(curves[:, EARLY], curves[:, -1]) for curves in (values, simulated)]
    diverged = int(np.isnan(values[:, -1]).sum())
    cells = [found.name, len(values), diverged, found.family, *(f"{number:.2f}" for number in numbers)]
    return " | ".join(map(str, ["", *cells, f"{seeds:.2f} ({pairs})", *(f"{n:.2f}" for n in early), ""])).strip()


def lines() -> Iterator[str]:
    """Yield the lines of the table in Markdown."""
    yield HEADER
    yield "|---|---|---|---|---|---|---|---|---|"
    for name in PROBLEMS:
        for family in FAMILIES:
            yield line(surrogate(name, family))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for text in lines():
        print(text, flush=True)


if __name__ == "__main__":
    main()
