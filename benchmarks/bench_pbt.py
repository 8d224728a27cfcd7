"""Compare population-based training with constant configurations, on two problems that need a decaying learning rate.

    python -m benchmarks.bench_pbt [--searches 3]

All searches train the same number of epochs: 8 trials of 20 epochs. `pbt` and `freeze_thaw` with `asha` search
constant learning rates, and `freeze_thaw` with `asha` also searches the peak of a cosine schedule, which is the usual
choice of those who know that the learning rate must decay. The best trial of each search is then trained from scratch
on five new seeds and splits by `finalists`; a trial of `pbt` follows its schedule. The output has the mean over the
searches, and its standard error.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
from typing import Any

from sklearn.datasets import load_digits, make_friedman1
from torch import nn

from hpsearch import Dataset, Objective, Splits, Standardize, Study, TrainConfig

METHODS = {
    "pbt, constant learning rate": ("constant", "pbt"),
    "freeze_thaw + asha, constant learning rate": ("constant", "asha"),
    "freeze_thaw + asha, cosine schedule": ("cosine", "asha"),
}


class _Decaying(Objective):
    metric, direction, epochs, n_trials = "loss", "minimize", 20, 8
    schedule = "constant"

    def suggest(self, trial: Any) -> TrainConfig:
        return TrainConfig(
            optimizer="sgd",
            lr=trial.suggest_float("lr", 1e-3, 0.3, log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-5, 1e-2, log=True),
            batch_size=16,
            schedule=self.schedule,
            model={"dropout": trial.suggest_float("dropout", 0.01, 0.5)},
        )

    def _network(self, config: TrainConfig, train: Dataset, inputs: int, outputs: int) -> nn.Module:
        dropout = nn.Dropout(config.model["dropout"])
        return nn.Sequential(
            Standardize.fit(train.x), nn.Linear(inputs, 64), nn.ReLU(), dropout, nn.Linear(64, outputs)
        )


class Digits(_Decaying):
    """Handwritten digits, 600 samples, with a small batch."""

    def data(self, seed: int) -> Splits:
        x, y = load_digits(return_X_y=True)
        return Splits.make(x[:600].astype("float32"), y[:600], seed=seed)

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        return self._network(config, train, 64, 10)


class Friedman(_Decaying):
    """Regression with noise, 600 samples, with a small batch."""

    def data(self, seed: int) -> Splits:
        x, y = make_friedman1(n_samples=600, noise=1.0, random_state=0)
        y = (y - y.mean()) / y.std()
        return Splits.make(x.astype("float32"), y.astype("float32")[:, None], seed=seed)

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        return self._network(config, train, 10, 1)


class DigitsCosine(Digits):
    """The same with a cosine schedule."""

    schedule = "cosine"


class FriedmanCosine(Friedman):
    """The same with a cosine schedule."""

    schedule = "cosine"


PROBLEMS = {
    "digits": {"constant": Digits, "cosine": DigitsCosine},
    "friedman1": {"constant": Friedman, "cosine": FriedmanCosine},
}


def search(problem: type[Objective], pruner: str, seed: int) -> tuple[float, float]:
    """Return the best value of a search, and the mean of its best trial on five new seeds and splits."""
    name = f"bench-pbt-{secrets.token_hex(4)}"
    study = Study.create(f"benchmarks.bench_pbt:{problem.__name__}", name=name, pruner=pruner, seed=seed)
    study.run_worker()
    table = study.train_finalists(top=1, seeds=5, workers=1)
    mean = table.rows[0].mean
    assert mean is not None
    return study.best_value, mean


def main() -> None:
    """Print a table per problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=3, help="searches per method and problem")
    searches = parser.parse_args().searches
    for problem, by_schedule in PROBLEMS.items():
        for method, (schedule, pruner) in METHODS.items():
            found = [search(by_schedule[schedule], pruner, seed) for seed in range(searches)]
            cells = []
            for values in zip(*found, strict=True):
                error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
                cells.append(f"{statistics.fmean(values):.4f} ± {error:.4f}")
            print(f"{problem:10} {method:45} search {cells[0]}  on new seeds {cells[1]}", flush=True)


if __name__ == "__main__":
    main()
