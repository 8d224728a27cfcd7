"""Compare the training loop with bare torch loops over structured data:

    python -m benchmarks.structured_loops

The data are texts as a dictionary of padded tensors in memory, texts as a list with a collate function, and 2,000 PNG
files that two processes read. Both loops have the same batches, model and AdamW, and alternate in one process, so that
only ratios matter.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from hpsearch import Objective, Splits, TrainConfig, fingerprint_files, pad_collate
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.loop.build import build_run
from hpsearch.objectives.training.loop.epoch import train_epoch
from hpsearch.objectives.training.optimizers.optimizer import parameter_groups
from hpsearch.objectives.training.reproducibility.seeds import make_reproducible

TEXTS, WORDS, LONGEST, BATCH, EPOCHS = 6_000, 500, 40, 64, 1000
IMAGES, SIDE = 2_000, 32


class Words(nn.Module):
    """The mean of embeddings and two layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 64, padding_idx=0)
        self.last = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2))

    def forward(self, ids, lengths):
        return self.last(self.embed(ids).sum(dim=1) / lengths[:, None])


class Texts(Objective):
    """Texts of 5 to 40 words."""

    def suggest(self, trial):
        return TrainConfig()

    def texts(self):
        rng = np.random.default_rng(0)
        found = [torch.from_numpy(rng.integers(1, WORDS, int(rng.integers(5, LONGEST)))) for _ in range(TEXTS)]
        return found, [int((text < WORDS / 2).float().mean() > 0.5) for text in found]

    def model(self, config, train):
        return Words()


class InMemory(Texts):
    """Texts as a dictionary of tensors."""

    def data(self, seed):
        texts, classes = self.texts()
        x, _ = pad_collate(list(zip(texts, classes, strict=True)))
        return Splits.make(x, classes, seed=seed)


class Ragged(Texts):
    """Texts as a list with a collate function."""

    def data(self, seed):
        return Splits.make(*self.texts(), seed=seed, collate=pad_collate)


class Files(TorchDataset):
    """PNG files, read one by one."""

    def __init__(self, folder):
        self.paths = sorted(folder.glob("*.png"))
        self.targets = [int(path.stem) % 2 for path in self.paths]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, row):
        image = np.asarray(Image.open(self.paths[row]), dtype=np.float32)
        return torch.from_numpy(image).permute(2, 0, 1) / 255, self.targets[row]


class Images(Objective):
    """2,000 PNG files in a folder."""

    def __init__(self, folder):
        self.folder = folder
        rng = np.random.default_rng(0)
        for number in range(IMAGES):
            image = rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8) // (1 + number % 2)
            Image.fromarray(image).save(folder / f"{number:05d}.png")

    def suggest(self, trial):
        return TrainConfig()

    def data(self, seed):
        return Splits.make(Files(self.folder), seed=seed, fingerprint=fingerprint_files(self.folder))

    def model(self, config, train):
        def block(inner, outer):
            return nn.Sequential(nn.Conv2d(inner, outer, 3, stride=2, padding=1), nn.ReLU())

        return nn.Sequential(block(3, 16), block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2))


def ours(objective, settings):
    """Return a function that runs an epoch of hpsearch's training loop."""
    config = TrainConfig(batch_size=BATCH, deterministic=False, **settings)
    run, _ = build_run(objective, config, RunPlan(EPOCHS, 0, 0), device=torch.device("cpu"))
    epoch = iter(range(EPOCHS))
    return lambda: train_epoch(run, next(epoch)).scores["loss"]


def bare(objective, settings):
    """Return a function that runs an epoch of a loop written by hand: indexed tensors, or a DataLoader of samples."""
    train = objective.data(0).train
    model = objective.model(TrainConfig(), train)
    optimizer = torch.optim.AdamW(parameter_groups(model, TrainConfig()), lr=1e-3, fused=True)
    total = EPOCHS * (len(train) // BATCH)
    cosine = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / total)))
    workers = settings.get("num_workers") or 0

    def batches():
        if train.samples is None:
            for rows in torch.randperm(len(train)).split(BATCH):
                yield {name: part[rows] for name, part in train.x.items()}, train.y[rows]
        else:
            yield from DataLoader(train.samples, BATCH, shuffle=True, collate_fn=train.collate, num_workers=workers)

    def epoch():
        model.train()
        loss_sum, correct = torch.zeros(()), torch.zeros(())
        for x, y in batches():
            optimizer.zero_grad(set_to_none=True)
            output = model(**x) if isinstance(x, dict) else model(x)
            loss = functional.cross_entropy(output, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            cosine.step()
            loss_sum += loss.detach() * len(y)
            correct += (output.detach().argmax(1) == y).sum()
        correct.item()
        return loss_sum.item() / len(train)

    return epoch


def ratio(name, objective, rounds, **settings):
    """Print the ratio of samples per second to the bare loop, both alternating: median and quartiles over rounds."""
    # The CPU time of this process does not include that of loader processes.
    clock = time.perf_counter if settings else time.process_time

    def timed(epoch):
        started = clock()
        epoch()
        return clock() - started

    with make_reproducible(deterministic=False):
        mine, theirs = ours(objective, settings), bare(objective, settings)
        for epoch in (mine, theirs):
            epoch()
        found = []
        for number in range(rounds):
            seconds = {epoch: timed(epoch) for epoch in ((theirs, mine) if number % 2 else (mine, theirs))}
            found.append(seconds[theirs] / seconds[mine])
    low, middle, high = statistics.quantiles(found, n=4)
    print(f"{name}: {middle:.3f} of a bare torch loop's samples per second (quartiles {low:.3f} to {high:.3f})")


def main():
    """Measure each kind of data."""
    torch.set_num_threads(1)
    ratio("a dictionary of tensors in memory", InMemory(), 41)
    ratio("a list with a collate", Ragged(), 15)
    with tempfile.TemporaryDirectory() as folder:
        ratio(f"{IMAGES} PNG files, 2 processes", Images(Path(folder)), 15, num_workers=2)


if __name__ == "__main__":
    main()
