"""Measure how strongly the scores of two models are correlated if their validation splits share a third of the samples.

    python -m benchmarks.shared_samples [--objectives NAME ...] [--pairs 3000]

The prediction interval of `hpsearch finalists` assumes that a shared sample has the same effect on both scores. Then
the correlation of the scores is the share of samples in common. For each objective of `benchmarks.overstatement`, two
models are trained with two seeds on two new splits of a study, and scored on pairs of splits of the reserve. The
output is the correlation over the pairs: of one model on both splits, and of one model on each. Those of `scans` are
too small, because its reserve has only 997 samples.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from benchmarks.overstatement import OBJECTIVES, Retrieval, Small, fit
from hpsearch import TrainConfig
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.evaluation.metrics import as_metrics
from hpsearch.objectives.training.result import FitResult
from hpsearch.search.samplers.suggest import derive_seed

STUDY, SIZE, SHARED = 9000, 200, 67  # SIZE samples per split, of which SHARED are in both splits of a pair
CONFIG = TrainConfig(lr=3e-3, weight_decay=1e-4, batch_size=64, model={"layers": 1, "width": 64, "dropout": 0.1})


def measure(name: str, pairs: int) -> tuple[float, float]:
    """Return the correlations of the scores of one model, and of two models, on splits with common samples."""
    objective = OBJECTIVES[name](STUDY)
    seeds = [(derive_seed(STUDY, "finalists", index), derive_seed(STUDY, "division", index)) for index in range(2)]
    models = [fit(objective, CONFIG, seed, STUDY, division) for seed, division in seeds]
    reserve = objective.reserve()
    metric = as_metrics(objective.metrics(objective.data(STUDY).train), objective.metric)
    outputs = [_compute_outputs(objective, result, reserve) for result in models]

    def score(model: int, rows: torch.Tensor) -> float:
        metric.reset()
        metric.update(outputs[model][rows], reserve.y[rows])
        return float(metric.compute()[objective.metric])

    rng = torch.Generator().manual_seed(0)
    scores = []
    for _ in range(pairs):
        rows = torch.randperm(len(reserve), generator=rng)[: 2 * SIZE - SHARED]
        first, second = rows[:SIZE], torch.cat([rows[:SHARED], rows[SIZE:]])
        scores.append((score(0, first), score(0, second), score(1, second)))
    correlations = np.corrcoef(np.array(scores).T)
    return float(correlations[0, 1]), float(correlations[0, 2])


def _compute_outputs(objective: Small, result: FitResult, data: Dataset) -> torch.Tensor:
    result.model.eval()
    with torch.no_grad():
        if isinstance(objective, Retrieval):  # the metric compares normalized embeddings
            return torch.nn.functional.normalize(result.model(data.x), dim=1)
        return torch.as_tensor(result.model(data.x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", nargs="+", choices=list(OBJECTIVES), default=list(OBJECTIVES))
    parser.add_argument("--pairs", type=int, default=3000)
    given = parser.parse_args()
    print(f"{SHARED / SIZE:.3f} of the samples are shared")
    for name in given.objectives:
        one, two = measure(name, given.pairs)
        print(f"{name:10} correlation of the scores of one model {one:.3f}, of two models {two:.3f}")


if __name__ == "__main__":
    main()
