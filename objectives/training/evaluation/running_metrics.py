"""Running sums of losses and metrics, reduced over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hpsearch.objectives.training.data.tree import to_cpu, to_device
from hpsearch.objectives.training.evaluation import metric_state
from hpsearch.objectives.training.evaluation.evaluate import RunningMeans
from hpsearch.objectives.training.evaluation.metrics import Metrics, can_sync_over_ranks
from hpsearch.objectives.training.evaluation.step import Step, detach_outputs
from hpsearch.objectives.training.ranks import SINGLE_PROCESS, Ranks


class RunningMetrics:
    """Metrics of training outputs, updated in chunks, because an update can take longer than a small batch.

    Chunks are limited by rows and bytes, so that a batch of images or tokens is a chunk by itself.
    """

    _ROWS, _BYTES = 4096, 4 << 20

    def __init__(self, metrics: Metrics, ranks: Ranks = SINGLE_PROCESS) -> None:
        self._metrics, self._ranks = metrics, ranks
        self._outputs: list[Any] = []
        self._targets: list[Any] = []
        self._rows = self._bytes = 0
        self._has_outputs = False  # metrics cannot be computed without outputs
        self._measured: RunningMeans | None = None  # metrics that the steps return
        with torch.no_grad():
            metrics.reset()

    def add(self, step: Step, size: int) -> None:
        """Add the result of a batch of `size` samples; if `size` is 0, add only the metric names."""
        if step.metrics:
            self._measured = self._measured or RunningMeans(step.loss.device)
            self._measured.add(step, size)
        if step.outputs is None or not size:
            return
        self._has_outputs = True
        outputs = detach_outputs(step.outputs)
        if not (isinstance(outputs, Tensor) and isinstance(step.targets, Tensor)):  # only tensors can be concatenated
            self._update(outputs, step.targets)
            return
        pairs = ((self._outputs, outputs), (self._targets, step.targets))
        if any(earlier and earlier[-1].shape[1:] != new.shape[1:] for earlier, new in pairs):  # cannot be concatenated
            self._flush()
        self._outputs.append(outputs)
        self._targets.append(step.targets)
        self._rows += size
        self._bytes += outputs.nbytes + step.targets.nbytes
        if self._rows >= self._ROWS or self._bytes >= self._BYTES:
            self._flush()

    def compute(self) -> dict[str, Tensor]:
        """Return all metrics of the added batches."""
        self._flush()
        measured = {} if self._measured is None else self._measured.compute(self._ranks)
        measured.pop("loss", None)
        if not self._has_outputs and self._ranks.is_single_process:  # another rank may have outputs
            return measured
        with torch.no_grad():
            return {**measured, **self._metrics.compute()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and tensors, with the unfinished chunk, because rounding depends on chunks.

        Raises:
            UnserializableStateError: the metrics contain a value that a checkpoint cannot hold.
        """
        return {
            "outputs": list(self._outputs),
            "targets": list(self._targets),
            "rows": self._rows,
            "bytes": self._bytes,
            "has_outputs": self._has_outputs,
            "measured": None if self._measured is None else self._measured.state_dict(),
            "metrics": metric_state.get_metric_state(self._metrics),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore the result of `state_dict`."""
        self._outputs, self._targets = to_device(state["outputs"], device), to_device(state["targets"], device)
        self._rows, self._bytes = state["rows"], state["bytes"]
        self._has_outputs = state.get("has_outputs", True)  # missing in checkpoints of earlier versions
        if state["measured"] is not None:
            self._measured = RunningMeans(device)
            self._measured.load_state_dict(state["measured"])
        metric_state.load_metric_state(self._metrics, to_device(state["metrics"], device))

    def _flush(self) -> None:
        outputs, targets = self._outputs, self._targets
        self._outputs, self._targets, self._rows, self._bytes = [], [], 0, 0
        if len(outputs) == 1:
            self._update(outputs[0], targets[0])
        elif outputs:
            self._update(torch.cat(outputs), torch.cat(targets))

    @torch.no_grad()
    def _update(self, outputs: Any, targets: Any) -> None:
        self._metrics.update(outputs, targets)


def aggregate_over_ranks(metrics: Metrics, ranks: Ranks) -> Metrics:
    """Return metrics over all ranks: torchmetrics synchronize themselves, others get the batches of every rank."""
    return metrics if ranks.is_single_process or can_sync_over_ranks(metrics) else _GatheredMetrics(metrics, ranks)


def disable_rank_sync(metrics: Metrics) -> Metrics:
    """Make torchmetrics compute over this rank's batches only, without waiting for other ranks."""
    for metric in _find_torchmetrics(metrics, set()):
        metric.sync_on_compute = False
        metric.distributed_available_fn = _not_distributed  # torchmetrics reads sync_on_compute only at construction
    return metrics


def _not_distributed() -> bool:  # a lambda cannot be pickled
    return False


class _GatheredMetrics:
    """Metrics over the batches of all ranks; each rank keeps its batches on the CPU until `compute`."""

    def __init__(self, inner: Metrics, ranks: Ranks) -> None:
        self._inner, self._gather = inner, ranks.all_gather_object
        self._kept: list[tuple[Any, Any]] = []
        self._device = torch.device("cpu")
        disable_rank_sync(inner)  # a torchmetrics metric inside a custom class would sum over ranks again

    def update(self, output: Any, target: Any) -> None:
        self._kept.append((to_cpu(output), to_cpu(target)))

    def compute(self) -> Mapping[str, Any]:
        found = self._gather(self._kept)
        self._inner.reset()
        for number in range(max(map(len, found))):
            for kept in found:
                if number < len(kept):
                    self._inner.update(*to_device(kept[number], self._device))
        return self._inner.compute()

    def reset(self) -> None:
        self._kept = []
        self._inner.reset()

    def to(self, device: torch.device) -> Any:
        self._device = device
        if hasattr(self._inner, "to"):
            self._inner.to(device)
        return self


def _find_torchmetrics(thing: object, seen: set[int]) -> Iterator[Any]:
    """Iterate over the torchmetrics metrics inside an object."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if hasattr(thing, "sync_on_compute"):
        yield thing
    inside = thing.values() if isinstance(thing, Mapping) else thing if isinstance(thing, (list, tuple)) else ()
    for value in [*inside, *getattr(thing, "__dict__", {}).values()]:
        if hasattr(value, "__dict__") or isinstance(value, (dict, list, tuple)):
            yield from _find_torchmetrics(value, seen)
