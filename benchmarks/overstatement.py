"""Measure by how much the reported score of a winner is better than its score on new data, over many small studies.

    python -m benchmarks.overstatement [--objectives NAME ...] [--studies 20] [--raw FILE] [--from FILE]

Each study draws new samples, searches with Optuna's TPE, and trains its best configurations again: with new seeds on
the study's data split (as finalists were trained before), and with new seeds on new data splits. The true score is
that of the winner's model from the search, which would be promoted, on a reserve of samples that no study uses. The
output has for each objective by how many points (hundredths of the metric) each reported score is better than the true
score, the true scores of the winners, and how often the interval contains the score on the study's test set.

Most of the noise is the varying difficulty of validation splits, which is not overstatement. It is measured with a
reference model, trained once on a part of the reserve: the difference between its score on a split and its true score
has the mean zero over studies, and is subtracted from each reported score (a control variate).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import matplotlib as mpl
import numpy as np
import optuna
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpsearch import Batch, Dataset, Splits, Standardize, Step, TrainConfig, Trainer, evaluate
from hpsearch.objectives.objective import Objective
from hpsearch.objectives.search_space import TrialProtocol
from hpsearch.objectives.training.checks.restore_best import RestoredModel
from hpsearch.objectives.training.data.split_rows import Rows
from hpsearch.objectives.training.evaluation.metrics import as_metrics
from hpsearch.objectives.training.loop.prepare import prepare_splits
from hpsearch.objectives.training.loop.step_functions import build_step_function
from hpsearch.objectives.training.result import FitResult
from hpsearch.search.finalists.winner import RunScore, estimate_test_score, select_winner
from hpsearch.search.samplers.suggest import derive_seed
from hpsearch.search.study.ranking import sort_best_first

EPOCHS, TRIALS, TOP, SEEDS = 15, 24, 5, 2
POINT = 100  # a point is a hundredth of the metric


class Small(Objective):
    """A small problem with tabular data; `draw` generates the samples."""

    epochs: ClassVar[int] = EPOCHS
    samples: ClassVar[int] = 1000  # per study
    reserve_size: ClassVar[int] = 100_000
    is_set_metric: ClassVar[bool] = (
        False  # then the true score is the mean over sets of the size of the validation split
    )
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, study: int = 0) -> None:
        super().__init__()
        self.study = study

    def draw(self, study: int, samples: int) -> tuple[Rows, Rows, Rows | None]:
        """Return inputs, targets and groups of a number of samples; study -1 is the reserve."""
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
        x, y, groups = self.draw(self.study, self.samples)
        return Splits.make(x, y, seed=seed, groups=groups)

    def reserve(self) -> Dataset:
        """Return the samples that no study uses."""
        x, y, _ = self.draw(-1, self.reserve_size)
        return Splits.make(x, y, seed=0, val=0.001, test=0.001, stratify=False).train

    def reference(self) -> tuple[FitResult, TrainConfig, Dataset]:
        """Train the reference model on a part of the reserve; return the result, its configuration and the rest."""
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
    """Five classes of three Gaussians each in 12 dimensions, with 5 % random labels."""

    name: ClassVar[str] = "mixture"
    metric = "accuracy"

    def draw(self, study: int, samples: int) -> tuple[Rows, Rows, Rows | None]:
        centres = 1.1 * np.random.default_rng(7).normal(size=(15, 12))
        rng = np.random.default_rng([11, study + 1])
        which = rng.integers(15, size=samples)
        x = centres[which] + rng.normal(size=(samples, 12))
        labels = np.where(rng.random(samples) < 0.05, rng.integers(5, size=samples), which % 5)
        return x, labels, None


class Rare(Small):
    """Two classes with a curved boundary in 10 dimensions, 10 % positive; the metric is AUROC."""

    name: ClassVar[str] = "rare"
    metric = "auroc"

    def draw(self, study: int, samples: int) -> tuple[Rows, Rows, Rows | None]:
        rng = np.random.default_rng([13, study + 1])
        x = rng.normal(size=(samples, 10))
        score = x[:, 0] * x[:, 1] + np.abs(x[:, 2]) + 0.5 * x[:, 3] + rng.normal(size=samples)
        return x, (score > 2.6).astype(np.int64), None


class Patients(Small):
    """Five samples of each of 200 patients, with an effect of the patient on the value; the metric is R2."""

    name: ClassVar[str] = "patients"
    metric = "r2"

    def draw(self, study: int, samples: int) -> tuple[Rows, Rows, Rows | None]:
        rng = np.random.default_rng([17, study + 1])
        groups = np.arange(samples) // 5
        effect = rng.normal(size=(samples // 5, 3))[groups]
        x = np.concatenate([rng.random((samples, 5)), effect + 0.1 * rng.normal(size=effect.shape)], axis=1)
        value = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
        y = value + 2 * effect[:, 0] * effect[:, 1] + rng.normal(size=samples)
        return x, y.astype(np.float32), groups


class Scans(Small):
    """scikit-learn's digits: 800 for a study, all others for its reserve."""

    name: ClassVar[str] = "scans"
    samples: ClassVar[int] = 800
    metric = "accuracy"

    def draw(self, study: int, samples: int) -> tuple[Rows, Rows, Rows | None]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.default_rng([19, self.study + 1]).permutation(len(digits.target))
        rows = order[:samples] if study >= 0 else order[self.samples :]
        return digits.data[rows], digits.target[rows], None


