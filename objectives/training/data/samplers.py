"""Order of the samples in an epoch: random, by an objective's sampler, or in batches of similar length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import data as torch_data

from hpsearch.objectives.errors import ObjectiveError, wrap_user_errors
from hpsearch.objectives.training.reproducibility.seeds import derive_seed, seed_temporarily

if TYPE_CHECKING:
    from hpsearch.objectives.training.config import TrainConfig

# A PyTorch sampler of rows, or of batches of rows. Samplers of batches override `batch_size`.
Sampler = torch_data.Sampler[int] | torch_data.Sampler[list[int]]


class LengthGroupedSampler(torch_data.Sampler[list[int]]):
    """A sampler for `Objective.sampler` that batches samples of similar length, which reduces padding.

    It shuffles the samples, sorts them by length within pools of many batches, and shuffles the batches.

    Args:
        lengths: lengths of the samples [n].
        batch_size: samples in a batch; one batch of an epoch may have fewer.
        pool: number of batches whose samples are sorted together. A larger pool reduces padding and randomness.
    """

    def __init__(self, lengths: Sequence[int] | Tensor, batch_size: int, *, pool: int = 50) -> None:
        if batch_size < 1 or pool < 1:
            raise ObjectiveError(f"batch_size and pool must be at least 1, not {batch_size} and {pool}")
        self._lengths = torch.as_tensor(lengths)
        self._size, self._pool = batch_size, pool

    def __len__(self) -> int:
        return math.ceil(len(self._lengths) / self._size)

    def __iter__(self) -> Iterator[list[int]]:
        batches: list[Tensor] = []
        for rows in torch.split(torch.randperm(len(self._lengths)), self._size * self._pool):
            batches += torch.split(rows[self._lengths[rows].argsort(stable=True)], self._size)
        for number in torch.randperm(len(batches)).tolist():
            yield batches[number].tolist()


class EpochOrder:
    """Rows (sample indices) of each optimizer step of an epoch, which depend only on (seed, epoch).

    The order is a random permutation, or that of the objective's sampler. The last step may have fewer
    micro-batches. `drop_last` omits a short last micro-batch unless it is the only one.
    """

    def __init__(self, samples: int, config: TrainConfig, seed: int, sampler: Sampler | None = None) -> None:
        self._config, self._seed, self._sampler, self._samples = config, seed, sampler, samples
        self._length = samples if sampler is None else len(sampler)  # type: ignore[arg-type]  # torch declares no length
        self._in_batches = sampler is not None and isinstance(self._first(sampler), (list, tuple))

    def _first(self, sampler: Sampler) -> object:
        with wrap_user_errors("sampler"), seed_temporarily(self._seed, "order", 0):
            first = next(iter(sampler), None)
            if first is None or not self._length:
                raise ObjectiveError("sampler() returned a sampler without samples, or of length 0")
        return first

    @property
    def steps(self) -> int:
        """Number of optimizer steps in one epoch."""
        config, batches = self._config, self._length
        if not self._in_batches:
            batches = math.ceil(self._length / config.batch_size)
            if config.drop_last and batches > 1 and self._length % config.batch_size:
                batches -= 1
        return math.ceil(batches / config.gradient_accumulation_steps)

    def iterate_steps(self, epoch: int, device: torch.device) -> Iterator[tuple[Tensor, ...]]:
        """Iterate over the optimizer steps of an epoch; each step is a tuple with the rows of each micro-batch."""
        batches = self._batches(epoch, device)
        for start in range(0, len(batches), self._config.gradient_accumulation_steps):
            yield tuple(batches[start : start + self._config.gradient_accumulation_steps])

    def _batches(self, epoch: int, device: torch.device) -> Sequence[Tensor]:
        if self._sampler is None:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "order", epoch))
            rows = torch.randperm(self._length, generator=generator)
        else:
            with wrap_user_errors("sampler"), seed_temporarily(self._seed, "order", epoch):
                found: list[Any] = list(islice(self._sampler, self._length + 1))  # it may be endless
                if len(found) > self._length:
                    raise ObjectiveError(f"sampler() yields more samples or batches than its length, {self._length}")
                rows = torch.as_tensor([row for batch in found for row in batch] if self._in_batches else found)
            if bool((rows >= self._samples).any()):
                raise ObjectiveError(
                    f"sampler() returned sample {int(rows.max())}, but the training split has {self._samples} samples"
                )
            if self._in_batches:
                return [torch.as_tensor(batch).to(device) for batch in found]
        batches = torch.split(rows.to(device), self._config.batch_size)
        short = len(batches) > 1 and len(batches[-1]) < self._config.batch_size
        return batches[:-1] if self._config.drop_last and short else batches
