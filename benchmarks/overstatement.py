"""By how much the number beside a winner is better than what new data show, over many small studies.

    python -m benchmarks.overstatement [--objectives NAME ...] [--studies 20] [--raw FILE] [--from FILE]

Each study draws its own samples, searches with Optuna's TPE, and trains its best configurations again: on fresh seeds
and the study's division (as finalists were trained before), and on fresh seeds and fresh divisions. A reserve of
samples that no study sees tells what the winner's model, the one of the search that would be promoted, is worth.
It prints, for each objective, by how many points (hundredths of the metric) each number is better than that, how good
the crowned are, and how often the interval has the score of the study's own sealed test set.

How hard a validation split happens to be is most of the noise, and says nothing of over-statement. A reference model,
trained once on a part of the reserve, tells it: what it scores on a split above its own worth has the mean zero over
studies, whatever they choose, and is taken off each number (a control variate).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import matplotlib as mpl
import numpy as np
import optuna
import torch
from torch import nn

from hpsearch import Dataset, Splits, Standardize, TrainConfig, Trainer, evaluate
from hpsearch.objectives.objective import Objective
from hpsearch.objectives.search_space import TrialProtocol
from hpsearch.objectives.training.checks.held_out import RestoredModel
from hpsearch.objectives.training.data.split_rows import Rows
from hpsearch.objectives.training.evaluation.metrics import as_metrics
from hpsearch.objectives.training.loop.prepare import prepare_splits
from hpsearch.objectives.training.result import FitResult
from hpsearch.search.finalists.winner import RunScore, estimate_test_score, select_winner
from hpsearch.search.samplers.suggest import derive_seed
from hpsearch.search.study.ranking import best_first

EPOCHS, TRIALS, TOP, SEEDS = 15, 24, 5, 2
RESERVE = 100_000
POINT = 100  # a point is a hundredth of the metric


class Small(Objective):
    """A small problem of tables: `drawn` says what its samples are."""

    epochs: ClassVar[int] = EPOCHS
    samples: ClassVar[int] = 1000  # of a study
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, study: int = 0) -> None:
        super().__init__()
        self.study = study

    def drawn(self, study: int, samples: int) -> tuple[Rows, Rows, Rows | None]:
        """Inputs, targets, and groups of so many samples; of study -1 the reserve."""
        raise NotImplementedError

    def suggest(self, trial: TrialProtocol) -> TrainConfig:
        return TrainConfig(
            lr=trial.suggest_float("lr", 1e-4, 3e-2, log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-5, 1e-1, log=True),
            batch_size=trial.suggest_categorical("batch_size", [16, 32, 64]),
            model={
                "layers": trial.suggest_int("layers", 0, 2),
                "width": trial.suggest_int("width", 16, 128, log=True),
                "dropout": trial.suggest_float("dropout", 0.0, 0.5),
            },
        )

    def data(self, seed: int) -> Splits:
        x, y, groups = self.drawn(self.study, self.samples)
        return Splits.make(x, y, seed=seed, groups=groups)

    def reserve(self) -> Dataset:
        """What no study sees."""
        x, y, _ = self.drawn(-1, RESERVE)
        return Splits.make(x, y, seed=0, val=0.001, test=0.001, stratify=False).train

    def reference(self) -> tuple[FitResult, TrainConfig, Dataset]:
        """A model of a part of the reserve, and the rest."""
        reserve = self.reserve()
        cut = min(len(reserve) // 2, 5000)
        own = copy.copy(self)
        own.data = lambda seed: Splits(  # type: ignore[method-assign]
            reserve.take(torch.arange(cut - 200)),
            reserve.take(torch.arange(cut - 200, cut)),
            reserve.take(torch.arange(cut, cut + 200)),
        )
        config = TrainConfig(lr=3e-3, batch_size=64, model={"layers": 1, "width": 64, "dropout": 0.1})
        rest = reserve.take(torch.arange(cut, len(reserve)))
        return Trainer(own, config, epochs=EPOCHS, seed=0, device="cpu").fit(), config, rest

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        layers, width, dropout = (config.model[name] for name in ("layers", "width", "dropout"))
        before, net = train.x[0].numel(), nn.Sequential(Standardize.fit(train.x), nn.Flatten())
        for _ in range(layers):
            net.extend([nn.Linear(before, width), nn.ReLU(), nn.Dropout(dropout)])
            before = width
        outputs = 1 if train.y.dtype.is_floating_point else int(train.y.max()) + 1
        return net.append(nn.Linear(before, outputs))


class Mixture(Small):
    """Five classes of three Gaussians each in 12 dimensions, 5 % of the labels at random."""

    name: ClassVar[str] = "mixture"
    metric = "accuracy"

    def drawn(self, study: int, samples: int) -> tuple[Rows, Rows, Rows | None]:
        centres = 1.1 * np.random.default_rng(7).normal(size=(15, 12))
        rng = np.random.default_rng([11, study + 1])
        which = rng.integers(15, size=samples)
        x = centres[which] + rng.normal(size=(samples, 12))
        labels = np.where(rng.random(samples) < 0.05, rng.integers(5, size=samples), which % 5)
        return x, labels, None


class Rare(Small):
    """One in ten is positive, by a curved border in 10 dimensions; judged by AUROC."""

    name: ClassVar[str] = "rare"
    metric = "auroc"

    def drawn(self, study: int, samples: int) -> tuple[Rows, Rows, Rows | None]:
        rng = np.random.default_rng([13, study + 1])
        x = rng.normal(size=(samples, 10))
        score = x[:, 0] * x[:, 1] + np.abs(x[:, 2]) + 0.5 * x[:, 3] + rng.normal(size=samples)
        return x, (score > 2.6).astype(np.int64), None


class Patients(Small):
    """Five samples of each of 200 patients, whose effect on the value is their own; judged by R2."""

    name: ClassVar[str] = "patients"
    metric = "r2"

    def drawn(self, study: int, samples: int) -> tuple[Rows, Rows, Rows | None]:
        rng = np.random.default_rng([17, study + 1])
        groups = np.arange(samples) // 5
        who = rng.normal(size=(samples // 5, 3))[groups]
        x = np.concatenate([rng.random((samples, 5)), who + 0.1 * rng.normal(size=who.shape)], axis=1)
        value = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
        y = value + 2 * who[:, 0] * who[:, 1] + rng.normal(size=samples)
        return x, y.astype(np.float32), groups


class Scans(Small):
    """scikit-learn's digits: 800 of them for a study, all the others for its reserve."""

    name: ClassVar[str] = "scans"
    samples: ClassVar[int] = 800
    metric = "accuracy"

    def drawn(self, study: int, samples: int) -> tuple[Rows, Rows, Rows | None]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.default_rng([19, self.study + 1]).permutation(len(digits.target))
        rows = order[:samples] if study >= 0 else order[self.samples :]
        return digits.data[rows], digits.target[rows], None


