"""Where a run's training batches come from: the device's memory, or a DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from objectives.training.data.dataset import Dataset, steps_per_epoch, windows
from objectives.training.data.loader import Augment, loaded
from objectives.training.reproducibility.seeds import derive_seed

if TYPE_CHECKING:
    from objectives.training.config import TrainConfig


class Batch(NamedTuple):
    """A micro-batch: how many samples it has, and how to get its inputs and targets onto the device."""

    size: int
    get: Callable[[], tuple[Tensor, Tensor]]


Window = tuple[Batch, ...]


class Feed(Protocol):
    """The training data of a run, in batches."""

    def windows(self, epoch: int) -> Iterator[Window]:
        """Every sample of an epoch once, in an order drawn from (seed, epoch): the micro-batches of each step."""
        ...

    def inputs(self) -> Iterator[Tensor]:
        """All inputs in their order, as they are without augmentation, batch by batch on the device."""
        ...


def build_feed(
    train: Dataset, config: TrainConfig, *, seed: int, device: torch.device, augment: Augment | None
) -> Feed:
    """A DataLoader where the configuration or the data ask for one; else the data go to the device once.

    Data in memory need no processes to load them: a DataLoader is many times slower there.
    """
    if config.num_workers is None and train.load is None:
        return _MemoryFeed(train.to(device), config, seed, device, augment)
    return _LoaderFeed(train, config, seed, device, augment)


class _MemoryFeed:
    def __init__(
        self, train: Dataset, config: TrainConfig, seed: int, device: torch.device, augment: Augment | None
    ) -> None:
        self._train, self._config, self._seed = train, config, seed
        self._device, self._augment = device, augment

    def windows(self, epoch: int) -> Iterator[Window]:
        for window in _rows(len(self._train), self._config, self._seed, epoch, self._device):
            yield tuple([self.batch(rows) for rows in window])

    def batch(self, rows: Tensor) -> Batch:
        """The samples at `rows`, gathered when they are asked for."""
        return Batch(len(rows), partial(self._get, rows))

    def _get(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self._train.x[rows], self._train.y[rows]
        return (x if self._augment is None else self._augment(x)), y

    def inputs(self) -> Iterator[Tensor]:
        yield from torch.split(self._train.x, self._config.batch_size)


class _LoaderFeed:
    def __init__(
        self, train: Dataset, config: TrainConfig, seed: int, device: torch.device, augment: Augment | None
    ) -> None:
        self._train, self._config, self._seed = train, config, seed
        self._device, self._augment = device, augment

    def windows(self, epoch: int) -> Iterator[Window]:
        found = list(_rows(len(self._train), self._config, self._seed, epoch, torch.device("cpu")))
        batches = [rows for window in found for rows in window]
        stream = self._loaded(batches, self._augment, derive_seed(self._seed, "load", epoch))
        for window in found:
            yield tuple([Batch(len(rows), partial(self._move, *next(stream))) for rows in window])

    def _move(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.to(self._device, non_blocking=True), y.to(self._device, non_blocking=True)

    def _loaded(self, batches: list[Tensor], augment: Augment | None, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        workers = self._config.num_workers or 0
        return loaded(self._train, batches, device=self._device, num_workers=workers, augment=augment, seed=seed)

    def inputs(self) -> Iterator[Tensor]:
        rows = torch.split(torch.arange(len(self._train)), self._config.batch_size)
        for x, _ in self._loaded(list(rows), None, self._seed):
            yield x.to(self._device, non_blocking=True)


def _rows(
    samples: int, config: TrainConfig, seed: int, epoch: int, device: torch.device
) -> Iterator[tuple[Tensor, ...]]:
    return windows(
        samples,
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        drop_last=config.drop_last,
        seed=derive_seed(seed, "order", epoch),
        device=device,
    )


def steps_of(samples: int, config: TrainConfig) -> int:
    """Optimizer steps in one epoch of a configuration."""
    return steps_per_epoch(
        samples, batch_size=config.batch_size, accumulate=config.accumulate, drop_last=config.drop_last
    )
