"""Measure the epochs that multi-objective search methods need for the final hypervolume of other tools.

    python -m benchmarks.search_quality.several.run [--objectives gan ...] [--seeds 20] [--ways NAME ...]

A search of a peer has the whole budget; one of hpsearch ends when it reaches the hypervolume of the best peer. The
target of a peer is the largest hypervolume of its front at any time. The kinds of surrogates alternate between seeds.
Searches are kept in `runs/search_quality/several`.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.search_quality.problems import PROBLEMS
from benchmarks.search_quality.several.problems import SECONDS, reference, two_metrics
from benchmarks.search_quality.several.simulation import SeveralMetrics, Worth
from benchmarks.search_quality.several.ways import OURS, PEERS, WAYS, make
from benchmarks.search_quality.surrogates import FAMILIES, Family, made_of, surrogate

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
KEPT = Path("runs/search_quality/several")  # not part of the repository

RESAMPLES = 1000


@dataclass(frozen=True)
class Search:
    """One simulated search; `enough` is that of `SeveralMetrics`."""

    objective: str
    family: Family
    way: str
    seed: int
    budget: int
    workers: int
    enough: float = math.inf

    @property
    def cell(self) -> tuple[str, Family]:
        return self.objective, self.family


@dataclass(frozen=True)
class Found:
    """The result of a search: quality of the front, trials begun, full trials, epochs, and CPU time of decisions."""

    worth: Worth
    trials: int
    full: int
    epochs: int
    seconds: float


def search(one: Search) -> Found:
    """Return the result of a search from its file, or simulate it."""
    path = KEPT / f"{digest(one)}.json"
    if path.exists():
        kept = json.loads(path.read_text())["found"]
        return Found(**{**kept, "worth": Worth(**kept["worth"])})
    training = two_metrics(*one.cell)
    simulation = SeveralMetrics(
        make(one.way, training, one.seed),
        training,  # type: ignore[arg-type]  # values are vectors
        training.maximize[0],
        one.workers,
        one.budget,
        one.seed,
        higher=training.maximize,
        reference=reference(*one.cell),
        enough=one.enough,
    )
    history = simulation.run()
    found = Found(simulation.worth, history.trials, history.full, history.epochs, history.seconds)
    KEPT.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"search": asdict(one), "found": asdict(found)}))
    new.replace(path)
    return found


def digest(one: Search) -> str:
    """Return the name of a search's file, which depends on the curves, the simulation and the code of the method."""
    sources = [HERE / name for name in ("problems.py", "simulation.py")] + [HERE.parent / "simulation.py"]
    if one.way in OURS:
        sources += [HERE / "production.py", ROOT / "storage/rungs/fronts.py"]
        packages = ("freeze_thaw", "samplers", "pruners") if "random" not in one.way else ("pruners",)
        sources += [ROOT / "search/samplers/optuna.py"] if "tpe" in one.way else []
        sources += [path for package in packages for path in sorted((ROOT / "search" / package).glob("*.py"))]
    else:
        sources.append(HERE / "peers.py")
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    text = json.dumps([asdict(one), made_of(one.objective), code])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def simulate(searches: list[Search], pool: ProcessPoolExecutor) -> dict[Search, Found]:
    """Run all searches; print a line of progress each minute."""
    found: dict[Search, Found] = {}
    said = time.monotonic()
    for one, each in zip(searches, pool.map(search, searches), strict=True):
        found[one] = each
        if time.monotonic() - said > 60:
            said = time.monotonic()
            print(f"{len(found)} of {len(searches)} searches", file=sys.stderr, flush=True)
    return found


@dataclass(frozen=True)
class Ratio:
    """The epochs to a peer's target, relative to its budget: median over objectives and seeds, and 95 % interval."""

    middle: float
    low: float
    high: float
    arrived: float

    def __str__(self) -> str:
        shown = [f"{value:.2f}" if math.isfinite(value) else "over 1" for value in (self.middle, self.low, self.high)]
        return f"{shown[0]} [{shown[1]}, {shown[2]}] ({self.arrived:.0%})"


