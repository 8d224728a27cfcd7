"""Compare the training loop with loops written by hand. Needs only torch, numpy and scikit-learn:

    python -m benchmarks.training_loops

Each pair has the same recipe (AdamW without weight decay on biases, gradient clipping, a cosine schedule), model and
data, and alternates in one process, so that only ratios matter.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hpsearch import Objective, Splits, Standardize, TrainConfig
from hpsearch.objectives.builtin.digits import build_cnn, build_mlp
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.loop.build import build_run
from hpsearch.objectives.training.loop.epoch import train_epoch
from hpsearch.objectives.training.optimizers.optimizer import parameter_groups
from hpsearch.objectives.training.reproducibility.seeds import make_reproducible

ROWS, BATCH, EPOCHS = 8_000, 64, 1000
ROUNDS = {"mlp": 41, "cnn": 15, "transformer": 7}
FASTER = [{"precision": "bf16"}, {"compile": True}, {"precision": "bf16", "compile": True}]  # on a GPU
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Synthetic(Objective):
    """Images [n, 1, 8, 8] of noise around ten means."""

    def __init__(self, net, rows=ROWS):
        self.net, self.rows = net, rows

    def suggest(self, trial):
        return TrainConfig()

    def data(self, seed):
        generator = torch.Generator().manual_seed(seed)
        y = torch.arange(self.rows * 10 // 6 + 2) % 10
        means = torch.randn(10, 1, 8, 8, generator=generator)
        return Splits.make(means[y] + torch.randn(len(y), 1, 8, 8, generator=generator), y, seed=seed)

    def model(self, config, train):
        return nn.Sequential(Standardize.fit(train.x, dim=(0, 2, 3)), NETS[self.net]())

    def metrics(self, train):
        return super().metrics(train) if importlib.util.find_spec("torchmetrics") else Accuracy()


class Transformer(nn.Module):
    """A transformer encoder over the 64 pixels of an image as a sequence."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(1, 256)
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, x):
        return self.head(self.encoder(self.embedding(x.flatten(1)[..., None])).mean(1))


NETS = {"mlp": lambda: build_mlp(1, 64, 0.0), "cnn": lambda: build_cnn(2, 16, 0.1), "transformer": Transformer}


class Accuracy:
    """Accuracy without torchmetrics."""

    def reset(self):
        self.right, self.count = 0, 0

    def update(self, output, target):
        self.right, self.count = self.right + (output.argmax(1) == target).sum(), self.count + len(target)

    def compute(self):
        return {"accuracy": self.right / self.count}

    def to(self, device):
        return self


def _recipe(model, *, fused=True):
    optimizer = torch.optim.AdamW(parameter_groups(model, TrainConfig()), lr=1e-3, fused=fused)
    total = EPOCHS * (ROWS // BATCH)
    cosine = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / total)))
    return optimizer, cosine


def ours(net, device, settings):
    objective = Synthetic(net)
    config = TrainConfig(batch_size=BATCH, deterministic=False, **settings)
    run, _ = build_run(objective, config, RunPlan(EPOCHS, 0, 0), device=torch.device(device))
    epoch = iter(range(EPOCHS))
    return lambda: train_epoch(run, next(epoch)).scores["loss"]


def bare(net, device, settings):
    """Return an epoch of the fastest handwritten loop: indexed batches, sums on the device, one read at the end."""
    objective = Synthetic(net)
    train = objective.data(0).train.to(device)
    model = objective.model(TrainConfig(), train).to(device)
    call = torch.compile(model) if settings.get("compile") else model
    optimizer, cosine = _recipe(model)
    bf16 = settings.get("precision") == "bf16"

    def epoch():
        model.train()
        total, correct = torch.zeros((), device=device), torch.zeros((), device=device)
        for rows in torch.randperm(len(train), device=device).split(BATCH):
            x, y = train.x[rows], train.y[rows]
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, torch.bfloat16, enabled=bf16):
                output = call(x)
            loss = functional.cross_entropy(output.float(), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            cosine.step()
            total += loss.detach() * len(x)
            correct += (output.detach().argmax(1) == y).sum()
        correct.item()
        return total.item() / ROWS

    return epoch


class _Samples(Dataset):
    """A dataset that converts one array at a time to a tensor and normalises it, like image datasets."""

    def __init__(self, train, transform):
        self.images, self.labels = train.x.numpy(), train.y.tolist()
        self.mean, self.std = train.x.mean(), train.x.std()
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index])
        return (image - self.mean) / self.std if self.transform else image, self.labels[index]