OBJECTIVES: dict[str, type[Small]] = {cls.name: cls for cls in (Mixture, Rare, Patients, Scans)}


@dataclass
class Finalist:
    """A configuration that the search found, and what was made of it.

    Attributes:
        search: what the search said.
        test: of the search's model on the study's test split.
        truth: of the search's model on the reserve.
        seeds: best values on fresh seeds, on the study's division.
        divisions: best values on fresh seeds and divisions.
        scores: of the same runs by cross-fitting: value, error, and sizes of train, validation and test.
        ease: by how much the reference is better than it is worth, on the study's validation split and the divisions'.
    """

    search: float
    test: float
    truth: float
    seeds: list[float]
    divisions: list[float]
    scores: list[tuple[float, float | None, tuple[int, int, int]]]
    ease: tuple[float, float]


def study(given: tuple[str, int]) -> list[dict[str, Any]]:
    """A study with its finalists, the search's best first."""
    name, number = given
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    objective = OBJECTIVES[name](number)
    sampler = optuna.samplers.TPESampler(seed=derive_seed(number, "sampler"))
    search = optuna.create_study(direction=objective.direction, sampler=sampler)
    found: dict[int, FitResult] = {}
    configs: dict[int, TrainConfig] = {}

    def one(trial: optuna.Trial) -> float:
        configs[trial.number] = objective.configure(trial)
        found[trial.number] = fit(objective, configs[trial.number], derive_seed(number, "trial", trial.number), number)
        return found[trial.number].best_value

    search.optimize(one, n_trials=TRIALS)
    reserve = objective.reserve()
    reference, like, rest = objective.reference()
    splits = objective.data(number)
    fresh = [derive_seed(number, "finalists", index) for index in range(SEEDS)]
    divisions = [derive_seed(number, "division", seed) for seed in fresh]
    parts = [prepare_splits(objective, number, division)[0].val for division in [None, *divisions]]
    worth = judged(objective, like, reference, splits, rest)
    own, *others = (judged(objective, like, reference, splits, part) - worth for part in parts)
    values = {trial: result.best_value for trial, result in found.items()}
    finalists = []
    for trial in best_first(values, maximize=objective.direction == "maximize")[:TOP]:
        config, result = configs[trial], found[trial]
        again = [fit(objective, config, seed, number) for seed in fresh]
        anew = [fit(objective, config, seed, number, division) for seed, division in zip(fresh, divisions, strict=True)]
        scored = [run.resplit_score for run in anew if run.resplit_score is not None]
        finalists.append(
            Finalist(
                search=result.best_value,
                test=RestoredModel(objective, config, splits, result.model).test()[objective.metric],
                truth=judged(objective, config, result, splits, reserve),
                seeds=[run.best_value for run in again],
                divisions=[run.best_value for run in anew],
                scores=[(score.value, score.error, score.sizes) for score in scored],
                ease=(own, statistics.fmean(others)),
            )
        )
    return [asdict(finalist) for finalist in finalists]


