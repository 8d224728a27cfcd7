"""Metrics that know of one process, over the batches of several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hpsearch.objectives.training.data.tree import moved
from hpsearch.objectives.training.evaluation.metrics import Metrics, synchronises
from hpsearch.objectives.training.ranks import Ranks


def over_ranks(metrics: Metrics, ranks: Ranks) -> Metrics:
    """The metrics over what all ranks add: torchmetrics' sum by themselves, others are given all of it."""
    return metrics if ranks.alone or synchronises(metrics) else _Gathered(metrics, ranks)


def of_this_rank(metrics: Metrics) -> Metrics:
    """The metrics over what this rank adds, whatever the others do: its computation waits for none of them."""
    for metric in _torchmetrics(metrics, set()):
        metric.sync_on_compute = False
        metric.distributed_available_fn = _alone  # the former is read when a metric is made
    return metrics


def _alone() -> bool:
    return False


class _Gathered:
    """Keeps what a rank adds, on the CPU, and gives every rank's to the metrics at the end."""

    def __init__(self, inner: Metrics, ranks: Ranks) -> None:
        self._inner, self._each = inner, ranks.each
        self._kept: list[tuple[Any, Any]] = []
        self._device = torch.device("cpu")
        of_this_rank(inner)  # such as one that somebody's class holds: it would sum once more

    def update(self, output: Any, target: Any) -> None:
        """Adds a batch."""
        self._kept.append((moved(output, "cpu"), moved(target, "cpu")))

    def compute(self) -> Mapping[str, Any]:
        """Each metric over the batches of all ranks, as one process would see them."""
        found = self._each(self._kept)
        self._inner.reset()
        for number in range(max(map(len, found))):
            for kept in found:
                if number < len(kept):
                    self._inner.update(*moved(kept[number], self._device))
        return self._inner.compute()

    def reset(self) -> None:
        """Forgets all batches."""
        self._kept = []
        self._inner.reset()

    def to(self, device: torch.device) -> Any:
        """Moves what was gathered to a device."""
        self._device = device
        if hasattr(self._inner, "to"):
            self._inner.to(device)
        return self


def _torchmetrics(thing: object, seen: set[int]) -> Iterator[Any]:
    """The metrics of torchmetrics that an object holds."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if hasattr(thing, "sync_on_compute"):
        yield thing
    inside = thing.values() if isinstance(thing, Mapping) else thing if isinstance(thing, (list, tuple)) else ()
    for value in [*inside, *getattr(thing, "__dict__", {}).values()]:
        if hasattr(value, "__dict__") or isinstance(value, (dict, list, tuple)):
            yield from _torchmetrics(value, seen)
