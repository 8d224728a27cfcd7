"""Metrics over a whole split: the field's definitions, from torchmetrics."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from hpsearch.objectives.errors import MetricError, ObjectiveError, nearest
from hpsearch.objectives.measured import MEASURED

if TYPE_CHECKING:
    from hpsearch.objectives.training.data.dataset import Dataset


CLASSIFICATION = ("accuracy", "macro_f1")
BINARY = ("auroc", "average_precision")
REGRESSION = ("rmse", "mae", "r2")
DIRECTIONS = {
    "loss": "minimize",
    **dict.fromkeys((*CLASSIFICATION, *BINARY, "r2"), "maximize"),
    **dict.fromkeys(("rmse", "mae"), "minimize"),
}


class Metrics(Protocol):
    """Named metrics that gather batches; a `torchmetrics.MetricCollection` fits."""

    def update(self, output: Tensor, target: Tensor) -> None:
        """Adds a batch of outputs [n, ...] and targets [n, ...]."""

    def compute(self) -> Mapping[str, Any]:
        """Each metric by name, a scalar, over all that was added since the last reset."""

    def reset(self) -> None:
        """Forgets all batches."""

    def to(self, device: torch.device) -> Any:
        """Moves what was gathered to a device."""


def metrics_for(metric: str, train: Dataset) -> Metrics:
    """Return the usual set of metrics that `metric` belongs to.

    Raises:
        MetricError: `metric` is in no set, or does not fit the targets. The objective must override `metrics`.
    """
    if metric in MEASURED:
        raise chooses_none(metric)
    y = train.y if isinstance(train.y, Tensor) else None
    labels = y is not None and not y.dtype.is_floating_point and y.ndim == 1
    if metric in BINARY:
        return binary()
    if metric in REGRESSION:
        return regression()
    if metric == "loss":
        if y is None:
            return NoMetrics()
        return classification(int(y.max()) + 1) if labels and int(y.min()) >= 0 else _WhereFitting(regression())
    if metric not in CLASSIFICATION:
        raise MetricError(metric, f"is not built in: {nearest(metric, list(DIRECTIONS))}; or override metrics()")
    if y is None:
        remedy = "give the data targets=, or define metrics(), as classification(10)"
        raise MetricError(metric, f"needs the number of classes: {remedy}")
    if not labels:
        raise unfit(metric, y)
    return classification(int(y.max()) + 1)


def chooses_none(metric: str) -> MetricError:
    """The error of a measure of the model where a metric of validation is needed."""
    return MetricError(metric, "does not tell the best epoch: name a metric of validation first, this one after it")


def brought_with(metric: str) -> tuple[str, ...]:
    """All that the usual set of a metric may report: with the loss that is what fits the targets."""
    if metric == "loss":
        return ("loss", *CLASSIFICATION, *REGRESSION)
    sets = (CLASSIFICATION, REGRESSION, (*BINARY, "base_rate"))
    return (*next((names for names in sets if metric in names), ()), "loss")


def fitting(y: Tensor, output: Tensor | None = None) -> list[str]:
    """Return the built-in metrics that fit targets [n, ...] and, unless None, outputs for some samples [k, ...]."""
    numbers = y.dtype.is_floating_point
    labels = not numbers and y.ndim == 1
    size, wanted = None if output is None else output[0].numel(), y[0].numel()
    # One logit for two classes: accuracy would take it for a class of its own, always the same.
    enough = output is None or (output.ndim > 1 and output.shape[1] > int(y.max()))
    two = wanted == 1 and bool(((y == 0) | (y == 1)).all())
    found: list[str] = []
    found += CLASSIFICATION if labels and enough else ()
    found += BINARY if two and size in {None, 1, 2} else ()
    found += REGRESSION if (size == wanted and (numbers or not two)) or (numbers and size is None) else ()
    return [*found, "loss"] if labels or size in {None, wanted} else found


def unfit(metric: str, y: Tensor, output: Tensor | None = None) -> MetricError:
    """The error of a built-in metric that is none of those fitting; it names these."""
    labels = not y.dtype.is_floating_point and y.ndim == 1
    targets = (
        f"{int(y.max()) + 1} classes" if labels else f"targets {['n', *y.shape[1:]]} of {y.dtype}".replace("'", "")
    )
    outputs = "" if output is None else f"{output[0].numel()} output{'s' * (output[0].numel() != 1)} a sample for "
    would = ", ".join(fitting(y, output)) or "none that is built in"
    return MetricError(metric, f"does not fit {outputs}{targets}; metrics that fit: {would}; or override metrics()")


def classification(classes: int) -> Metrics:
    """`accuracy` and `macro_f1` from logits [n, classes] and labels [n]."""
    library = _library("classification")
    return _collection(
        accuracy=library.MulticlassAccuracy(classes, average="micro", validate_args=False),
        macro_f1=library.MulticlassF1Score(classes, average="macro", validate_args=False),
    )


def regression() -> Metrics:
    """`rmse`, `mae` and `r2` from predictions and values of one shape, [n] or [n, 1]."""
    library = _library("regression")
    return _Flat(
        _collection(rmse=library.MeanSquaredError(squared=False), mae=library.MeanAbsoluteError(), r2=library.R2Score())
    )


def binary() -> Metrics:
    """`auroc`, `average_precision` (PR-AUC) and `base_rate` from labels 0 or 1 [n] and one logit [n] or [n, 1], or two.

    The base rate, the share of positives, is the average precision of a model that knows nothing.
    """
    library = _library("classification")
    return _Binary(
        _collection(
            auroc=library.BinaryAUROC(validate_args=False),
            average_precision=library.BinaryAveragePrecision(validate_args=False),
        )
    )


class NoMetrics:
    """No metrics besides the loss and what steps measure."""

    def update(self, output: Any, target: Any) -> None:
        """Add nothing."""

    def compute(self) -> Mapping[str, Any]:
        """Return nothing."""
        return {}

    def reset(self) -> None:
        """Reset nothing."""

    def to(self, device: torch.device) -> Any:  # noqa: ARG002 as metrics are moved
        """Move nothing."""
        return self


class _Named:
    """A single torchmetrics metric, under the name that the objective optimises."""

    def __init__(self, metric: Any, name: str) -> None:
        self._metric, self._name = metric, name

    def update(self, output: Any, target: Any) -> None:
        self._metric.update(output, target)

    def compute(self) -> Mapping[str, Any]:
        return {self._name: self._metric.compute()}

    def reset(self) -> None:
        self._metric.reset()

    def to(self, device: torch.device) -> Any:
        self._metric.to(device)
        return self


def as_metrics(found: Any, metric: str) -> Metrics:
    """Check the methods of metrics, and name a single torchmetrics `Metric` by the metric that is optimised."""
    lacking = [name for name in ("update", "compute", "reset") if not callable(getattr(found, name, None))]
    if lacking:
        raise ObjectiveError(f"metrics() must return metrics with {', '.join(lacking)}, not {type(found).__name__}")
    alone = hasattr(found, "full_state_update") and not isinstance(found, Mapping)
    return _Named(found, metric) if alone else found


class _Flat:
    """Compares [n, 1] with [n]: subtracting them would give [n, n]."""

    def __init__(self, inner: Metrics) -> None:
        self._inner = inner

    def update(self, output: Tensor, target: Tensor) -> None:
        if output.numel() != target.numel():
            raise ObjectiveError(f"outputs {list(output.shape)} do not match targets {list(target.shape)}")
        self._inner.update(output.reshape(-1), target.reshape(-1))

    def compute(self) -> Mapping[str, Any]:
        return self._inner.compute()

    def reset(self) -> None:
        self._inner.reset()

    def to(self, device: torch.device) -> Any:
        self._inner.to(device)
        return self


class _WhereFitting(_Flat):
    """No metrics where outputs are not of the targets' shape: of a density they are its parameters."""

    def __init__(self, inner: Metrics) -> None:
        super().__init__(inner)
        self._fits = True

    def update(self, output: Tensor, target: Tensor) -> None:
        self._fits = self._fits and output.numel() == target.numel()
        if self._fits:
            super().update(output, target)

    def compute(self) -> Mapping[str, Any]:
        return super().compute() if self._fits else {}

    def reset(self) -> None:
        self._fits = True
        super().reset()


