"""Samples that come one after the other: read in their order, by one process, and never all at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from hpsearch.objectives.errors import ObjectiveError


class Stream:
    """The first samples of an iterable, such as a torch `IterableDataset`, by their numbers.

    A number beyond the last one is read up to, one before it starts the iterable anew: a pass in order reads each
    sample once.

    Args:
        source: gives the samples anew each time that it is iterated over.
        length: how many of them are an epoch.
    """

    def __init__(self, source: Iterable[Any], length: int) -> None:
        if length < 1:
            raise ObjectiveError(f"length={length}: an epoch of a stream has at least one sample")
        self._source, self._length = source, length
        self._running: Iterator[Any] | None = None
        self._next = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> Any:
        if self._running is None or row < self._next:
            self._running, self._next = iter(self._source), 0
        while True:
            try:
                sample = next(self._running)
            except StopIteration:
                self._running = None
                raise ObjectiveError(
                    f"the stream ended after {self._next} samples: give that as its length, not {self._length}"
                ) from None
            self._next += 1
            if self._next > row:
                return sample

    def __getstate__(self) -> dict[str, Any]:
        """Without the iterator: another process begins its own."""
        return {**self.__dict__, "_running": None, "_next": 0}

    def set_epoch(self, epoch: int) -> None:
        """Tell a source that shuffles by itself, as Hugging Face's do, which epoch begins."""
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)
