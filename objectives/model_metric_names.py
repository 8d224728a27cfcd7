"""Model metrics: latency, size and memory, which hpsearch measures in addition to the validation metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelMetric:
    """Metric that hpsearch can measure for every model.

    Attributes:
        unit: unit of the value; empty for a count.
        description: description in one line.
        direction: "maximize" or "minimize".
        is_constant: whether the value does not change with further training.
    """

    unit: str
    description: str
    direction: Literal["maximize", "minimize"] = "minimize"
    is_constant: bool = True


MODEL_METRICS: dict[str, ModelMetric] = {
    "latency_ms": ModelMetric("ms", "median forward time in evaluation mode with `latency_batch` samples (default: 1)"),
    "model_mb": ModelMetric("MB", "size of the weights and buffers that are served, in 10^6 bytes"),
    "parameters": ModelMetric("", "number of the model's parameters, including frozen ones"),
    "peak_memory_mb": ModelMetric(
        "MB", "peak memory of the accelerator that the trial allocated, in 10^6 bytes", is_constant=False
    ),
}


def get_metric_value(metrics: Mapping[str, float], name: str) -> float:
    """Return a metric from the record of an epoch: the validation metric `val_NAME`, or the model metric `NAME`.

    Raises:
        KeyError: the record contains neither of these two.
    """
    validation_name = f"val_{name}"
    return metrics[validation_name if validation_name in metrics else name]