class SetMetric:
    """A metric of a set, which is not a mean over its samples; it depends on the size of the set."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor], name: str) -> None:
        self._compute, self._name = compute, name
        self.reset()

    def update(self, output: Tensor, target: Tensor) -> None:
        self._parts.append((output, target))

    def compute(self) -> dict[str, Tensor]:
        outputs, targets = (torch.cat(parts) for parts in zip(*self._parts, strict=True))
        return {self._name: self._compute(outputs, targets)}

    def reset(self) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []


class Retrieval(Mixture):
    """Embeddings of the samples of `Mixture`; the metric is the share of nearest neighbors of the same class."""

    name: ClassVar[str] = "retrieval"
    metric = "recall_at_1"
    direction = "maximize"
    bounds = (0, 1)
    reserve_size: ClassVar[int] = 20_000
    is_set_metric: ClassVar[bool] = True

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        embedded = functional.normalize(model(batch.x), dim=1)
        similar = embedded @ embedded.T / 0.2
        other = ~torch.eye(len(embedded), dtype=torch.bool)
        positive = (batch.y[:, None] == batch.y) & other
        log_share = similar - similar.masked_fill(~other, -torch.inf).logsumexp(dim=1, keepdim=True)
        loss = -(log_share * positive).sum(dim=1) / positive.sum(dim=1).clamp(min=1)
        return Step(loss, outputs=embedded, targets=batch.y)

    def metrics(self, train: Dataset) -> SetMetric:
        def compute(embedded: Tensor, labels: Tensor) -> Tensor:
            nearest = (embedded @ embedded.T).fill_diagonal_(-2).argmax(dim=1)
            return (labels[nearest] == labels).double().mean()

        return SetMetric(compute, self.metric)


class Generator(Small):
    """A generator of points in three dimensions; the metric is the sliced Wasserstein distance to the samples."""

    name: ClassVar[str] = "generator"
    metric = "distance"
    direction = "minimize"
    bounds = (0, None)
    reserve_size: ClassVar[int] = 20_000
    is_set_metric: ClassVar[bool] = True

    def draw(self, study: int, samples: int) -> tuple[Rows, Rows, Rows | None]:
        centres = 2 * np.random.default_rng(23).normal(size=(6, 3))
        rng = np.random.default_rng([29, study + 1])
        points = centres[rng.integers(6, size=samples)] + 0.3 * rng.normal(size=(samples, 3))
        return rng.normal(size=(samples, 4)), points.astype(np.float32), None

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        return super().model(config, train)[:-1].append(nn.LazyLinear(3))

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        made = model(batch.x)
        apart = torch.cdist(made, batch.y).mean(dim=1)
        loss = 2 * apart - torch.cdist(made, made).mean(dim=1) - torch.cdist(batch.y, batch.y).mean(dim=1)
        return Step(loss, outputs=made, targets=batch.y)

    def metrics(self, train: Dataset) -> SetMetric:
        directions = functional.normalize(torch.randn(3, 50, generator=torch.Generator().manual_seed(0)), dim=0)

        def compute(made: Tensor, points: Tensor) -> Tensor:
            sorted_made, sorted_points = ((part @ directions).sort(dim=0).values for part in (made, points))
            return (sorted_made - sorted_points).abs().double().mean()

        return SetMetric(compute, self.metric)


OBJECTIVES: dict[str, type[Small]] = {cls.name: cls for cls in (Mixture, Rare, Patients, Scans, Retrieval, Generator)}


@dataclass
class Finalist:
    """A configuration found by the search, and its scores.

    Attributes:
        search: best value in the search.
        test: score of the search's model on the study's test split.
        truth: score of the search's model on the reserve.
        seeds: best values with new seeds on the study's data split.
        divisions: best values with new seeds on new data splits.
        scores: scores of the same runs without optimism: value, error, and sizes of train, validation and test split.
        ease: scores of the reference model above its true score, on the study's validation split and on new ones.
    """

    search: float
    test: float
    truth: float
    seeds: list[float]
    divisions: list[float]
    scores: list[tuple[float, float | None, tuple[int, int, int]]]
    ease: tuple[float, float]


def run_study(given: tuple[str, int]) -> list[dict[str, Any]]:
    """Run a study; return the fields of its finalists, the best of the search first."""
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
    worth = evaluate_model(objective, like, reference, splits, rest)
    own, *others = (evaluate_model(objective, like, reference, splits, part) - worth for part in parts)
    values = {trial: result.best_value for trial, result in found.items()}
    finalists = []
    for trial in sort_best_first(values, maximize=objective.direction == "maximize")[:TOP]:
        config, result = configs[trial], found[trial]
        retrained = [fit(objective, config, seed, number) for seed in fresh]
        resplit = [fit(objective, config, seed, number, split) for seed, split in zip(fresh, divisions, strict=True)]
        scored = [run.resplit_score for run in resplit if run.resplit_score is not None]
        finalists.append(
            Finalist(
                search=result.best_value,
                test=RestoredModel(objective, config, splits, result.model).test()[objective.metric],
                truth=evaluate_model(objective, config, result, splits, reserve),
                seeds=[run.best_value for run in retrained],
                divisions=[run.best_value for run in resplit],
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


def evaluate_model(
    objective: Objective, config: TrainConfig, result: FitResult, splits: Splits, data: Dataset
) -> float:
    metrics = as_metrics(objective.metrics(splits.train), objective.metric)
    step = build_step_function(objective, config, splits, result.model, torch.device("cpu"))
    size = len(splits.val) if objective.is_set_metric else len(data)
    rows = torch.arange(len(data)).split(size)
    parts = [data.take(part) for part in rows if len(part) == size]
    scores = (evaluate(result.model, part, step, metrics, batch_size=5000, device="cpu") for part in parts)
    return statistics.fmean(score[objective.metric] for score in scores)


def summarize(name: str, studies: list[list[Finalist]]) -> dict[str, list[float]]:
    """Print the results of an objective's studies; return the overstatement of each kind of score in points."""
    ways: dict[str, list[float]] = {}
    worth: dict[str, list[float]] = {}
    inside, width = [], []
    maximize = OBJECTIVES[name].direction == "maximize"
    sign = 1 if maximize else -1

    def note(way: str, number: float, finalist: Finalist, *, resplit: bool) -> None:
        ways.setdefault(way, []).append(sign * POINT * (number - finalist.truth - finalist.ease[resplit]))
        worth.setdefault(way, []).append(finalist.truth)

    for finalists in studies:
        note("best value of the search", finalists[0].search, finalists[0], resplit=False)
        tables = {
            "mean of new seeds": [f.seeds for f in finalists],
            "mean of new splits, at the best epoch": [f.divisions for f in finalists],
            "mean of new splits, without optimism": [[value for value, _, _ in f.scores] for f in finalists],
        }
        for way, table in tables.items():
            choice = select_winner(dict(enumerate(table)), maximize=maximize)
            winner = choice.winner
            assert winner is not None
            note(way, statistics.fmean(table[winner]), finalists[winner], resplit=way != "mean of new seeds")
        runs = {
            number: [RunScore(value, error, *sizes) for value, error, sizes in finalist.scores]
            for number, finalist in enumerate(finalists)
        }
        expected = estimate_test_score(
            runs, choice, metric=OBJECTIVES[name].metric, maximize=maximize, bounds=get_declared_bounds(name)
        )
        assert expected is not None
        note("expected score", expected.mean, finalists[winner], resplit=True)
        inside.append(expected.low <= finalists[winner].test <= expected.high)
        width.append(POINT * (expected.high - expected.low))
    print(f"\n{name}: {len(studies)} studies")
    for way, over in ways.items():
        error = statistics.stdev(over) / math.sqrt(len(over)) if len(over) > 1 else math.nan
        print(
            f"  {way:37} overstated by {statistics.fmean(over):+6.2f} +- {error:.2f} points, "
            f"above in {sum(o > 0 for o in over):2} of {len(over)}; mean true score of the winners "
            f"{statistics.fmean(worth[way]):.4f}"
        )
    print(
        f"  test score in the interval: {sum(inside)} of {len(inside)}; mean width {statistics.fmean(width):.1f} points"
    )
    ways["inside"] = [float(found) for found in inside]
    return ways


