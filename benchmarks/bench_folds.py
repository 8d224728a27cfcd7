"""Compare folds that train as one vectorized model with folds that train in turns:

    python -m benchmarks.bench_folds

Both paths have the same model, data and settings, and alternate in one process with one thread, so that only ratios of
CPU time matter. `steps` compares the training steps. `epochs` also contains validation and the state of a checkpoint.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from benchmarks.training_loops import Accuracy
from hpsearch import Objective, Splits, Standardize, TrainConfig
from hpsearch.objectives.builtin.digits import build_cnn, build_mlp
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.loop.build import build_run
from hpsearch.objectives.training.loop.epoch import EpochSums, train_epoch
from hpsearch.objectives.training.loop.fold_group_check import build_fold_group
from hpsearch.objectives.training.reproducibility.seeds import make_reproducible, set_seed

FOLDS, ROWS, EPOCHS, ROUNDS = 5, 1_200, 10_000, 15
NETS = {
    "mlp, 64 hidden units, batch 32": (lambda: build_mlp(1, 64, 0.0), 32),
    "mlp, 2 x 64 hidden units with dropout, batch 64": (lambda: build_mlp(2, 64, 0.1), 64),
    "cnn, 4 and 8 channels, batch 16": (lambda: build_small_cnn(4), 16),
    "cnn, 8 and 16 channels, batch 32": (lambda: build_small_cnn(8), 32),
    "cnn of digits with batch norm, batch 32": (lambda: build_cnn(2, 16, 0.1), 32),
    "mlp, 2 x 1024 hidden units, batch 256": (lambda: build_mlp(2, 1024, 0.0), 256),
}


def build_small_cnn(width: int) -> nn.Module:
    """Return a network with two convolutions for images [n, 1, 8, 8]."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(2 * width, 10)),
    )


class Images(Objective):
    """Images [n, 1, 8, 8] of noise around ten means."""

    def __init__(self, net):
        self.net = net

    def suggest(self, trial):
        return TrainConfig()

    def data(self, seed):
        generator = torch.Generator().manual_seed(seed)
        y = torch.arange(ROWS) % 10
        means = torch.randn(10, 1, 8, 8, generator=generator)
        return Splits.make(means[y] + torch.randn(len(y), 1, 8, 8, generator=generator), y, seed=seed)

    def model(self, config, train):
        return nn.Sequential(Standardize.fit(train.x, dim=(0, 2, 3)), NETS[self.net][0]())

    def metrics(self, train):
        return Accuracy()


def build_path(net, *, vectorize):
    """Return the runs, a function that trains an epoch of all folds, and the reason for the path."""
    objective, config = Images(net), TrainConfig(batch_size=NETS[net][1], vectorize_folds=vectorize, lr=1e-4)
    plans = [RunPlan(EPOCHS, fold, 0, folds=FOLDS, fold=fold) for fold in range(FOLDS)]
    runs = [build_run(objective, config, plan, device=torch.device("cpu"))[0] for plan in plans]
    group, reason = build_fold_group(objective, config, runs, is_resumed=False)

    def train(epoch):
        set_seed(0, epoch)
        if group is None:
            for run in runs:
                train_epoch(run, epoch)
        else:
            group.train_epoch(epoch, [EpochSums(run) for run in runs], lambda: None)

    return runs, train, reason


def measure(net, rounds=ROUNDS):
    """Return the ratios of CPU time in turns to CPU time together, of steps and of whole epochs, and the reason."""
    paths = [build_path(net, vectorize=False), build_path(net, vectorize=True)]
    found = {"steps": [], "epochs": []}
    for number in range(rounds + 1):
        seconds = {}
        for index in (0, 1) if number % 2 else (1, 0):
            runs, train, _ = paths[index]
            began = time.process_time()
            train(number)
            trained = time.process_time()
            for run in runs:
                run.validate_epoch()
                run.state_dict()
            seconds[index] = trained - began, time.process_time() - began
        if number:  # the first round warms up
            found["steps"].append(seconds[0][0] / seconds[1][0])
            found["epochs"].append(seconds[0][1] / seconds[1][1])
    return found, paths[1][2]


def main():
    """Print the ratios of all networks."""
    torch.set_num_threads(1)  # as in a worker that shares the machine with others
    with make_reproducible(deterministic=True):
        for net in NETS:
            found, reason = measure(net)
            parts = []
            for name, values in found.items():
                low, middle, high = statistics.quantiles(values, n=4)
                parts.append(f"{name} {middle:.2f} (quartiles {low:.2f} to {high:.2f})")
            print(f"{net}: {', '.join(parts)}; {reason}", flush=True)


if __name__ == "__main__":
    main()