def tutorial(net, device, settings):
    """Return an epoch of most tutorials' loop over data in memory: DataLoader, TensorDataset, default AdamW."""
    return _by_samples(net, device, lambda train: TensorDataset(train.x, train.y), fused=None)


def tutorial_fused(net, device, settings):
    """Return the same with fused AdamW, as in hpsearch: the difference is only in loading and reading values."""
    return _by_samples(net, device, lambda train: TensorDataset(train.x, train.y))


def tutorial_with_transform(net, device, settings):
    """Return the same with fused AdamW over a dataset that converts and normalises arrays one by one."""
    return _by_samples(net, device, lambda train: _Samples(train, transform=True))


def tutorial_of_arrays(net, device, settings):
    """Return the same over a dataset of arrays and plain numbers, the fastest kind to read one by one."""
    return _by_samples(net, device, lambda train: _Samples(train, transform=False))


def _by_samples(net, device, dataset, *, fused=True):
    """Return an epoch of a loop with batches that a DataLoader collates, and `.item()` at each step."""
    objective = Synthetic(net)
    train = objective.data(0).train
    model = objective.model(TrainConfig(), train).to(device)
    optimizer, cosine = _recipe(model, fused=fused)
    loader = DataLoader(dataset(train), batch_size=BATCH, shuffle=True)

    def epoch():
        model.train()
        total, correct = 0.0, 0
        for batch in loader:
            x, y = (tensor.to(device) for tensor in batch)
            optimizer.zero_grad()
            output = model(x)
            loss = functional.cross_entropy(output, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            cosine.step()
            total += loss.item() * len(x)
            correct += (output.argmax(1) == y).sum().item()
        return total / ROWS

    return epoch


def _timed(epoch, device):
    """Return the seconds of an epoch; on a CPU the CPU time, which does not depend on other load on the machine."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    started = clock()
    epoch()
    return clock() - started


def ratio(net, other, device, **settings):
    """Return the ratio of samples per second to another loop, both alternating: median over rounds."""
    with make_reproducible(deterministic=False):
        mine, theirs = ours(net, device, settings), other(net, device, settings)
        for epoch in (mine, theirs):
            _timed(epoch, device)
        found, fastest = [], math.inf
        for number in range(ROUNDS[net]):
            seconds = {epoch: _timed(epoch, device) for epoch in ((theirs, mine) if number % 2 else (mine, theirs))}
            found.append(seconds[theirs] / seconds[mine])
            fastest = min(fastest, seconds[mine])
    low, middle, high = statistics.quantiles(found, n=4)
    ratios = f"{middle:.2f} (quartiles {low:.2f} to {high:.2f})"
    print(f"\n{net} on {device} {settings or ''} against {other.__name__}: {ratios}, {ROWS / fastest:,.0f} samples/s")
    return statistics.median(found)


def main():
    """Measure every pair on every available device."""
    torch.set_num_threads(1)
    for device in DEVICES:
        for net in ROUNDS if device == "cuda" else ("mlp", "cnn"):
            ratio(net, bare, device)
        for other in (tutorial, tutorial_fused, tutorial_with_transform, tutorial_of_arrays):
            ratio("mlp", other, device)
    for net in ROUNDS if "cuda" in DEVICES else ():
        for settings in FASTER:
            ratio(net, bare, "cuda", **settings)


if __name__ == "__main__":
    main()