def get_declared_bounds(name: str) -> tuple[float, float] | None:
    """Return the bounds that an objective declares for its metric; None if it declares none."""
    low, high = OBJECTIVES[name].bounds
    if low is None and high is None:
        return None
    return -math.inf if low is None else low, math.inf if high is None else high


def draw(each: Mapping[str, Mapping[str, list[float]]], path: Path) -> None:
    """Draw a panel per objective with a line per kind of score: mean overstatement and two standard errors."""
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
        "points above the true score of the winner's model: mean over studies, two standard errors", fontsize=8
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", nargs="+", choices=list(OBJECTIVES), default=list(OBJECTIVES))
    parser.add_argument("--studies", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number and seed of the first study")
    parser.add_argument("--raw", type=Path, help="file to write the studies to")
    parser.add_argument("--figure", type=Path, help="file to write a figure to")
    parser.add_argument("--from", dest="read", type=Path, help="file of --raw to read instead of running studies")
    given = parser.parse_args()
    if given.read:
        raw = json.loads(given.read.read_text())
    else:
        raw = {}
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            for name in given.objectives:
                raw[name] = []
                numbers = range(given.first, given.first + given.studies)
                for done, found in enumerate(pool.map(run_study, [(name, number) for number in numbers]), 1):
                    raw[name].append(found)
                    print(f"{name}: {done} of {given.studies}", file=sys.stderr, flush=True)
                    if given.raw:
                        given.raw.write_text(json.dumps(raw))
    each = {name: summarize(name, [[Finalist(**f) for f in found] for found in raw[name]]) for name in raw}
    if given.figure:
        draw(each, given.figure)
    print("\nall objectives")
    for way in next(iter(each.values())):
        over = [value for ways in each.values() for value in ways[way]]
        what = (
            f"contains the test score in {statistics.fmean(over):.1%}"
            if way == "inside"
            else f"{statistics.fmean(over):+.2f}"
        )
        print(f"  {way:37} {what}")


if __name__ == "__main__":
    main()