def fit(
    objective: Objective, config: TrainConfig, seed: int, split_seed: int, division: int | None = None
) -> FitResult:
    return Trainer(
        objective, config, epochs=EPOCHS, seed=seed, split_seed=split_seed, resplit_seed=division, device="cpu"
    ).fit()


def judged(objective: Objective, config: TrainConfig, result: FitResult, splits: Splits, data: Dataset) -> float:
    metrics = as_metrics(objective.metrics(splits.train), objective.metric)
    loss = objective.loss(config, splits.train)
    return evaluate(result.model, data, loss, metrics, batch_size=5000, device="cpu")[objective.metric]


def told(name: str, studies: list[list[Finalist]]) -> dict[str, list[float]]:
    """Print what came of an objective's studies, and return by how many points each number over-stated."""
    ways: dict[str, list[float]] = {}
    worth: dict[str, list[float]] = {}
    inside, width = [], []

    def note(way: str, number: float, finalist: Finalist, *, anew: bool) -> None:
        ways.setdefault(way, []).append(POINT * (number - finalist.truth - finalist.ease[anew]))
        worth.setdefault(way, []).append(finalist.truth)

    for finalists in studies:
        note("the search's best", finalists[0].search, finalists[0], anew=False)
        tables = {
            "fresh seeds": [f.seeds for f in finalists],
            "fresh divisions": [f.divisions for f in finalists],
            "fresh divisions, cross-fitted": [[value for value, _, _ in f.scores] for f in finalists],
        }
        for way, table in tables.items():
            choice = select_winner(dict(enumerate(table)), maximize=True)
            winner = choice.winner
            assert winner is not None
            note(way, statistics.fmean(table[winner]), finalists[winner], anew=way != "fresh seeds")
        runs = {
            number: [RunScore(value, error, *sizes) for value, error, sizes in finalist.scores]
            for number, finalist in enumerate(finalists)
        }
        expected = estimate_test_score(runs, choice, metric=OBJECTIVES[name].metric, maximize=True)
        assert expected is not None
        note("what is expected", expected.mean, finalists[winner], anew=True)
        inside.append(expected.low <= finalists[winner].test <= expected.high)
        width.append(POINT * (expected.high - expected.low))
    print(f"\n{name}: {len(studies)} studies")
    for way, over in ways.items():
        error = statistics.stdev(over) / math.sqrt(len(over)) if len(over) > 1 else math.nan
        print(
            f"  {way:32} over by {statistics.fmean(over):+6.2f} +- {error:.2f} points, "
            f"above in {sum(o > 0 for o in over):2} of {len(over)}; the crowned are worth "
            f"{statistics.fmean(worth[way]):.4f}"
        )
    print(
        f"  the interval has the test score in {sum(inside)} of {len(inside)}; it is {statistics.fmean(width):.1f} wide"
    )
    ways["inside"] = [float(found) for found in inside]
    return ways


