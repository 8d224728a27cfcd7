"""Compare search methods on networks that are trained inside the simulation, or on LCBench.

    python -m benchmarks.search_quality.broad [--use "held out"] [--problems NAME ...]
    python -m benchmarks.search_quality.broad --lcbench DIR [--noise 0]

`lcbench.py` describes how to get DIR. Prints two tables for each budget and number of workers. Searches
are kept in `runs/search_quality/broad` and not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import optuna

from benchmarks.search_quality.comparison import Comparison, by_problem, overall
from benchmarks.search_quality.lcbench import DEFAULTS, EPOCHS, FILES, NOISE, LCBench, LCBenchObjective, read_tasks
from benchmarks.search_quality.live import EPOCHS as LIVE_EPOCHS
from benchmarks.search_quality.live import HELD_OUT, TUNING, LiveTraining
from benchmarks.search_quality.parallel import run_all
from benchmarks.search_quality.problems import Problem
from benchmarks.search_quality.results import digest_code
from benchmarks.search_quality.simulation import History, Simulation, Training
from benchmarks.search_quality.ways import BASELINE, WAYS, make

KEPT = Path("runs/search_quality/broad")  # not part of the repository
COMPARED = (BASELINE, "hpsearch freeze_thaw + median", "hpsearch random + asha", "hpsearch freeze_thaw + asha")

Use = Literal["tuning", "held out"]


class KnownTraining(Training, Protocol):
    """A replacement for training that can be identified."""

    def digest(self) -> str:
        """Return a digest of the data and code that determine the curves."""
        ...

    def best_known(self) -> float:
        """Return the best true value that is known without searches; minus infinity if none is."""
        ...


@dataclass(frozen=True)
class Case:
    """A problem, all of which have a metric in percent of which higher is better, and its replacement for training."""

    name: str
    problem: Problem
    training: KnownTraining

    @property
    def folder(self) -> Path:
        """The folder of the kept searches."""
        return KEPT / f"{self.name}-{self.training.digest()}"

    def best_seen(self) -> float:
        """Return the best true value that is known: of all kept searches, and without searches."""
        found = [max(json.loads(path.read_text())["history"]["best"]) for path in self.folder.glob("*.json")]
        return max([self.training.best_known(), *found])


@dataclass(frozen=True)
class Search:
    """One simulated search."""

    case: Case
    way: str
    seed: int
    trainings: int
    workers: int
    default: str | None = None

    @property
    def budget(self) -> int:
        """The number of epochs of all trials."""
        return self.trainings * self.case.problem.epochs


def lcbench_cases(folder: Path, use: Use, noise: float) -> list[Case]:
    """Return the tasks of LCBench: those at even positions of its list are for tuning, the others are held out."""
    problem = Problem(LCBenchObjective, use, epochs=EPOCHS)
    tasks = read_tasks(folder)[0 if use == "tuning" else 1 :: 2]
    return [Case(task, problem, LCBench(folder, task, noise)) for task in tasks]


def live_cases(use: Use) -> list[Case]:
    """Return the problems whose networks are trained in the simulation."""
    objectives = TUNING if use == "tuning" else HELD_OUT
    return [Case(each.name, Problem(each, use, epochs=LIVE_EPOCHS), LiveTraining(each)) for each in objectives]


def search(one: Search) -> History:
    """Return the history of a search from its file, or simulate it."""
    key = (one.way, one.seed, one.trainings, one.workers, digest_code(one.way), *([one.default] if one.default else []))
    path = one.case.folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.json"
    if path.exists():
        return History(**json.loads(path.read_text())["history"])
    problem, training = one.case.problem, one.case.training
    default = None
    if one.default is not None:
        assert isinstance(training, LCBench)
        default = training.default(one.default, one.seed)
    way = make(one.way, replace(problem, budget_epochs=one.budget, default=default), one.seed)
    history = Simulation(way, training, problem.maximize, one.workers, one.budget, one.seed).run()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"search": key, "history": asdict(history)}))
    new.replace(path)
    return history


def tables(cases: list[Case], searches: dict[Search, History], ways: list[str]) -> Iterator[str]:
    """Yield the lines of two tables for each budget and number of workers."""
    best = {case.name: case.best_seen() for case in cases}
    for trainings, workers in dict.fromkeys((one.trainings, one.workers) for one in searches):
        here = {one: found for one, found in searches.items() if (one.trainings, one.workers) == (trainings, workers)}
        comparisons = {
            way: [
                Comparison(
                    one.case.name,
                    found,
                    here[replace(one, way=BASELINE)],
                    one.budget,
                    best[one.case.name],
                )
                for one, found in here.items()
                if one.way == way
            ]
            for way in ways
        }
        seeds, kind = len({one.seed for one in here}), next(iter(here)).default or "no"
        searched = f"{trainings} full trainings, {workers} workers, {len(cases)} problems, {seeds} seeds"
        yield f"\n{searched}, {kind} default configuration\n"
        yield from overall(comparisons)
        yield ""
        yield from by_problem(comparisons)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lcbench", type=Path, metavar="DIR", help="folder with the files of LCBench; default: live problems"
    )
    parser.add_argument("--noise", type=float, default=NOISE, help="of LCBench, in percentage points")
    parser.add_argument("--use", choices=["tuning", "held out"], default="tuning")
    parser.add_argument("--problems", nargs="+", help="names, or numbers of tasks; default: all")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(COMPARED))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--trainings", nargs="+", type=int, default=[50], help="budget in full trainings")
    parser.add_argument("--workers", nargs="+", type=int, default=[8], help="simulated workers per search")
    parser.add_argument("--default", choices=list(DEFAULTS), help="of LCBench: quality of the configuration run first")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if given.lcbench and (missing := [name for name in FILES if not (given.lcbench / name).is_file()]):
        parser.error(f"--lcbench {given.lcbench} has no {missing[0]}; lcbench.py describes how to get it")
    if given.default and not given.lcbench:
        parser.error("--default needs --lcbench: only its tasks have default configurations")
    cases = lcbench_cases(given.lcbench, given.use, given.noise) if given.lcbench else live_cases(given.use)
    names = [case.name for case in cases]
    if unknown := [name for name in given.problems or () if name not in names]:
        parser.error(f"--problems {unknown[0]} is not {given.use}; choose from {' '.join(names)}")
    cases = [case for case in cases if case.name in (given.problems or names)]
    ways = list(dict.fromkeys([BASELINE, *given.ways]))
    searches = [
        Search(case, way, seed, trainings, workers, given.default)
        for seed in range(given.seeds)  # outermost, so that an interrupted run has all methods
        for trainings in given.trainings
        for workers in given.workers
        for case in cases
        for way in ways
    ]
    found = run_all(search, searches, given.processes)
    for line in tables(cases, found, ways):
        print(line, flush=True)


if __name__ == "__main__":
    main()
