"""How much the training loop costs over one written by hand. Not collected by default:

    ./hpsearch test tests/benchmarks/bench_training.py -s

Each pair runs the same recipe (AdamW without decay on biases, clipping, a cosine) on the same model and data, in turns
within one process, so that only ratios count.
"""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from objectives import Objective
from objectives.digits import cnn, mlp
from objectives.training import Splits, Standardize, TrainConfig
from objectives.training.build import build
from objectives.training.epoch import train_epoch
from objectives.training.optim import parameter_groups
from objectives.training.reproducibility import reproducible

ROWS, BATCH, EPOCHS, ROUNDS = 8_000, 64, 1000, 15
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Synthetic(Objective):
    """Images [n, 1, 8, 8] of noise around ten means."""

    def __init__(self, net):
        self.net = net

    def suggest(self, trial):
        return TrainConfig()

    def data(self, seed):
        generator = torch.Generator().manual_seed(seed)
        y = torch.arange(ROWS * 10 // 6 + 2) % 10
        means = torch.randn(10, 1, 8, 8, generator=generator)
        return Splits.make(means[y] + torch.randn(len(y), 1, 8, 8, generator=generator), y, seed=seed)

    def model(self, config, train):
        net = mlp(1, 64, 0.0) if self.net == "mlp" else cnn(2, 16, 0.1)
        return nn.Sequential(Standardize.fit(train.x, dim=(0, 2, 3)), net)


def _recipe(model):
    optimizer = torch.optim.AdamW(parameter_groups(model, TrainConfig()), lr=1e-3, fused=True)
    total = EPOCHS * (ROWS // BATCH)
    cosine = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / total)))
    return optimizer, cosine


def _ours(net, device, settings):
    objective = Synthetic(net)
    config = TrainConfig(batch_size=BATCH, deterministic=False, **settings)
    run, _ = build(objective, config, epochs=EPOCHS, seed=0, split_seed=0, device=torch.device(device))
    epoch = iter(range(EPOCHS))
    return lambda: train_epoch(run, next(epoch)).scores["loss"]


def _bare(net, device, settings):
    """The fastest loop that one would write by hand: batches by index, sums on the device, one read at the end."""
    objective = Synthetic(net)
    train = objective.data(0).train.to(device)
    model = objective.model(TrainConfig(), train).to(device)
    if settings.get("compile"):
        model.compile()
    optimizer, cosine = _recipe(model)
    bf16 = settings.get("precision") == "bf16"

    def epoch():
        model.train()
        total, correct = torch.zeros((), device=device), torch.zeros((), device=device)
        for rows in torch.randperm(len(train), device=device).split(BATCH):
            x, y = train.x[rows], train.y[rows]
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, torch.bfloat16, enabled=bf16):
                output = model(x)
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
    """A sample at a time, as image datasets are read: an array becomes a tensor and is normalised."""

    def __init__(self, train, transform):
        self.images, self.labels = train.x.numpy(), train.y.tolist()
        self.mean, self.std = train.x.mean(), train.x.std()
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index])
        return (image - self.mean) / self.std if self.transform else image, self.labels[index]


def _tutorial(net, device, settings, transform=True):
    """The loop of most tutorials: a DataLoader over samples and their transform, `.item()` at each step."""
    objective = Synthetic(net)
    train = objective.data(0).train
    model = objective.model(TrainConfig(), train).to(device)
    optimizer, cosine = _recipe(model)
    loader = DataLoader(_Samples(train, transform), batch_size=BATCH, shuffle=True)

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


def _untransformed(net, device, settings):
    """The same over samples that need no transform."""
    return _tutorial(net, device, settings, transform=False)


def _timed(epoch, device):
    """Seconds of an epoch: of this process's own time on a CPU, which what else the machine does leaves alone."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    started = clock()
    assert epoch() < 3.0
    return clock() - started


def ratio(net, other, device, **settings):
    """Our samples per second over the other's, both running in turns."""
    with reproducible(deterministic=False):
        ours, theirs = _ours(net, device, settings), other(net, device, settings)
        for epoch in (ours, theirs):
            _timed(epoch, device)
        seconds = {ours: [], theirs: []}
        for number in range(ROUNDS):
            for epoch in (theirs, ours) if number % 2 else (ours, theirs):
                seconds[epoch].append(_timed(epoch, device))
    # The fastest epoch of each is the one that others on the machine disturbed least.
    found = min(seconds[theirs]) / min(seconds[ours])
    rate = len(Synthetic(net).data(0).train) / min(seconds[ours])
    print(f"\n{net} on {device} {settings or ''} against {other.__name__[1:]}: {found:.2f}, {rate:,.0f} samples/s")
    return found


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", ["mlp", "cnn"])
def test_the_loop_costs_next_to_nothing_over_a_bare_one(net, device):
    assert ratio(net, _bare, device) >= 0.95


@pytest.mark.parametrize("device", DEVICES)
def test_the_loop_is_faster_than_that_of_the_tutorials(device):
    assert ratio("mlp", _tutorial, device) >= 1.5
    assert ratio("mlp", _untransformed, device) >= 1.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("net", ["mlp", "cnn"])
@pytest.mark.parametrize("settings", [{"precision": "bf16"}, {"compile": True}, {"precision": "bf16", "compile": True}])
def test_on_a_gpu_with_bf16_and_compilation(net, settings):
    assert ratio(net, _bare, "cuda", **settings) >= 0.95