class _Binary(_Flat):
    def __init__(self, inner: Metrics) -> None:
        super().__init__(inner)
        sums = _library("aggregation").SumMetric
        self._positives, self._count = sums(nan_strategy="disable"), sums(nan_strategy="disable")

    def update(self, output: Tensor, target: Tensor) -> None:
        if output.ndim == 2 and output.shape[1] == 2:
            output = output[:, 1] - output[:, 0]
        # torchmetrics applies a sigmoid to those batches alone whose values leave [0, 1]: give it probabilities.
        # In float64, so that confident scores do not become equal.
        super().update(output.double().sigmoid(), target.long())
        self._positives.update(target.sum())
        self._count.update(target.numel())

    def compute(self) -> Mapping[str, Any]:
        count = self._count.compute()
        rate = self._positives.compute() / count
        if not 0 < float(rate) < 1:  # torchmetrics would answer 0.0
            raise ObjectiveError(f"auroc needs both classes, but all {int(count)} labels of a split are {int(rate)}")
        return {**super().compute(), "base_rate": rate}

    def reset(self) -> None:
        super().reset()
        self._positives.reset()
        self._count.reset()

    def to(self, device: torch.device) -> Any:
        self._positives.to(device)
        self._count.to(device)
        return super().to(device)


def synchronises(metrics: Any) -> bool:
    """Whether metrics sum over ranks by themselves, as torchmetrics' do, and ours, which hold such."""
    if isinstance(metrics, (_Named, NoMetrics, _Flat)):
        return True
    held = metrics.values() if isinstance(metrics, nn.ModuleDict) and hasattr(metrics, "compute_groups") else [metrics]
    return all(hasattr(metric, "sync_on_compute") for metric in held)


def _library(part: str) -> Any:
    try:
        return importlib.import_module(f"torchmetrics.{part}")
    except ModuleNotFoundError as error:
        raise ObjectiveError("the built-in metrics need torchmetrics: pip install torchmetrics") from error


def _collection(**metrics: Any) -> Metrics:
    from torchmetrics import MetricCollection

    return cast("Metrics", MetricCollection(metrics))


def largest_class(data: Dataset) -> float | None:
    """Share of the most frequent class: what a model that knows nothing scores. None where targets are no classes."""
    if not isinstance(data.y, Tensor) or data.y.dtype.is_floating_point or data.y.ndim != 1 or int(data.y.min()) < 0:
        return None
    return float(torch.bincount(data.y).max()) / len(data)
