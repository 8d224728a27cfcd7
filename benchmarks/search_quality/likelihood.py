"""Two objectives of this repository with the negative log-likelihood of the validation labels as their metric.

By their own metrics, accuracy and AUROC, most configurations are almost perfect: each search method finds the best
value within the first trials, so methods cannot be compared. The negative log-likelihood still differs between these
configurations, and is comparable between trainings with different label smoothing and class weights.
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
    """The mean negative log-likelihood of labels [n], from logits [n, classes], or [n, 1] for two classes."""

    def update(self, output: Tensor, target: Tensor) -> None:  # type: ignore[override]
        """Add a batch."""
        if output.shape[1] > 1:
            found = functional.cross_entropy(output, target, reduction="none")
        else:
            found = functional.binary_cross_entropy_with_logits(output[:, 0], target.to(output.dtype), reduction="none")
        super().update(found)


def likelihood() -> Metrics:
    found: Any = MetricCollection({"nll": NegativeLogLikelihood()})  # torchmetrics is not typed
    return found  # type: ignore[no-any-return]


class DigitsLikelihood(Digits):
    """The digits objective with the negative log-likelihood as its metric."""

    name: ClassVar[str] = "digits_likelihood"
    metric = "nll"
    direction = "minimize"

    def metrics(self, train: Dataset) -> Metrics:
        """Return only the negative log-likelihood."""
        return likelihood()


class BreastCancerLikelihood(BreastCancer):
    """The breast cancer objective with the negative log-likelihood as its metric."""

    name: ClassVar[str] = "breast_cancer_likelihood"
    metric = "nll"
    direction = "minimize"

    def metrics(self, train: Dataset) -> Metrics:
        """Return only the negative log-likelihood."""
        return likelihood()
