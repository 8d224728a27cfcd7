"""Compare searches with five folds and with one split on small data, at equal numbers of trained epochs:

    python -m benchmarks.small_data [--data NAME ...] [--studies 20] [--raw FILE] [--from FILE]

Each study draws its samples or its split. It searches with Optuna's TPE and without pruning: 40 trials on one split, 8
trials of five models each, or 20 trials on the first fold, of which the best five get the other folds (which hpsearch
does not offer). The output has the test score of the model that `promote` registers, which is the ensemble of the folds
or the model of the best trial, and the overstatement: the best value of the search minus that test score. The test
score is measured on 20,000 new samples where a generator draws the data, else on the test split.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import optuna
import torch

from benchmarks.overstatement import Mixture, Small, evaluate_model
from hpsearch import Splits, TrainConfig, Trainer
from hpsearch.objectives.fit import fit
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.folds import Fold
from hpsearch.objectives.training.data.split_rows import Rows
from hpsearch.objectives.training.result import RunResult
from hpsearch.search.samplers.suggest import derive_seed
from hpsearch.search.study.ranking import sort_best_first

EPOCHS, FOLDS, TOP = 20, 5, 5
# Number of folds, the fold on which trials train (None: all), and number of trials. Each way trains 40 models.
WAYS: dict[str, tuple[int | None, int | None, int]] = {
    "one split": (None, None, 40),
    "five folds": (FOLDS, None, 8),
    "first fold, then five": (FOLDS, 0, 20),
}
Scores = dict[str, dict[str, float]]  # best value of the search, and test score of its model, by way
POINT = 100  # a point is a hundredth of the metric


class BuiltIn(Small):
    """A data set of scikit-learn, with 40 % of its samples as the test split."""

    reserve_size: ClassVar[int] = 0

    def draw(self, study: int, samples: int) -> tuple[Rows, Rows, Rows | None]:
        from sklearn import datasets

        found = getattr(datasets, f"load_{self.name}")()
        y = found.target
        return found.data, ((y - y.mean()) / y.std()).astype(np.float32) if self.metric == "r2" else y, None

    def data(self, seed: int) -> Splits:
        x, y, _ = self.draw(self.study, 0)
        return Splits.make(x, y, seed=seed, val=0.15, test=0.4)


class Wine(BuiltIn):
    """178 wines of three classes."""

    name: ClassVar[str] = "wine"
    metric = "accuracy"


class Diabetes(BuiltIn):
    """The progression of diabetes in 442 patients."""

    name: ClassVar[str] = "diabetes"
    metric = "r2"


class BreastCancer(BuiltIn):
    """569 tumors of two classes."""

    name: ClassVar[str] = "breast_cancer"
    metric = "auroc"


class SmallMixture(Mixture):
    """500 samples of five classes of three Gaussians each."""

    name: ClassVar[str] = "mixture"
    samples: ClassVar[int] = 500
    reserve_size: ClassVar[int] = 20_000


class Friedman(Small):
    """250 samples of Friedman's first function with noise, in 10 dimensions, of which 5 have no effect."""

    name: ClassVar[str] = "friedman"
    metric = "r2"
    samples: ClassVar[int] = 250
    reserve_size: ClassVar[int] = 20_000

    def draw(self, study: int, samples: int) -> tuple[Rows, Rows, Rows | None]:
        rng = np.random.default_rng([31, study + 1])
        x = rng.random((samples, 10))
        value = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
        return x, ((value + rng.normal(size=samples) - 14.4) / 5).astype(np.float32), None


DATA: dict[str, type[Small]] = {cls.name: cls for cls in (Wine, Diabetes, BreastCancer, SmallMixture, Friedman)}


def prepare_study(name: str, number: int) -> tuple[Small, Splits, Dataset]:
    """Return the objective of a study, its splits, and the samples that measure the test score."""
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    objective = DATA[name](number)
    splits = objective.data(number)
    return objective, splits, objective.reserve() if objective.reserve_size else splits.test