def draw(each: Mapping[str, Mapping[str, list[float]]], path: Path) -> None:
    """A panel for each objective, a line for each number: its mean over-statement, and two standard errors."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    ways = [way for way in next(iter(each.values())) if way != "inside"]
    figure, axes = plt.subplots(1, len(each), figsize=(2.4 * len(each) + 2, 2.4), sharey=True, layout="constrained")
    for axis, (name, found) in zip(np.atleast_1d(axes), each.items(), strict=True):
        axis.axvline(0, color="black", linewidth=0.8, linestyle=":")
        for place, way in enumerate(reversed(ways)):
            mean, error = statistics.fmean(found[way]), statistics.stdev(found[way]) / math.sqrt(len(found[way]))
            color = "C0" if way == ways[-1] else "0.45"
            axis.plot([mean - 2 * error, mean + 2 * error], [place, place], color=color, linewidth=1.5)
            axis.plot(mean, place, "o", color=color, markersize=5)
        axis.set_title(f"{name} ({OBJECTIVES[name].metric})", fontsize=9)
        axis.set_yticks(range(len(ways)), list(reversed(ways)), fontsize=8)
        axis.tick_params(axis="x", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(
        "points above what the winner's model is worth: mean over studies, two standard errors", fontsize=8
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", nargs="+", choices=list(OBJECTIVES), default=list(OBJECTIVES))
    parser.add_argument("--studies", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first study, which is its seed")
    parser.add_argument("--raw", type=Path, help="where the studies are written")
    parser.add_argument("--figure", type=Path, help="where a picture is drawn")
    parser.add_argument("--from", dest="read", type=Path, help="studies that --raw wrote, in place of new ones")
    given = parser.parse_args()
    if given.read:
        raw = json.loads(given.read.read_text())
    else:
        raw = {}
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            for name in given.objectives:
                raw[name] = []
                numbers = range(given.first, given.first + given.studies)
                for done, found in enumerate(pool.map(study, [(name, number) for number in numbers]), 1):
                    raw[name].append(found)
                    print(f"{name}: {done} of {given.studies}", file=sys.stderr, flush=True)
                if given.raw:
                    given.raw.write_text(json.dumps(raw))
    each = {name: told(name, [[Finalist(**f) for f in found] for found in raw[name]]) for name in raw}
    if given.figure:
        draw(each, given.figure)
    print("\nover all")
    for way in next(iter(each.values())):
        over = [value for ways in each.values() for value in ways[way]]
        what = (
            f"has the test score in {statistics.fmean(over):.1%}"
            if way == "inside"
            else f"{statistics.fmean(over):+.2f}"
        )
        print(f"  {way:32} {what}")


if __name__ == "__main__":
    main()
