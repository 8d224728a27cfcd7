"""Two objectives of this repository judged by how likely they find the labels of the validation data.

By their own metrics, an accuracy and an AUROC, most configurations are as good as solved: the best value is met within
the first trials, and no way of searching can be told from another. The negative log-likelihood goes on to tell them
apart, and it is one scale for all configurations, whatever label smoothing and weights their training has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.nn import functional
from torchmetrics import MeanMetric, MetricCollection

from hpsearch.objectives.builtin.breast_cancer import BreastCancer
from hpsearch.objectives.builtin.digits import Digits

if TYPE_CHECKING:
    from hpsearch import Dataset
    from hpsearch.objectives.training.evaluation.metrics import Metrics


class NegativeLogLikelihood(MeanMetric):
    """Its mean over labels [n], from logits [n, classes], or [n, 1] of one of two classes."""

    def update(self, output: Tensor, target: Tensor) -> None:  # type: ignore[override]
        """Adds a batch."""
        if output.shape[1] > 1:
            found = functional.cross_entropy(output, target, reduction="none")
        else:
            found = functional.binary_cross_entropy_with_logits(output[:, 0], target.to(output.dtype), reduction="none")
        super().update(found)


def likelihood() -> Metrics:
    found: Any = MetricCollection({"nll": NegativeLogLikelihood()})  # torchmetrics is not typed
    return found  # type: ignore[no-any-return]


class DigitsLikelihood(Digits):
    """Digits, judged by its likelihood."""

    name: ClassVar[str] = "digits_likelihood"
    metric = "nll"
    direction = "minimize"

    def metrics(self, train: Dataset) -> Metrics:
        """The likelihood alone."""
        return likelihood()


class BreastCancerLikelihood(BreastCancer):
    """Tumours, judged by its likelihood."""

    name: ClassVar[str] = "breast_cancer_likelihood"
    metric = "nll"
    direction = "minimize"

    def metrics(self, train: Dataset) -> Metrics:
        """The likelihood alone."""
        return likelihood()
