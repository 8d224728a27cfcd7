"""The optimism of a run's best epoch, from the halves of the validation samples."""

import math

import pytest
import torch
from torch import nn

from hpsearch import Dataset, Step
from hpsearch.objectives.training.evaluation.evaluate import evaluate
from hpsearch.objectives.training.evaluation.metrics import binary, classification
from hpsearch.objectives.training.loop.cross_fit import CrossFit
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


def test_a_run_on_a_new_split_has_a_score_on_it():
    assert fit(Wine(), epochs=3, split_seed=5).resplit_score is None
    runs = [fit(Wine(), epochs=3, split_seed=5, resplit_seed=seed) for seed in (1, 1, 2)]
    first, again, other = (run.resplit_score for run in runs)
    assert first == again != other
    assert (first.has_new_split, first.sizes, len(first.epochs)) == (True, (106, 36, 36), 2)
    assert first.error > 0
    assert runs[0].split_hash == runs[1].split_hash != runs[2].split_hash