def run_study(given: tuple[str, int]) -> Scores:
    """Run a study in all ways; return the best value of the search and the test score of its model by way."""
    number = given[1]
    objective, splits, unseen = prepare_study(*given)
    found = {}
    for way, (folds, fold, trials) in WAYS.items():
        value, config, result = search(objective, number, folds, fold, trials)
        found[way] = {"search": value, "test": evaluate_model(objective, config, result, splits, unseen)}
    return found


def search(
    objective: Small, number: int, folds: int | None, fold: int | None, n_trials: int
) -> tuple[float, TrainConfig, Any]:
    """Return the best value, its configuration and its result; with `fold`, the best trials get all folds."""
    configs: dict[int, TrainConfig] = {}
    results: dict[int, RunResult] = {}

    def train(trial: int, fold: int | None) -> float:
        plan = RunPlan(EPOCHS, derive_seed(number, "trial", trial), number, folds=folds, fold=fold)
        if fold is None:
            results[trial] = fit(objective, configs[trial], plan, device="cpu")
            return results[trial].best_value
        one = Fold(fold, FOLDS)
        seeds = {"seed": plan.seed, "split_seed": number}
        return Trainer(objective, configs[trial], epochs=EPOCHS, fold=one, device="cpu", **seeds).fit().best_value

    def run(trial: optuna.Trial) -> float:
        configs[trial.number] = objective.configure(trial)
        return train(trial.number, fold)

    sampler = optuna.samplers.TPESampler(seed=derive_seed(number, "sampler"))
    found = optuna.create_study(direction=objective.direction, sampler=sampler)
    found.optimize(run, n_trials=n_trials)
    values = {trial.number: float(trial.value or 0.0) for trial in found.trials}
    if fold is not None:
        values = {trial: train(trial, None) for trial in sort_best_first(values, maximize=True)[:TOP]}
    best = sort_best_first(values, maximize=True)[0]
    return values[best], configs[best], results[best]


def format_mean(values: list[float]) -> str:
    """Return the mean and its standard error in points."""
    return f"{POINT * statistics.fmean(values):+.2f} ± {POINT * statistics.stdev(values) / math.sqrt(len(values)):.2f}"


def run_studies(
    run: Callable[[tuple[str, int]], Scores], jobs: list[tuple[str, int]], *, n_processes: int | None, file: Path | None
) -> dict[str, list[Scores]]:
    """Run a study per job, print the progress, and write the results so far to a file; return them by data set."""
    raw: dict[str, list[Scores]] = {}
    with ProcessPoolExecutor(n_processes) as pool:
        for done, ((name, _), found) in enumerate(zip(jobs, pool.map(run, jobs), strict=True), 1):
            raw.setdefault(name, []).append(found)
            print(f"{done} of {len(jobs)} studies ({name})", file=sys.stderr, flush=True)
            if file is not None:
                file.write_text(json.dumps(raw))
    return raw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=list(DATA), default=list(DATA))
    parser.add_argument("--studies", type=int, default=20)
    parser.add_argument("--raw", type=Path, help="file to write the scores to")
    parser.add_argument("--from", dest="read", type=Path, help="file of --raw to read instead of running studies")
    given = parser.parse_args()
    if given.studies < 2:
        parser.error(f"--studies must be at least 2 for standard errors, not {given.studies}")
    raw: dict[str, list[Scores]] = json.loads(given.read.read_text()) if given.read else {}
    if not given.read:
        jobs = [(name, number) for name in given.data for number in range(given.studies)]
        raw = run_studies(run_study, jobs, n_processes=os.cpu_count(), file=given.raw)
    for name, studies in raw.items():
        print(f"{name} ({DATA[name].metric}), {len(studies)} studies")
        for way in WAYS:
            tests = [each[way]["test"] for each in studies]
            gain = [test - each["one split"]["test"] for test, each in zip(tests, studies, strict=True)]
            over = [each[way]["search"] - each[way]["test"] for each in studies]
            print(
                f"  {way:22} test score {statistics.fmean(tests):.4f}, {format_mean(gain)} points above one split; "
                f"overstatement {format_mean(over)} points"
            )


if __name__ == "__main__":
    main()
