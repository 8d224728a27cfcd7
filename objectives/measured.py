"""What the training loop can measure of a model beside its metrics, by name: how fast it is, and how large."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Measured:
    """A number that is measured of any model.

    Attributes:
        unit: of the number; empty of a count.
        description: what it is, in a line.
        direction: how it is better.
        settled: whether an epoch tells it for good, however long the training goes on.
    """

    unit: str
    description: str
    direction: Literal["maximize", "minimize"] = "minimize"
    settled: bool = True


MEASURED: dict[str, Measured] = {
    "latency_ms": Measured(
        "ms", "median time of a forward pass in evaluation mode, of one sample unless the objective says otherwise"
    ),
    "model_mb": Measured("MB", "size of the weights and buffers that are served, in 10^6 bytes"),
    "parameters": Measured("", "number of the model's parameters, frozen ones among them"),
    "peak_memory_mb": Measured(
        "MB", "most memory of its accelerator that the trial held at once, in 10^6 bytes", settled=False
    ),
}


def value_of(metrics: Mapping[str, float], name: str) -> float:
    """Return a study's metric from the record of an epoch: the `val_NAME` of the validation, or the measured `NAME`.

    Raises:
        KeyError: the record has neither; its argument is the name.
    """
    validated = f"val_{name}"
    return metrics[validated if validated in metrics else name]
