"""Train learning curves of this repository's objectives, each to its full length.

    python -m benchmarks.search_quality.curves [digits ...] [--configurations N]

The curves are in `data`, a part of the repository: the command need not be run again. It resumes if it was interrupted.
Two of three configurations are random; TPE suggests the third, so that there are enough good ones to compare methods.
Training uses one core. A configuration that diverges has no later values.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import math
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import optuna
import torch

from benchmarks.search_quality.problems import PROBLEMS, Problem
from hpsearch import NonFiniteError
from hpsearch.objectives.fit import fit
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.session import MidEpochAction, Verdict
from hpsearch.search.samplers.suggest import derive_seed

DATA = Path(__file__).parent / "data"
CHOSEN_EVERY = 3  # TPE suggests each third configuration


@dataclass
class Curve:
    """One training: its parameters, the metric after each epoch (NaN after it diverged) and its duration."""

    configuration: int
    seed: int
    params: dict[str, Any]
    values: list[float]
    seconds: float

    @property
    def chosen(self) -> bool:
        """Whether TPE suggested the configuration; otherwise it is random."""
        return self.configuration % CHOSEN_EVERY == CHOSEN_EVERY - 1


@dataclass
class Kept:
    """A session that keeps only the metric of each epoch."""

    run_dir = shards = curve = None
    metric: str
    values: list[float] = field(default_factory=list)

    def restore(self) -> None:
        return None

    def save(self, state: dict[str, Any], *, best: bool) -> None:
        pass

    def mid_epoch_action(self, left: Any) -> MidEpochAction:
        return MidEpochAction.NONE

    def save_mid_epoch(self, state: dict[str, Any]) -> None:
        pass

    def report(self, record: EpochRecord) -> Verdict:
        self.values.append(record.metrics[f"val_{self.metric}"])
        return Verdict.CONTINUE

    def log(self, path: Path) -> None:
        pass


@cache
def read_curves(name: str) -> list[Curve]:
    """Return the curves of an objective in the order of their training; an empty list without a file."""
    try:
        text = gzip.decompress((DATA / f"{name}.csv.gz").read_bytes()).decode()
    except FileNotFoundError:
        return []
    return [
        Curve(int(number), int(seed), json.loads(params), [float(value or "nan") for value in values], float(seconds))
        for number, seed, seconds, params, *values in list(csv.reader(io.StringIO(text)))[1:]
    ]


def write_curves(name: str, curves: list[Curve]) -> None:
    """Replace the file of an objective atomically."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    epochs = PROBLEMS[name].epochs
    writer.writerow(["configuration", "seed", "seconds", "params", *range(1, epochs + 1)])
    for curve in curves:
        values = ["" if math.isnan(value) else f"{value:.6g}" for value in curve.values]
        first = [curve.configuration, curve.seed, f"{curve.seconds:.2f}", json.dumps(curve.params)]
        writer.writerow([*first, *values])
    path = DATA / f"{name}.csv.gz"
    new = path.with_suffix(".new")
    new.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    new.replace(path)


def make(name: str, configurations: int) -> None:
    """Train the missing ones of the first `configurations` of an objective."""
    problem = PROBLEMS[name]
    curves = list(read_curves(name))
    done = {(curve.configuration, curve.seed) for curve in curves}
    jobs = [job for job in problem.jobs if job not in done and job[0] < configurations]
    for left, (number, seed) in zip(range(len(jobs) - 1, -1, -1), jobs, strict=True):
        curves.append(train(name, problem, curves, number, seed))
        write_curves(name, curves)
        seconds = left * sum(curve.seconds for curve in curves) / len(curves)
        print(f"{name}: {len(curves)} trained, {left} left ({seconds:.0f} s)", file=sys.stderr, flush=True)
    read_curves.cache_clear()


def train(name: str, problem: Problem, before: list[Curve], number: int, seed: int) -> Curve:
    """Train one configuration, which depends only on the curves before it."""
    objective = problem.objective()
    twin = next((curve for curve in before if curve.configuration == number), None)
    trial: Any = optuna.trial.FixedTrial(twin.params) if twin else suggest_trial(name, problem, before, number)
    config = objective.configure(trial)
    session = Kept(objective.metric)
    plan = RunPlan(problem.epochs, derive_seed(name, number, seed), 0)
    started = time.perf_counter()
    try:
        fit(objective, config, plan, session=session, device="cpu")
    except NonFiniteError as error:
        print(f"{name} {number}: {error}", file=sys.stderr)
    missing = [math.nan] * (problem.epochs - len(session.values))
    return Curve(number, seed, dict(trial.params), session.values + missing, time.perf_counter() - started)


def suggest_trial(name: str, problem: Problem, before: list[Curve], number: int) -> optuna.Trial:
    """Suggest a new configuration."""
    seed = derive_seed(name, "configuration", number)
    chosen = number % CHOSEN_EVERY == CHOSEN_EVERY - 1
    sampler = optuna.samplers.TPESampler(seed=seed) if chosen else optuna.samplers.RandomSampler(seed)
    study = optuna.create_study(direction=problem.objective.direction, sampler=sampler)
    for curve in before:
        fixed = optuna.trial.FixedTrial(curve.params)
        problem.objective().configure(fixed)
        ended = math.isfinite(curve.values[-1])
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.COMPLETE if ended else optuna.trial.TrialState.PRUNED,
                value=curve.values[-1] if ended else None,
                params=curve.params,
                distributions=fixed.distributions,
            )
        )
    return study.ask()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objectives", nargs="*", choices=[*PROBLEMS, []], help="default: all")
    parser.add_argument("--configurations", type=int, default=10**9, help="maximum number per objective")
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    for name in given.objectives or PROBLEMS:
        make(name, given.configurations)


if __name__ == "__main__":
    main()
