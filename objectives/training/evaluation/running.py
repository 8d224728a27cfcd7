"""Running sums of losses and metrics, reduced over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hpsearch.objectives.training.data.tree import moved, on_cpu
from hpsearch.objectives.training.evaluation import gathered
from hpsearch.objectives.training.evaluation.evaluate import Means
from hpsearch.objectives.training.evaluation.metrics import Metrics, synchronises
from hpsearch.objectives.training.evaluation.step import Step, detached
from hpsearch.objectives.training.ranks import ALONE, Ranks


class RunningMetrics:
    """Metrics of the outputs that training produced, added in chunks: an update costs more than a small batch.

    What a chunk holds is bounded by rows and by bytes: of images or of tokens a single batch is a chunk.
    """

    _ROWS, _BYTES = 4096, 4 << 20

    def __init__(self, metrics: Metrics, ranks: Ranks = ALONE) -> None:
        self._metrics, self._ranks = metrics, ranks
        self._outputs: list[Any] = []
        self._targets: list[Any] = []
        self._rows = self._bytes = 0
        self._measured: Means | None = None  # by the steps themselves
        with torch.inference_mode():
            metrics.reset()

    def add(self, step: Step, size: int) -> None:
        """Adds a batch of `size` samples; of none only the names of what it measures."""
        if step.metrics:
            self._measured = self._measured or Means(step.loss.device)
            self._measured.add(step, size)
        if step.outputs is None or not size:
            return
        outputs = detached(step.outputs)
        if not (isinstance(outputs, Tensor) and isinstance(step.targets, Tensor)):  # only tensors are joined
            self._update(outputs, step.targets)
            return
        if outputs.ndim > 2 and self._outputs and outputs.shape[1:] != self._outputs[-1].shape[1:]:
            self._flush()
        self._outputs.append(outputs)
        self._targets.append(step.targets)
        self._rows += size
        self._bytes += outputs.nbytes + step.targets.nbytes
        if self._rows >= self._ROWS or self._bytes >= self._BYTES:
            self._flush()

    def compute(self) -> dict[str, Tensor]:
        """All metrics over what was added."""
        self._flush()
        measured = {} if self._measured is None else self._measured.compute(self._ranks)
        measured.pop("loss", None)
        with torch.inference_mode():
            return {**measured, **self._metrics.compute()}

    def state_dict(self) -> dict[str, Any]:
        """Return all that was added so far as plain values and tensors, in chunks, because sums depend on them.

        Raises:
            UnkeptError: the metrics hold a value that is not plain.
        """
        return {
            "outputs": list(self._outputs),
            "targets": list(self._targets),
            "rows": self._rows,
            "bytes": self._bytes,
            "measured": None if self._measured is None else self._measured.state_dict(),
            "metrics": gathered.state_of(self._metrics),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restores what `state_dict` gave."""
        self._outputs, self._targets = moved(state["outputs"], device), moved(state["targets"], device)
        self._rows, self._bytes = state["rows"], state["bytes"]
        if state["measured"] is not None:
            self._measured = Means(device)
            self._measured.load_state_dict(state["measured"])
        gathered.restore(self._metrics, moved(state["metrics"], device))

    def _flush(self) -> None:
        outputs, targets = self._outputs, self._targets
        self._outputs, self._targets, self._rows, self._bytes = [], [], 0, 0
        if len(outputs) == 1:
            self._update(outputs[0], targets[0])
        elif outputs:
            self._update(torch.cat(outputs), torch.cat(targets))

    @torch.inference_mode()
    def _update(self, outputs: Any, targets: Any) -> None:
        self._metrics.update(outputs, targets)


def over_ranks(metrics: Metrics, ranks: Ranks) -> Metrics:
    """The metrics over what all ranks add: torchmetrics' sum by themselves, others are given all of it."""
    return metrics if ranks.alone or synchronises(metrics) else _Gathered(metrics, ranks)


def of_this_rank(metrics: Metrics) -> Metrics:
    """Return the metrics over what this rank adds: `compute` does not wait for other ranks."""
    for metric in _torchmetrics(metrics, set()):
        metric.sync_on_compute = False
        metric.distributed_available_fn = _not_distributed  # torchmetrics reads sync_on_compute only at construction
    return metrics


def _not_distributed() -> bool:  # no lambda, which cannot be pickled
    return False


class _Gathered:
    """Metrics over the batches of all ranks, which each rank keeps on the CPU until `compute`."""

    def __init__(self, inner: Metrics, ranks: Ranks) -> None:
        self._inner, self._each = inner, ranks.each
        self._kept: list[tuple[Any, Any]] = []
        self._device = torch.device("cpu")
        of_this_rank(inner)  # such as one that somebody's class holds: it would sum once more

    def update(self, output: Any, target: Any) -> None:
        self._kept.append((on_cpu(output), on_cpu(target)))

    def compute(self) -> Mapping[str, Any]:
        found = self._each(self._kept)
        self._inner.reset()
        for number in range(max(map(len, found))):
            for kept in found:
                if number < len(kept):
                    self._inner.update(*moved(kept[number], self._device))
        return self._inner.compute()

    def reset(self) -> None:
        self._kept = []
        self._inner.reset()

    def to(self, device: torch.device) -> Any:
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
