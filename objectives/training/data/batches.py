"""Where a run's training batches come from: the device's memory, or a DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hpsearch.objectives.training.data.dataset import Batch, Dataset, Stream
from hpsearch.objectives.training.data.loader import Augment, loaded
from hpsearch.objectives.training.data.samplers import Order
from hpsearch.objectives.training.data.tree import Tree, moved, taken
from hpsearch.objectives.training.ranks import Ranks
from hpsearch.objectives.training.reproducibility.seeds import derive_seed

if TYPE_CHECKING:
    from hpsearch.objectives.training.config import TrainConfig


class Pending(NamedTuple):
    """A micro-batch that is not loaded yet, or this rank's share of it.

    Attributes:
        size: its number of samples over all ranks.
        get: loads this rank's samples onto the device.
        counts: False where this rank has no sample of it. The rank then gets one sample of weight 0, because ranks step
            together.
    """

    size: int
    get: Callable[[], Batch]
    counts: bool = True


Window = tuple[Pending, ...]


class Feed:
    """The training data of a run, in batches that a DataLoader loads.

    Every rank gets its share of each batch.
    """

    def __init__(
        self,
        train: Dataset,
        config: TrainConfig,
        order: Order,
        seed: int,
        device: torch.device,
        augment: Augment | None,
        ranks: Ranks,
    ) -> None:
        self._train, self._config, self._order, self._seed = train, config, order, seed
        self._device, self._augment, self._ranks = device, augment, ranks
        self.steps = order.steps  # optimizer steps in one epoch

    def windows(self, epoch: int, first: int = 0) -> Iterator[Window]:
        """Iterate over the micro-batches of each optimizer step from step `first` on.

        An epoch (0-based) has every sample once, in an order drawn from (seed, epoch).
        """
        found = list(self._order.windows(epoch, torch.device("cpu")))
        batches = [rows for window in found for rows in window]
        samples: object = self._train.samples
        if isinstance(samples, Stream):
            samples.set_epoch(epoch)
        begun = sum(map(len, found[:first]))
        seed = derive_seed(self._seed, "load", epoch, *self._ranks.purpose())
        own = [self._ranks.share(rows) for rows in batches]
        shares = [mine if len(mine) else rows[:1] for mine, rows in zip(own, batches, strict=True)]
        stream = self._loaded(shares, self._augment, seed, first=begun)
        counts = iter([len(mine) > 0 for mine in own[begun:]])
        for window in found[first:]:
            yield tuple([Pending(len(rows), partial(next(stream).to, self._device), next(counts)) for rows in window])

    def _loaded(self, batches: list[Tensor], augment: Augment | None, seed: int, *, first: int = 0) -> Iterator[Batch]:
        workers, device = self._config.num_workers or 0, self._device
        return loaded(self._train, batches, device=device, num_workers=workers, augment=augment, seed=seed, first=first)

    def inputs(self) -> Iterator[Tree]:
        """Iterate over all inputs in their order and without augmentation, in batches on the device."""
        rows = torch.split(torch.arange(len(self._train)), self._config.batch_size)
        for batch in self._loaded(list(rows), None, self._seed):
            yield moved(batch.x, self._device)


class _MemoryFeed(Feed):
    """Training data that lie on the device. A DataLoader is many times slower for data in memory."""

    def windows(self, epoch: int, first: int = 0) -> Iterator[Window]:
        for window in islice(self._order.windows(epoch, self._device), first, None):
            yield tuple([self.batch(rows) for rows in window])

    def batch(self, rows: Tensor) -> Pending:
        own = self._ranks.share(rows)
        return Pending(len(rows), partial(self._get, own if len(own) else rows[:1]), len(own) > 0)

    def _get(self, rows: Tensor) -> Batch:
        x, y = taken(self._train.x, rows), taken(self._train.y, rows)
        return Batch(x if self._augment is None else self._augment(x), y, len(rows))

    def inputs(self) -> Iterator[Tree]:
        size = self._config.batch_size
        for start in range(0, len(self._train), size):
            yield taken(self._train.x, slice(start, start + size))


def build_feed(
    train: Dataset,
    config: TrainConfig,
    order: Order,
    *,
    seed: int,
    device: torch.device,
    augment: Augment | None,
    ranks: Ranks,
) -> Feed:
    """Return a feed from the device's memory, or by a DataLoader if the configuration or the data require one."""
    if config.num_workers is None and train.in_memory:
        return _MemoryFeed(train.to(device), config, order, seed, device, augment, ranks)
    return Feed(train, config, order, seed, device, augment, ranks)
