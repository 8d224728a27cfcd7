"""Objectives of bench_quality.py whose data split does not depend on the seed of the search.

hpsearch splits the data by the seed of the study. Validation data that differ between searches differ in difficulty,
and this would have a larger effect on the results than the search methods.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from benchmarks.search_quality.likelihood import BreastCancerLikelihood, DigitsLikelihood
from hpsearch import Dataset, Splits
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


class OneShiftedDigits(OneDigits):
    """The digits objective with twelve shifted copies of each training image. An epoch takes a second or more."""

    def data(self, seed: int) -> Splits:
        """Return the splits with the training images shifted by one or two pixels."""
        splits = super().data(seed)
        shifts = list(itertools.product((-1, 0, 1), (-2, -1, 0, 1)))
        images = torch.cat([splits.train.x.roll(shift, (2, 3)) for shift in shifts])
        labels = splits.train.y.repeat(len(shifts))
        return replace(splits, train=Dataset(images, labels))
