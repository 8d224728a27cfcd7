"""Compare searches with five folds and with one split on small data, at equal numbers of trained epochs:

    python -m benchmarks.small_data [--data NAME ...] [--studies 20] [--raw FILE] [--from FILE]

Each study draws its samples or its split. It searches with Optuna's TPE and without pruning: 40 trials on one split, or
8 trials of five models each. The output has the test score of the model that `promote` registers, which is the ensemble
of the folds or the model of the best trial, and the overstatement: the best value of the search minus that test score.
The test score is measured on 20,000 new samples where a generator draws the data, else on the test split.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import optuna
import torch

from benchmarks.overstatement import Mixture, Small, evaluate_model
from hpsearch import Splits
from hpsearch.objectives.fit import fit
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.data.split_rows import Rows
from hpsearch.search.samplers.suggest import derive_seed

EPOCHS, TRIALS, FOLDS = 20, 40, 5
WAYS = {"one split": (None, TRIALS), "five folds": (FOLDS, TRIALS // FOLDS)}  # folds and number of trials
POINT = 100  # a point is a hundredth of the metric


class BuiltIn(Small):
    """A data set of scikit-learn, with 40 % of its samples as the test split."""

    reserve_size: ClassVar[int] = 0

    def drawn(self, study: int, samples: int) -> tuple[Rows, Rows, Rows | None]:
        from sklearn import datasets

        found = getattr(datasets, f"load_{self.name}")()
        y = found.target
        return found.data, ((y - y.mean()) / y.std()).astype(np.float32) if self.metric == "r2" else y, None

    def data(self, seed: int) -> Splits:
        x, y, _ = self.drawn(self.study, 0)
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

    def drawn(self, study: int, samples: int) -> tuple[Rows, Rows, Rows | None]:
        rng = np.random.default_rng([31, study + 1])
        x = rng.random((samples, 10))
        value = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
        return x, ((value + rng.normal(size=samples) - 14.4) / 5).astype(np.float32), None


DATA: dict[str, type[Small]] = {cls.name: cls for cls in (Wine, Diabetes, BreastCancer, SmallMixture, Friedman)}


def study(given: tuple[str, int]) -> dict[str, dict[str, float]]:
    """Run a study in both ways; return the best value of the search and the test score of its model by way."""
    name, number = given
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    found = {}
    for way, (folds, trials) in WAYS.items():
        objective = DATA[name](number)
        search = optuna.create_study(
            direction=objective.direction, sampler=optuna.samplers.TPESampler(seed=derive_seed(number, "sampler"))
        )
        best: dict[str, Any] = {"value": -math.inf}

        def train(trial: optuna.Trial) -> float:
            config = objective.configure(trial)  # noqa: B023 used in this iteration only
            plan = RunPlan(EPOCHS, derive_seed(number, "trial", trial.number), number, folds=folds)  # noqa: B023
            result = fit(objective, config, plan, device="cpu")  # noqa: B023
            if result.best_value > best["value"]:  # noqa: B023
                best.update(value=result.best_value, config=config, result=result)  # noqa: B023
            return result.best_value

        search.optimize(train, n_trials=trials)
        splits = objective.data(number)
        unseen = objective.reserve() if objective.reserve_size else splits.test
        test = evaluate_model(objective, best["config"], best["result"], splits, unseen)
        found[way] = {"search": best["value"], "test": test}
    return found


def format_mean(values: list[float]) -> str:
    """Return the mean and its standard error in points."""
    return f"{POINT * statistics.fmean(values):+.2f} ± {POINT * statistics.stdev(values) / math.sqrt(len(values)):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=list(DATA), default=list(DATA))
    parser.add_argument("--studies", type=int, default=20)
    parser.add_argument("--raw", type=Path, help="file to write the scores to")
    parser.add_argument("--from", dest="read", type=Path, help="file of --raw to read instead of running studies")
    given = parser.parse_args()
    raw: dict[str, list[dict[str, dict[str, float]]]] = json.loads(given.read.read_text()) if given.read else {}
    if not given.read:
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            for name in given.data:
                raw[name] = []
                for found in pool.map(study, [(name, number) for number in range(given.studies)]):
                    raw[name].append(found)
                    print(f"{name}: {len(raw[name])} of {given.studies}", file=sys.stderr, flush=True)
                    if given.raw:
                        given.raw.write_text(json.dumps(raw))
    for name, studies in raw.items():
        split, folds = ([each[way] for each in studies] for way in WAYS)
        gain = [b["test"] - a["test"] for a, b in zip(split, folds, strict=True)]
        over = [[each["search"] - each["test"] for each in way] for way in (split, folds)]
        print(
            f"{name} ({DATA[name].metric}), {len(studies)} studies: test score, one split "
            f"{statistics.fmean(each['test'] for each in split):.4f}, five folds "
            f"{statistics.fmean(each['test'] for each in folds):.4f}, difference {format_mean(gain)} points; "
            f"overstatement {format_mean(over[0])} and {format_mean(over[1])} points"
        )


if __name__ == "__main__":
    main()
