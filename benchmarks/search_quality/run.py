"""Measure the epochs that search methods need for the final quality of TPE with the median pruner.

    python -m benchmarks.search_quality.run [--objectives digits ...] [--seeds 20] [--ways NAME ...]

Prints a table in Markdown and draws figures. Searches are kept in `runs/search_quality` and not repeated: a run can be
interrupted and resumed, and further seeds or methods take only their own time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import optuna

from benchmarks.search_quality.figure import draw, draw_ratios
from benchmarks.search_quality.parallel import run_all
from benchmarks.search_quality.problems import PROBLEMS
from benchmarks.search_quality.results import Cell, Search, Setting, ratio, search, share_arrived
from benchmarks.search_quality.surrogates import FAMILIES, surrogate
from benchmarks.search_quality.ways import BASELINE, SLOW, WAYS

PICTURE = Path("runs/search_quality/best_so_far.png")


def table(ways: list[str], cells: list[Cell], setting: Setting) -> Iterator[str]:
    """Yield the lines of the table, one per method; ratios to the epochs of the baseline, lower is better."""
    parts = {use: [cell for cell in cells if PROBLEMS[cell.objective].use == use] for use in ("held out", "tuning")}
    parts |= {f"{family} surrogates": [cell for cell in cells if cell.family == family] for family in FAMILIES}
    parts = {name: part for name, part in parts.items() if part}
    yield f"| method | {' | '.join(parts)} | reached | trials | full | decisions, s per 1,000 epochs |"
    yield "|---" * (len(parts) + 5) + "|"
    for way in ways:
        found = [history for cell in cells for history in cell.histories[way]]
        seconds = np.mean([1000 * history.seconds / history.epochs for history in found])
        numbers = [
            *(str(ratio(way, part, setting)) for part in parts.values()),
            f"{share_arrived(way, cells, setting):.0%}",
            f"{np.mean([history.trials for history in found]):.0f}",
            f"{np.mean([history.full for history in found]):.0f}",
            f"{seconds:.1f}",
        ]
        yield f"| {way} | {' | '.join(numbers)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=[way for way in WAYS if way not in SLOW])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--budget", type=int, default=1000, help="epochs after which the baseline sets the target")
    parser.add_argument("--workers", type=int, default=8, help="simulated workers per search")
    parser.add_argument("--default-first", action="store_true", help="run the objective's default configuration first")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    setting = Setting(given.budget, given.workers, given.default_first)
    ways = list(dict.fromkeys([BASELINE, *given.ways]))
    searches = [
        Search(objective, family, way, seed)
        for seed in range(given.seeds)  # outermost, so that an interrupted run has all methods
        for objective in given.objectives
        for family in given.families
        for way in ways
    ]
    for name in given.objectives:
        for family in given.families:
            surrogate(name, family)  # fit once for all processes
    found = run_all(partial(search, setting=setting), searches, given.processes)
    cells = [
        Cell(name, family, {way: [found[Search(name, family, way, s)] for s in range(given.seeds)] for way in ways})
        for name in given.objectives
        for family in given.families
    ]
    print(f"{given.seeds} seeds, {given.workers} workers, target: {BASELINE} after {given.budget} epochs\n")
    for line in table(ways, cells, setting):
        print(line, flush=True)
    draw(cells, setting, given.picture)
    ratios = given.picture.with_name("ratios.svg")
    draw_ratios({way: ratio(way, cells, setting) for way in ways}, ratios, baseline=BASELINE)
    print(f"\n{given.picture}\n{ratios}")


if __name__ == "__main__":
    main()
