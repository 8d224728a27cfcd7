"""The standard error of a metric, from random halves of the samples."""

import math

import numpy as np
import pytest
import torch

from hpsearch.objectives.training.evaluation.standard_error import estimate_error


def _estimate(value, draw, blocks=None):
    """Return the quadratic mean of the standard errors of some draws, as finalists have several runs."""
    drawn = [draw() for _ in range(12)]
    errors = [
        estimate_error(lambda rows, samples=samples: value(*(part[rows] for part in samples)), 200, blocks, number)
        for number, samples in enumerate(drawn)
    ]
    return np.sqrt(np.mean(np.square(errors)))


def test_the_standard_error_of_a_share_is_binomial():
    rng = np.random.default_rng(0)
    found = _estimate(lambda right: right.mean(), lambda: [rng.random(200) < 0.75])
    assert found == pytest.approx(math.sqrt(0.75 * 0.25 / 200), rel=0.25)


def test_the_standard_error_is_a_function_of_its_seed():
    first, again, other = (
        estimate_error(lambda rows: float(rows.double().mean()), 50, None, seed) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_samples_of_a_group_stay_together():
    """Twenty groups of ten equal results have the standard error of twenty samples."""
    rng = np.random.default_rng(0)
    found = _estimate(lambda right: right.mean(), lambda: [np.repeat(rng.random(20) < 0.5, 10)], np.arange(200) // 10)
    assert found == pytest.approx(math.sqrt(0.25 / 20), rel=0.25)


def test_the_standard_error_of_a_metric_of_a_set_is_not_too_small():
    """Copies of samples, as in a bootstrap, would be nearest neighbors of each other: half of the true error."""
    rng = torch.Generator().manual_seed(0)
    centers = 2 * torch.randn(10, 4, generator=rng)

    def draw():
        labels = torch.randint(10, (200,), generator=rng)
        return centers[labels] + torch.randn(200, 4, generator=rng), labels

    def compute_recall(points, labels):
        nearest = torch.cdist(points, points).fill_diagonal_(math.inf).argmin(1)
        return float((labels[nearest] == labels).double().mean())

    true = np.std([compute_recall(*draw()) for _ in range(300)])
    assert 0.9 < _estimate(compute_recall, draw) / true < 1.4


def test_few_groups_have_no_standard_error():
    assert estimate_error(lambda rows: float(rows[0]), 40, np.arange(40) // 20, 0) is None


def test_a_metric_that_fails_for_most_halves_has_no_standard_error():
    def refuses(_):
        raise ValueError("one class only")

    assert estimate_error(refuses, 40, None, 0) is None
