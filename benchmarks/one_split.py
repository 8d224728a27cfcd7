"""Objectives of bench_quality.py, whose data are divided in one way whatever the seed of a search.

hpsearch divides the data by the study's seed; validation data that differ from search to search are as hard as they
happen to be, which would say more of a search than how it searches.
"""

from __future__ import annotations

from benchmarks.search_quality.likelihood import BreastCancerLikelihood, DigitsLikelihood
from hpsearch import Splits
from hpsearch.objectives.builtin.denoise import Denoise


class OneDigits(DigitsLikelihood):
    """Digits, judged by its likelihood."""

    def data(self, seed: int) -> Splits:
        """The division of seed 0."""
        return super().data(0)


class OneBreastCancer(BreastCancerLikelihood):
    """Tumours, judged by its likelihood."""

    def data(self, seed: int) -> Splits:
        """The division of seed 0."""
        return super().data(0)


class OneDenoise(Denoise):
    """Images without their noise."""

    def data(self, seed: int) -> Splits:
        """The division of seed 0."""
        return super().data(0)
