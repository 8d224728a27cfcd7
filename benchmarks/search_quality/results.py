"""Simulate searches, each kept in a file, and compare them with the baseline."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.search_quality.problems import PROBLEMS
from benchmarks.search_quality.simulation import History, Simulation
from benchmarks.search_quality.surrogates import Family, made_of, surrogate
from benchmarks.search_quality.ways import BASELINE, make
from hpsearch.search.study.enqueue import default_params

HERE = Path(__file__).parent
PRODUCTION = HERE.parents[1] / "src/hpsearch"
KEPT = Path("runs/search_quality/results")  # not part of the repository

BEYOND = 1.5  # length of a search in budgets: slower searches reach the target after the budget
RESAMPLES = 500


@dataclass(frozen=True)
class Setting:
    """The parameters that all searches of a table share.

    Attributes:
        budget: epochs after which the baseline sets the target.
        workers: number of simulated workers of a search.
        default_first: whether each search runs the default configuration of the objective first, as hpsearch does.
    """

    budget: int
    workers: int
    default_first: bool = False

    @property
    def end(self) -> int:
        """The epochs after which a search ends; one that has not reached the target counts as reaching it then."""
        return int(BEYOND * self.budget)


@dataclass(frozen=True)
class Search:
    """One simulated search."""

    objective: str
    family: Family
    way: str
    seed: int


def search(one: Search, setting: Setting) -> History:
    """Return the history of a search from its file, or simulate it."""
    path = KEPT / f"{digest(one, setting)}.json"
    if path.exists():
        return History(**json.loads(path.read_text())["history"])
    problem = PROBLEMS[one.objective]
    training = surrogate(one.objective, one.family)
    default = default_params(problem.objective()) if setting.default_first else None
    way = make(one.way, replace(problem, default=default), one.seed)
    history = Simulation(way, training, problem.maximize, setting.workers, setting.end, one.seed).run()
    KEPT.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"search": asdict(one), "setting": asdict(setting), "history": asdict(history)}))
    new.replace(path)
    return history


def digest(one: Search, setting: Setting) -> str:
    """Return the name of a search's file, which depends on the curves, the simulation and the code of the method."""
    text = json.dumps([asdict(one), asdict(setting), made_of(one.objective), digest_code(one.way)])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@cache
def digest_code(way: str) -> str:
    """Return a digest of the code of the simulation and of a method."""
    sources = [HERE / name for name in ("simulation.py", "optuna_study.py", "space.py")]
    if not way.startswith("hpsearch"):
        sources.append(HERE / "peers.py")
    else:
        sources += [HERE / "production.py", HERE / "stored.py"]
        packages = ("search/freeze_thaw", "search/samplers", "search/pruners", "storage/rungs")
        sources += [path for package in packages for path in sorted((PRODUCTION / package).rglob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


@dataclass(frozen=True)
class Cell:
    """All searches on one surrogate: histories by method, in the order of the seeds."""

    objective: str
    family: Family
    histories: dict[str, list[History]]

    @property
    def maximize(self) -> bool:
        return PROBLEMS[self.objective].maximize

    def target(self, setting: Setting, seeds: np.ndarray) -> float:
        """Return the quality of the baseline at the end of the budget; the median over seeds."""
        return float(np.median([self.histories[BASELINE][seed].at(setting.budget) for seed in seeds]))

    def arrivals(self, way: str, target: float, setting: Setting, seeds: np.ndarray) -> list[float]:
        """Return the epochs until each search of a method reached the target; infinity if it did not."""
        arrived = [self.histories[way][seed].reached(target, maximize=self.maximize) for seed in seeds]
        return [math.inf if epochs is None else float(epochs) for epochs in arrived]

    def ratio(self, way: str, setting: Setting, seeds: np.ndarray) -> float:
        """Return the log ratio of the epochs to the target: those of a method over those of the baseline."""
        target = self.target(setting, seeds)
        mine, base = (
            np.log(np.minimum(self.arrivals(one, target, setting, seeds), setting.end)) for one in (way, BASELINE)
        )
        return float(np.mean(mine) - np.mean(base))


@dataclass(frozen=True)
class Ratio:
    """The ratio of epochs to the target, of a method over the baseline: geometric mean and 95 % interval."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio(way: str, cells: list[Cell], setting: Setting) -> Ratio:
    """Compare a method with the baseline; the interval is a bootstrap over objectives and, in each, over seeds.

    The surrogates of one objective are resampled together: they are fitted to the same curves.
    """
    by_objective: dict[str, list[Cell]] = {}
    for cell in cells:
        by_objective.setdefault(cell.objective, []).append(cell)
    names = list(by_objective)
    all_seeds = np.arange(len(cells[0].histories[way]))
    random = np.random.default_rng(0)
    means = []
    for _ in range(RESAMPLES):
        drawn = [by_objective[name] for name in random.choice(names, len(names))]
        logs = [cell.ratio(way, setting, random.choice(all_seeds, len(all_seeds))) for group in drawn for cell in group]
        means.append(np.mean(logs))
    middle = float(np.mean([cell.ratio(way, setting, all_seeds) for cell in cells]))
    low, high = np.percentile(means, [2.5, 97.5])
    return Ratio(math.exp(middle), math.exp(low), math.exp(high))


def share_arrived(way: str, cells: list[Cell], setting: Setting) -> float:
    """Return the share of searches of a method that reached the target."""
    seeds = np.arange(len(cells[0].histories[way]))
    arrived = [
        math.isfinite(epochs)
        for cell in cells
        for epochs in cell.arrivals(way, cell.target(setting, seeds), setting, seeds)
    ]
    return float(np.mean(arrived))
