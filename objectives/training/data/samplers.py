"""Orders of an epoch that are not plain chance: an objective's own sampler, and batches of samples of like length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils import data as torch_data

from hpsearch.objectives.errors import ObjectiveError, users_code
from hpsearch.objectives.training.reproducibility.seeds import derive_seed, seeded

if TYPE_CHECKING:
    from hpsearch.objectives.training.config import TrainConfig

# A torch sampler: of rows, or of batches of rows, which then take the place of `batch_size`.
Sampler = torch_data.Sampler[int] | torch_data.Sampler[list[int]]


class ByLength(torch_data.Sampler[list[int]]):
    """Batches of samples of like length, so that little is padded: a sampler for `Objective.sampler`.

    Samples are shuffled, sorted by length within pools of many batches, and the batches shuffled again.

    Args:
        lengths: of the samples [n].
        batch_size: samples in a batch; the last one of an epoch may have fewer.
        pool: batches that are sorted together: more of them pad less, and are less random.
    """

    def __init__(self, lengths: Sequence[int] | Tensor, batch_size: int, *, pool: int = 50) -> None:
        self._lengths = torch.as_tensor(lengths)
        self._size, self._pool = batch_size, pool

    def __len__(self) -> int:
        return math.ceil(len(self._lengths) / self._size)

    def __iter__(self) -> Iterator[list[int]]:
        batches: list[Tensor] = []
        for rows in torch.split(torch.randperm(len(self._lengths)), self._size * self._pool):
            ordered = rows[self._lengths[rows].argsort(stable=True)]
            batches += torch.split(ordered, self._size)
        for number in torch.randperm(len(batches)).tolist():
            yield batches[number].tolist()


def steps_per_epoch(samples: int, *, batch_size: int, accumulate: int, drop_last: bool) -> int:
    """Optimizer steps in one epoch."""
    batches = -(-samples // batch_size)
    if drop_last and batches > 1 and samples % batch_size:
        batches -= 1
    return -(-batches // accumulate)


def windows(
    samples: int,
    *,
    batch_size: int,
    accumulate: int,
    drop_last: bool,
    seed: int,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[Tensor, ...]]:
    """The rows of one epoch in random order, as the micro-batches of each optimizer step.

    The last window may be shorter; with `drop_last` a short last micro-batch is left out unless it is the only one.
    """
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).to(device)
    batches = torch.split(order, batch_size)
    if drop_last and len(batches) > 1 and len(batches[-1]) < batch_size:
        batches = batches[:-1]
    for start in range(0, len(batches), accumulate):
        yield batches[start : start + accumulate]


class Order:
    """The rows of each optimizer step of an epoch: drawn from (seed, epoch) alone.

    Args:
        samples: that are trained on.
        config: the run's.
        seed: the run's.
        sampler: the objective's, where it has one.
    """

    def __init__(self, samples: int, config: TrainConfig, seed: int, sampler: Sampler | None = None) -> None:
        self._config, self._seed, self._sampler = config, seed, sampler
        self._length = samples if sampler is None else len(sampler)  # type: ignore[arg-type]  # torch declares no length
        self._in_batches = sampler is not None and isinstance(self._first(sampler), (list, tuple))

    def _first(self, sampler: Sampler) -> object:
        with users_code("sampler"), seeded(self._seed, "order", 0):
            first = next(iter(sampler), None)
            if first is None or not self._length:
                raise ObjectiveError("sampler() gave a sampler without samples, or without a length")
        return first

    @property
    def steps(self) -> int:
        """Optimizer steps in one epoch."""
        config = self._config
        if self._in_batches:
            return -(-self._length // config.accumulate)
        return steps_per_epoch(
            self._length, batch_size=config.batch_size, accumulate=config.accumulate, drop_last=config.drop_last
        )

    def windows(self, epoch: int, device: torch.device) -> Iterator[tuple[Tensor, ...]]:
        """The rows of an epoch, as the micro-batches of each optimizer step."""
        config = self._config
        if self._sampler is None:
            yield from windows(
                self._length,
                batch_size=config.batch_size,
                accumulate=config.accumulate,
                drop_last=config.drop_last,
                seed=derive_seed(self._seed, "order", epoch),
                device=device,
            )
            return
        batches = [rows.to(device) for rows in self._sampled(epoch)]
        for start in range(0, len(batches), config.accumulate):
            yield tuple(batches[start : start + config.accumulate])

    def _sampled(self, epoch: int) -> list[Tensor]:
        assert self._sampler is not None
        with users_code("sampler"), seeded(self._seed, "order", epoch):
            found = list(self._sampler)
        if self._in_batches:
            return [torch.as_tensor(rows) for rows in found]
        batches = list(torch.split(torch.as_tensor(found), self._config.batch_size))
        short = len(batches) > 1 and len(batches[-1]) < self._config.batch_size
        return batches[:-1] if self._config.drop_last and short else batches
