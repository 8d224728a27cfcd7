"""Objectives of bench_quality.py whose data split does not depend on the seed of the search.

hpsearch splits the data by the seed of the study. Validation data that differ between searches differ in difficulty,
and this would have a larger effect on the results than the search methods.
"""

from __future__ import annotations

from benchmarks.search_quality.likelihood import BreastCancerLikelihood, DigitsLikelihood
from hpsearch import Splits
from hpsearch.objectives.builtin.denoise import Denoise
from hpsearch.objectives.builtin.gan import Gan
from hpsearch.objectives.builtin.series import Series


class OneDigits(DigitsLikelihood):
    """The digits objective with the negative log-likelihood as its metric."""

    def data(self, seed: int) -> Splits:
        """Return the split of seed 0."""
        return super().data(0)


class OneBreastCancer(BreastCancerLikelihood):
    """The breast cancer objective with the negative log-likelihood as its metric."""

    def data(self, seed: int) -> Splits:
        """Return the split of seed 0."""
        return super().data(0)


class OneDenoise(Denoise):
    """The denoise objective."""

    def data(self, seed: int) -> Splits:
        """Return the split of seed 0."""
        return super().data(0)


class OneGan(Gan):
    """The gan objective."""

    def data(self, seed: int) -> Splits:
        """Return the split of seed 0."""
        return super().data(0)


class OneSeries(Series):
    """The series objective."""

    def data(self, seed: int) -> Splits:
        """Return the split of seed 0."""
        return super().data(0)