def ratio(mine: dict[str, np.ndarray]) -> Ratio:
    """Return the median ratio, from ratios [seeds] by objective; the bootstrap is over objectives, then over seeds."""
    random, names = np.random.default_rng(0), list(mine)
    medians = []
    for _ in range(RESAMPLES):
        drawn = [mine[name] for name in random.choice(names, len(names))]
        medians.append(_median(np.concatenate([random.choice(each, len(each)) for each in drawn])))
    every = np.concatenate(list(mine.values()))
    low, high = (float(np.sort(medians)[round(q * (RESAMPLES - 1))]) for q in (0.025, 0.975))
    return Ratio(_median(every), low, high, float(np.isfinite(every).mean()))


def _median(values: np.ndarray) -> float:
    """Return the median, the upper of the two middle values: values may be infinite, so they are not averaged."""
    return float(np.sort(values)[len(values) // 2])


def table(found: dict[Search, Found], ways: list[str], peers: list[str]) -> Iterator[str]:
    """Yield the lines of the table, one per method: its ratio to each peer, lower is better."""
    yield f"| method | {' | '.join(peers)} | trials | full | decisions, s per 1,000 epochs |"
    yield "|---" * (len(peers) + 4) + "|"
    for way in ways:
        columns = [str(ratio(ratios(found, way, peer))) for peer in peers]
        every = [each for one, each in found.items() if one.way == way]
        seconds = 1000 * sum(each.seconds for each in every) / sum(each.epochs for each in every)
        numbers = [f"{np.mean([getattr(each, name) for each in every]):.0f}" for name in ("trials", "full")]
        yield f"| {way} | {' | '.join([*columns, *numbers])} | {seconds:.1f} |"


def ratios(found: dict[Search, Found], way: str, peer: str) -> dict[str, np.ndarray]:
    """Return the epochs to the target of a peer's search with the same seed, relative to its budget, by objective."""
    mine = {(one.objective, one.seed): each for one, each in found.items() if one.way == way}
    ratios: dict[str, list[float]] = {}
    for one, theirs in found.items():
        if one.way == peer:
            arrived = mine[one.objective, one.seed].worth.reached(theirs.worth.max_volume(one.budget))
            ratios.setdefault(one.objective, []).append(math.inf if arrived is None else arrived / one.budget)
    return {objective: np.array(each) for objective, each in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    held_out = [name for name, problem in PROBLEMS.items() if problem.use == "held out"]
    parser.add_argument("--objectives", nargs="+", choices=list(SECONDS), default=held_out)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(OURS)[:4])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0, help="use 1000 and above for design choices")
    parser.add_argument("--budget", type=int, default=2700, help="number of epochs (2700: a hundred full trials)")
    parser.add_argument("--workers", type=int, default=8, help="simulated workers per search")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    for cell in itertools.product(given.objectives, given.families):
        surrogate(*cell)  # fit once for all processes
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    turns = list(zip(seeds, itertools.cycle(given.families), strict=False))
    rest = (given.budget, given.workers)
    every = [Search(objective, family, "", seed, *rest) for seed, family in turns for objective in given.objectives]
    with ProcessPoolExecutor(given.processes) as pool:
        found = simulate([replace(each, way=way) for each in every for way in given.peers], pool)
        most = {
            each: max(found[replace(each, way=way)].worth.max_volume(each.budget) for way in given.peers)
            for each in every
        }
        found |= simulate([replace(each, way=way, enough=most[each]) for each in every for way in given.ways], pool)
    print(f"seeds {seeds.start} to {seeds.stop - 1}, {given.workers} workers, {given.budget} epochs\n")
    for line in table(found, [*given.peers, *given.ways], given.peers):
        print(line, flush=True)


if __name__ == "__main__":
    main()
