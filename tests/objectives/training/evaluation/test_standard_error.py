"""The standard error of a metric, from random halves of the samples."""

import math

import numpy as np
import pytest
import torch

from hpsearch import Splits, TrainConfig
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.evaluation.standard_error import estimate_error
from hpsearch.objectives.training.loop.build import build_run
from tests.objectives.training.support import Wine


def _estimate(value, draw, blocks=None, find_strata=None):
    """Return the quadratic mean of the standard errors of some draws, as finalists have several runs."""
    errors = []
    for number in range(24):
        samples = draw()
        strata = None if find_strata is None else find_strata(*samples)
        errors.append(
            estimate_error(
                lambda rows, samples=samples: value(*(part[rows] for part in samples)), 200, blocks, number, strata
            )
        )
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


@pytest.mark.parametrize("is_balanced", [False, True])
def test_the_standard_error_of_a_metric_of_a_set_is_its_true_error(is_balanced):
    """Copies of samples, as in a bootstrap, would give half of the true error; halves with common samples 1.2 of it."""
    rng = torch.Generator().manual_seed(0)
    centers = 2 * torch.randn(10, 4, generator=rng)

    def draw():
        labels = torch.arange(200) % 10 if is_balanced else torch.randint(10, (200,), generator=rng)
        return centers[labels] + torch.randn(200, 4, generator=rng), labels

    def compute_recall(points, labels):
        nearest = torch.cdist(points, points).fill_diagonal_(math.inf).argmin(1)
        return float((labels[nearest] == labels).double().mean())

    true = np.std([compute_recall(*draw()) for _ in range(600)])
    find_strata = (lambda _, labels: labels.numpy()) if is_balanced else None
    assert _estimate(compute_recall, draw, None, find_strata) == pytest.approx(true, rel=0.12)


def test_the_standard_error_of_a_distance_of_distributions_is_its_true_error():
    rng = np.random.default_rng(0)

    def compute_distance(made, points):
        return float(np.abs(np.sort(made) - np.sort(points)).mean())

    def draw():
        return rng.normal(size=200), rng.normal(size=200)

    true = np.std([compute_distance(*draw()) for _ in range(2000)])
    assert _estimate(compute_distance, draw) == pytest.approx(true, rel=0.15)


def test_strata_reduce_the_standard_error():
    """Shares of 1 and 0 in two categories: with constant proportions of the categories, the mean has no error."""
    labels = np.arange(200) % 2
    assert estimate_error(lambda rows: float(labels[rows].mean()), 200, None, 0, labels) == 0
    assert estimate_error(lambda rows: float(labels[rows].mean()), 200, None, 0) > 0.02


def test_a_rare_category_is_in_both_halves():
    labels = (np.arange(101) < 5).astype(int)
    counts = []

    def count(rows):
        counts.append((len(rows), int(labels[rows].sum())))
        return 0.0

    assert estimate_error(count, 101, None, 0, labels) == 0
    assert {size for size, _ in counts} == {50, 51}
    assert {rare for _, rare in counts} == {2, 3}


@pytest.mark.parametrize("stratify", [True, False])
def test_the_halves_of_a_run_keep_the_proportions_of_its_split(stratify):
    class Split(Wine):
        def data(self, seed):
            splits = super().data(seed)
            x, y = (torch.cat([getattr(part, name) for _, part in splits.parts()]) for name in ("x", "y"))
            return Splits.make(x, y, seed=seed, stratify=stratify)

    run, _ = build_run(Split(), TrainConfig(), RunPlan(3, 0, 0, resplit_seed=1), device=torch.device("cpu"))
    counts = []

    def count(rows):
        counts.append(torch.bincount(run.val.y[rows], minlength=3))
        return 0.0

    run.resplit_evaluation.estimate_error(count)
    largest = max(int((first - second).abs().max()) for first, second in zip(counts[::2], counts[1::2], strict=True))
    assert (largest <= 1) == stratify


def test_random_numbers_of_the_model_do_not_increase_the_standard_error():
    """An evaluation has the same random numbers each time, but a sample has others in another set."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=200)

    def draw():
        return (rng.normal(size=200),)

    found = _estimate(lambda values: float((values * noise[: len(values)]).mean()), draw)
    assert found == pytest.approx(1 / math.sqrt(200), rel=0.12)


def test_few_groups_have_no_standard_error():
    assert estimate_error(lambda rows: float(rows[0]), 40, np.arange(40) // 20, 0) is None


def test_a_metric_that_fails_for_most_halves_has_no_standard_error():
    def refuses(_):
        raise ValueError("one class only")

    assert estimate_error(refuses, 40, None, 0) is None
