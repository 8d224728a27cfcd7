"""The optimism of a run's best epoch, and the standard error of its value from half-samples."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from hpsearch import Dataset, Step
from hpsearch.objectives.training.evaluation.evaluate import evaluate
from hpsearch.objectives.training.evaluation.metrics import binary, classification
from hpsearch.objectives.training.loop.cross_fit import CrossFit, estimate_error
from tests.objectives.training.support import Wine, fit

CPU = torch.device("cpu")


def _cross_fit(cut, *, metric="accuracy", maximize=True):
    metrics = [classification(2), classification(2)]
    return CrossFit(cut, metric=metric, maximize=maximize, metrics=metrics, device=CPU)


def _judge(found, epoch, right):
    """Return an epoch in which the samples with a set bit are classified correctly."""
    found.reset()
    right = torch.tensor(right)
    labels = torch.zeros(len(right), dtype=torch.int64)
    outputs = torch.stack([right.float(), 1 - right.float()], dim=1)
    for rows in (range(found.first_half_size), range(found.first_half_size, len(right))):
        part = slice(rows.start, rows.stop)
        found.add(Step(torch.tensor(0.0), outputs[part], labels[part]), rows)
    found.update_selection(epoch)


def test_the_optimism_is_the_difference_between_the_choosing_and_the_scoring_half():
    found = _cross_fit(2)
    assert found.optimism is None
    _judge(found, 0, [1, 0, 1, 0, 0, 0])
    _judge(found, 1, [1, 1, 0, 0, 1, 0])  # the first half's best; the second scores 1/4
    _judge(found, 2, [0, 0, 1, 1, 1, 0])  # the second half's best; the first scores 0
    _judge(found, 3, [1, 1, 1, 1, 0, 1])  # equal to their best, but later
    assert found.epochs == [1, 2]
    assert [choice["value"] for choice in found.choices] == [1.0, 0.75]
    assert [choice["score"] for choice in found.choices] == [0.25, 0.0]
    assert found.optimism == pytest.approx((0.75 + 0.75) / 2 / math.sqrt(2))


def test_the_optimism_is_unknown_if_a_half_lacks_classes_that_the_metric_needs():
    """For example a class for AUROC: the run is scored by its best epoch."""
    found = CrossFit(2, metric="auroc", maximize=True, metrics=[binary(), binary()], device=CPU)
    found.reset()
    for rows, labels in ((range(2), [0, 1]), (range(2, 4), [1, 1])):
        found.add(Step(torch.tensor(0.0), torch.randn(2, 1), torch.tensor(labels)), rows)
    found.update_selection(0)
    assert found.optimism is None
    assert "needs both classes" in found.undefined_reason
    resumed = CrossFit(2, metric="auroc", maximize=True, metrics=[binary(), binary()], device=CPU)
    resumed.load_state_dict(found.state_dict())
    assert resumed.undefined_reason == found.undefined_reason, (
        "a run that was killed later has no score of halves either"
    )


def test_lower_is_better_where_the_metric_is_minimized():
    found = _cross_fit(1, metric="loss", maximize=False)
    for epoch, (first, second) in enumerate([(0.5, 0.5), (0.25, 1.0), (1.0, 0.125)]):
        found.reset()
        outputs, labels = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)
        found.add(Step(torch.tensor(first), outputs, labels), range(1))
        found.add(Step(torch.tensor(second), outputs, labels), range(1, 2))
        found.update_selection(epoch)
    assert found.epochs == [1, 2]
    assert found.optimism == pytest.approx((0.25 - 1.0 + 0.125 - 1.0) / 2 / math.sqrt(2))


def test_an_evaluation_in_halves_has_the_scores_of_the_whole_and_the_halves():
    torch.manual_seed(0)
    data = Dataset(torch.randn(50, 4), torch.arange(50) % 2)
    model, loss = nn.Linear(4, 2), nn.CrossEntropyLoss()
    found = _cross_fit(23)
    found.reset()
    how = {"batch_size": 10, "device": "cpu"}
    whole = evaluate(model, data, loss, classification(2), halves=found, **how)
    found.update_selection(0)
    plain = evaluate(model, data, loss, classification(2), **how)
    assert whole == pytest.approx(plain, rel=1e-6)
    parts = [data.take(torch.arange(23)), data.take(torch.arange(23, 50))]
    apart = [evaluate(model, part, loss, classification(2), **how)["accuracy"] for part in parts]
    assert [choice["value"] for choice in found.choices] == apart


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


def test_a_run_on_a_new_split_has_a_score_on_it():
    assert fit(Wine(), epochs=3, split_seed=5).resplit_score is None
    runs = [fit(Wine(), epochs=3, split_seed=5, resplit_seed=seed) for seed in (1, 1, 2)]
    first, again, other = (run.resplit_score for run in runs)
    assert first == again != other
    assert (first.has_new_split, first.sizes, len(first.epochs)) == (True, (106, 36, 36), 2)
    assert first.error > 0
    assert runs[0].split_hash == runs[1].split_hash != runs[2].split_hash
