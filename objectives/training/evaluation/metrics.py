"""Built-in metrics over a split, from torchmetrics."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from hpsearch.objectives.errors import MetricError, ObjectiveError, suggest_names
from hpsearch.objectives.model_metric_names import MODEL_METRICS
from hpsearch.working_folder import import_matplotlib

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
    """Interface of named metrics that accumulate batches, such as `torchmetrics.MetricCollection`."""

    def update(self, output: Tensor, target: Tensor) -> None:
        """Add a batch of outputs [n, ...] and targets [n, ...]."""

    def compute(self) -> Mapping[str, Any]:
        """Return each metric by name, a scalar, over the batches since the last reset."""

    def reset(self) -> None:
        """Reset the state, so that it contains no batches."""

    def to(self, device: torch.device) -> Any:
        """Move the state to a device."""


def build_metrics(metric: str, train: Dataset) -> Metrics:
    """Return the built-in set of metrics that contains `metric`.

    Raises:
        MetricError: no built-in set contains `metric`, or `metric` is incompatible with the targets. In both cases,
            override `Objective.metrics`.
    """
    if metric in MODEL_METRICS:
        raise make_selection_metric_error(metric)
    y = train.y if isinstance(train.y, Tensor) else None
    labels = y is not None and not y.dtype.is_floating_point and y.ndim == 1
    if metric in BINARY:
        return binary()
    if metric in REGRESSION:
        return regression()
    if metric == "loss":
        if y is None:
            return NoMetrics()
        return classification(int(y.max()) + 1) if labels and int(y.min()) >= 0 else _RegressionIfMatching(regression())
    if metric not in CLASSIFICATION:
        raise MetricError(metric, f"is not built in; {suggest_names(metric, list(DIRECTIONS))}; or override metrics()")
    if y is None:
        remedy = "pass targets= with the data, or override metrics(), for example with classification(10)"
        raise MetricError(metric, f"needs the number of classes; {remedy}")
    if not labels:
        raise make_incompatible_metric_error(metric, y)
    return classification(int(y.max()) + 1)


def make_selection_metric_error(metric: str) -> MetricError:
    """Return the error to raise if a model metric is to select the best epoch, which only validation metrics can do."""
    return MetricError(metric, "cannot select the best epoch; put a validation metric first in directions")


def list_default_metrics(metric: str) -> tuple[str, ...]:
    """Return all names that the built-in set of a metric may report; for "loss", the names of every possible set."""
    if metric == "loss":
        return ("loss", *CLASSIFICATION, *REGRESSION)
    sets = (CLASSIFICATION, REGRESSION, (*BINARY, "base_rate"))
    return (*next((names for names in sets if metric in names), ()), "loss")


def list_compatible_metrics(y: Tensor, output: Tensor | None = None) -> list[str]:
    """Return the built-in metrics that fit targets `y` [n, ...] and, if given, outputs of some samples [k, ...]."""
    numbers = y.dtype.is_floating_point
    labels = not numbers and y.ndim == 1
    size, wanted = None if output is None else output[0].numel(), y[0].numel()
    # With one logit for two classes, accuracy would always predict class 0.
    enough = output is None or (output.ndim > 1 and output.shape[1] > int(y.max()))
    two = wanted == 1 and bool(((y == 0) | (y == 1)).all())
    found: list[str] = []
    found += CLASSIFICATION if labels and enough else ()
    found += BINARY if two and size in {None, 1, 2} else ()
    found += REGRESSION if (size == wanted and (numbers or not two)) or (numbers and size is None) else ()
    return [*found, "loss"] if labels or size in {None, wanted} else found


def make_incompatible_metric_error(metric: str, y: Tensor, output: Tensor | None = None) -> MetricError:
    """Return the error for an incompatible built-in metric; the message lists the compatible metrics."""
    labels = not y.dtype.is_floating_point and y.ndim == 1
    given = f"{int(y.max()) + 1} classes" if labels else f"targets {['n', *y.shape[1:]]} of {y.dtype}".replace("'", "")
    outputs = "" if output is None else f"{output[0].numel()} output{'s' * (output[0].numel() != 1)} per sample for "
    compatible = ", ".join(list_compatible_metrics(y, output)) or "none of the built-in ones"
    reason = f"is incompatible with {outputs}{given}; compatible metrics: {compatible}; or override metrics()"
    return MetricError(metric, reason)


def classification(classes: int) -> Metrics:
    """Return the metrics `accuracy` and `macro_f1` for logits [n, classes] and labels [n]."""
    library = _import_torchmetrics("classification")
    return _build_collection(
        accuracy=library.MulticlassAccuracy(classes, average="micro", validate_args=False),
        macro_f1=library.MulticlassF1Score(classes, average="macro", validate_args=False),
    )


def regression() -> Metrics:
    """Return the metrics `rmse`, `mae` and `r2` for predictions and targets with equal numbers of values."""
    library = _import_torchmetrics("regression")
    rmse = library.MeanSquaredError(squared=False)
    return _FlatMetrics(_build_collection(rmse=rmse, mae=library.MeanAbsoluteError(), r2=library.R2Score()))


def binary() -> Metrics:
    """Return `auroc`, `average_precision` (PR-AUC) and `base_rate` for labels 0 or 1 [n] and one or two logits.

    The base rate, the share of positives, is the average precision of random scores.
    """
    library = _import_torchmetrics("classification")
    auroc = library.BinaryAUROC(validate_args=False)
    average_precision = library.BinaryAveragePrecision(validate_args=False)
    return _BinaryMetrics(_build_collection(auroc=auroc, average_precision=average_precision))


class NoMetrics:
    """Empty set of metrics, for runs that report only the loss and the metrics that `step` returns."""

    def update(self, output: Any, target: Any) -> None:
        """Do nothing."""

    def compute(self) -> Mapping[str, Any]:
        """Return an empty dictionary."""
        return {}

    def reset(self) -> None:
        """Do nothing."""

    def to(self, device: torch.device) -> Any:  # noqa: ARG002 part of the protocol
        """Return this object."""
        return self


class _NamedMetric:
    """A single torchmetrics metric, under the name of the metric that the objective optimizes."""

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
    """Check that `found` has the methods of `Metrics`; a single torchmetrics `Metric` gets the name `metric`."""
    missing = [name for name in ("update", "compute", "reset") if not callable(getattr(found, name, None))]
    if missing:
        kind = type(found).__name__
        raise ObjectiveError(f"metrics() must return an object with the methods update, compute and reset, not {kind}")
    is_single = hasattr(found, "full_state_update") and not isinstance(found, Mapping)
    return _NamedMetric(found, metric) if is_single else found


class _FlatMetrics:
    """Metrics of flattened outputs and targets, because [n, 1] minus [n] would broadcast to [n, n]."""

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


class _RegressionIfMatching(_FlatMetrics):
    """Regression metrics; empty if outputs and targets differ in size, for example for parameters of a density."""

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


class _BinaryMetrics(_FlatMetrics):
    def __init__(self, inner: Metrics) -> None:
        super().__init__(inner)
        sums = _import_torchmetrics("aggregation").SumMetric
        self._positives, self._count = sums(nan_strategy="disable"), sums(nan_strategy="disable")

    def update(self, output: Tensor, target: Tensor) -> None:
        if output.ndim == 2 and output.shape[1] == 2:
            output = output[:, 1] - output[:, 0]
        # torchmetrics applies a sigmoid only to batches with values outside [0, 1], so it gets probabilities; in
        # float64, so that confident scores stay distinct.
        super().update(output.double().sigmoid(), target.long())
        self._positives.update(target.sum())
        self._count.update(target.numel())

    def compute(self) -> Mapping[str, Any]:
        count = self._count.compute()
        rate = self._positives.compute() / count
        if not 0 < float(rate) < 1:  # torchmetrics would return 0.0
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


def can_sync_over_ranks(metrics: Any) -> bool:
    """Return whether metrics synchronize over ranks by themselves, as torchmetrics and the built-in metrics do."""
    if isinstance(metrics, (_NamedMetric, NoMetrics, _FlatMetrics)):
        return True
    held = metrics.values() if isinstance(metrics, nn.ModuleDict) and hasattr(metrics, "compute_groups") else [metrics]
    return all(hasattr(metric, "sync_on_compute") for metric in held)


def _import_torchmetrics(part: str) -> Any:
    import_matplotlib()  # torchmetrics imports it
    try:
        return importlib.import_module(f"torchmetrics.{part}")
    except ModuleNotFoundError as error:
        raise ObjectiveError("the built-in metrics need torchmetrics; run pip install torchmetrics") from error


def _build_collection(**metrics: Any) -> Metrics:
    from torchmetrics import MetricCollection

    return cast("Metrics", MetricCollection(metrics))


def compute_majority_share(data: Dataset) -> float | None:
    """Return the share of the most frequent class, a baseline accuracy; None if targets are not class labels."""
    if not isinstance(data.y, Tensor) or data.y.dtype.is_floating_point or data.y.ndim != 1 or int(data.y.min()) < 0:
        return None
    return float(torch.bincount(data.y).max()) / len(data)
