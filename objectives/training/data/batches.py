"""Training batches of a run, from the device's memory or a DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hpsearch.objectives.training.data.dataset import Batch, Dataset, Stream
from hpsearch.objectives.training.data.loader import Augment, load_batches
from hpsearch.objectives.training.data.samplers import EpochOrder
from hpsearch.objectives.training.data.tree import Tree, index_rows, tensors, to_device
from hpsearch.objectives.training.ranks import Ranks
from hpsearch.objectives.training.reproducibility.seeds import derive_seed

if TYPE_CHECKING:
    from hpsearch.objectives.training.config import TrainConfig


class LazyBatch(NamedTuple):
    """Micro-batch, or this rank's share of a micro-batch, which is not loaded before `get` is called.

    Attributes:
        size: number of samples over all ranks.
        load: loads this rank's samples onto the device.
        has_samples: False if this rank has no sample of the micro-batch. The rank then gets one sample with weight 0,
            because all ranks must take part in a step.
    """

    size: int
    load: Callable[[], Batch]
    has_samples: bool = True


MicroBatches = tuple[LazyBatch, ...]
# Reading the samples of one small batch takes longer than copying them, so several batches are read at once.
_STEPS_READ_AT_ONCE, _BYTES_READ_AT_ONCE = 16, 2**24


class BatchSource:
    """Training batches of a run, loaded by a DataLoader. Every rank gets its share of each batch."""

    def __init__(
        self,
        train: Dataset,
        config: TrainConfig,
        order: EpochOrder,
        seed: int,
        device: torch.device,
        augment: Augment | None,
        ranks: Ranks,
    ) -> None:
        self._train, self._config, self._order, self._seed = train, config, order, seed
        self._device, self._augment, self._ranks = device, augment, ranks
        self.steps = order.steps  # optimizer steps in one epoch

    def iterate_steps(self, epoch: int, first: int = 0) -> Iterator[MicroBatches]:
        """Iterate over the micro-batches of each optimizer step from step `first` on.

        The order of the epoch (0-based) depends only on (seed, epoch).
        """
        found = list(self._order.iterate_steps(epoch, torch.device("cpu")))
        batches = [rows for micro_batches in found for rows in micro_batches]
        samples: object = self._train.samples
        if isinstance(samples, Stream):
            samples.set_epoch(epoch)
        begun = sum(map(len, found[:first]))
        seed = derive_seed(self._seed, "load", epoch, *self._ranks.seed_suffix())
        own = [self._ranks.select_own_rows(rows) for rows in batches]
        shares = [mine if len(mine) else rows[:1] for mine, rows in zip(own, batches, strict=True)]
        stream = self._loaded(shares, self._augment, seed, first=begun)
        counts = iter([len(mine) > 0 for mine in own[begun:]])
        for micro_batches in found[first:]:
            yield tuple(
                [LazyBatch(len(rows), partial(next(stream).to, self._device), next(counts)) for rows in micro_batches]
            )

    def iterate_batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of a source in memory with one micro-batch per step, as `iterate_steps` does."""
        raise NotImplementedError

    def _loaded(self, batches: list[Tensor], augment: Augment | None, seed: int, *, first: int = 0) -> Iterator[Batch]:
        workers, device = self._config.num_workers or 0, self._device
        return load_batches(
            self._train, batches, device=device, num_workers=workers, augment=augment, seed=seed, first=first
        )

    def inputs(self) -> Iterator[Tree]:
        """Iterate over all inputs in order and without augmentation, in batches on the device."""
        rows = torch.split(torch.arange(len(self._train)), self._config.batch_size)
        for batch in self._loaded(list(rows), None, self._seed):
            yield to_device(batch.x, self._device)


class _MemoryBatchSource(BatchSource):
    """Training batches from tensors on the device, which is many times faster than a DataLoader."""

    def iterate_steps(self, epoch: int, first: int = 0) -> Iterator[MicroBatches]:
        for micro_batches in islice(self._order.iterate_steps(epoch, self._device), first, None):
            yield tuple([self.batch(rows) for rows in micro_batches])

    def batch(self, rows: Tensor) -> LazyBatch:
        own = self._ranks.select_own_rows(rows)
        own_or_first = own if len(own) else rows[:1]
        return LazyBatch(len(rows), partial(self._get, self._train, own_or_first, len(own_or_first)), len(own) > 0)

    def iterate_batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        steps = islice(self._order.iterate_steps(epoch, self._device), first, None)
        per_sample = sum(part[:1].nbytes for _, part in tensors((self._train.x, self._train.y))) or 1
        n_steps = max(1, min(_STEPS_READ_AT_ONCE, _BYTES_READ_AT_ONCE // (per_sample * self._config.batch_size)))
        while found := [rows for (rows,) in islice(steps, n_steps)]:
            samples = self._train.batch(torch.cat(found))
            for rows, end in zip(found, accumulate(map(len, found)), strict=True):
                yield self._get(samples, slice(end - len(rows), end), len(rows))

    def _get(self, samples: Dataset | Batch, rows: Tensor | slice, size: int) -> Batch:
        x, y = index_rows(samples.x, rows), index_rows(samples.y, rows)
        return Batch(x if self._augment is None else self._augment(x), y, size)

    def inputs(self) -> Iterator[Tree]:
        size = self._config.batch_size
        for start in range(0, len(self._train), size):
            yield index_rows(self._train.x, slice(start, start + size))


def build_batch_source(
    train: Dataset,
    config: TrainConfig,
    order: EpochOrder,
    *,
    seed: int,
    device: torch.device,
    augment: Augment | None,
    ranks: Ranks,
) -> BatchSource:
    """Return a source in device memory, or a DataLoader if `num_workers` is set or the data are not in memory."""
    if config.num_workers is None and train.in_memory:
        return _MemoryBatchSource(train.to(device), config, order, seed, device, augment, ranks)
    return BatchSource(train, config, order, seed, device, augment, ranks)
