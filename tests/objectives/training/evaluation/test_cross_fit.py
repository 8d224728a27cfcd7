"""The optimism of a run's best epoch, and the standard error of its value from half-samples."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from hpsearch import Dataset, Step
from hpsearch.objectives.training.evaluation.evaluate import evaluate
from hpsearch.objectives.training.evaluation.metrics import binary, classification
from hpsearch.objectives.training.evaluation.step import LossStep
from hpsearch.objectives.training.loop.cross_fit import MAX_OUTPUT_BYTES, CrossFit, bind_metric, estimate_error
from tests.objectives.training.support import Wine, fit

CPU = torch.device("cpu")


def _cross_fit(cut, samples, *, metric="accuracy", maximize=True):
    metrics = [classification(2), classification(2)]
    return CrossFit(cut, samples, metric=metric, maximize=maximize, metrics=metrics, device=CPU)


def _judge(found, epoch, right):
    """Return an epoch in which the samples with a set bit are classified correctly."""
    found.reset()
    right = torch.tensor(right)
    labels = torch.zeros(len(right), dtype=torch.int64)
    outputs = torch.stack([right.float(), 1 - right.float()], dim=1)
    for rows in (range(found.first_half_size), range(found.first_half_size, len(right))):
        part = slice(rows.start, rows.stop)
        found.add(Step(torch.tensor(0.0), outputs[part], labels[part]), rows)
    found.update_selection(epoch, float(right.double().mean()))


def test_the_optimism_is_the_difference_between_the_choosing_and_the_scoring_half():
    found = _cross_fit(2, 6)
    assert found.optimism is None
    _judge(found, 0, [1, 0, 1, 0, 0, 0])
    _judge(found, 1, [1, 1, 0, 0, 1, 0])  # the first half's best; the second scores 1/4
    _judge(found, 2, [0, 0, 1, 1, 1, 0])  # the second half's best; the first scores 0
    _judge(found, 3, [1, 1, 1, 1, 0, 1])  # equal to their best, but later
    assert found.epochs == [1, 2]
    assert [choice["value"] for choice in found.choices] == [1.0, 0.75]
    assert [choice["score"] for choice in found.choices] == [0.25, 0.0]
    assert found.optimism == pytest.approx((0.75 + 0.75) / 2 / math.sqrt(2))
    assert found.best["value"] == pytest.approx(5 / 6)
    assert found.best["outputs"]["outputs"][:, 0].tolist() == [1, 1, 1, 1, 0, 1]


def test_the_optimism_is_unknown_if_a_half_lacks_classes_that_the_metric_needs():
    """For example a class for AUROC: the run is scored by its best epoch."""
    found = CrossFit(2, 4, metric="auroc", maximize=True, metrics=[binary(), binary()], device=CPU)
    found.reset()
    for rows, labels in ((range(2), [0, 1]), (range(2, 4), [1, 1])):
        found.add(Step(torch.tensor(0.0), torch.randn(2, 1), torch.tensor(labels)), rows)
    found.update_selection(0, 0.5)
    assert found.optimism is None
    assert "needs both classes" in found.refused
    resumed = CrossFit(2, 4, metric="auroc", maximize=True, metrics=[binary(), binary()], device=CPU)
    resumed.load_state_dict(found.state_dict())
    assert resumed.refused == found.refused, "a run that was killed later has no score of halves either"


def test_lower_is_better_where_the_metric_is_minimized():
    found = _cross_fit(1, 2, metric="loss", maximize=False)
    for epoch, (first, second) in enumerate([(0.5, 0.5), (0.25, 1.0), (1.0, 0.125)]):
        found.reset()
        outputs, labels = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)
        found.add(Step(torch.tensor(first), outputs, labels), range(1))
        found.add(Step(torch.tensor(second), outputs, labels), range(1, 2))
        found.update_selection(epoch, (first + second) / 2)
    assert found.epochs == [1, 2]
    assert found.optimism == pytest.approx((0.25 - 1.0 + 0.125 - 1.0) / 2 / math.sqrt(2))
    assert found.best["value"] == 0.5


def test_outputs_are_kept_if_they_are_few_and_tensors():
    found = _cross_fit(1, 2)
    labels = torch.zeros(1, dtype=torch.int64)
    wide = Step(torch.tensor(0.0), torch.zeros(1, MAX_OUTPUT_BYTES // 4), labels)
    for step in (wide, Step(torch.tensor(0.0), None, None, {"accuracy": 1.0})):
        found.reset()
        for row in range(2):
            if step.outputs is None:
                found.add(step, range(row, row + 1))
            else:
                found._halves[row].metrics = _Nothing()
                found.add(step, range(row, row + 1))
        assert not any(half.outputs for half in found._halves)


class _Nothing:
    def update(self, output, target):
        pass


def test_an_evaluation_in_halves_has_the_scores_of_the_whole_and_the_halves():
    torch.manual_seed(0)
    data = Dataset(torch.randn(50, 4), torch.arange(50) % 2)
    model, loss = nn.Linear(4, 2), nn.CrossEntropyLoss()
    found = _cross_fit(23, 50)
    found.reset()
    how = {"batch_size": 10, "device": "cpu"}
    whole = evaluate(model, data, loss, classification(2), also=found, **how)
    found.update_selection(0, whole["accuracy"])
    plain = evaluate(model, data, loss, classification(2), **how)
    assert whole == pytest.approx(plain, rel=1e-6)
    parts = [data.take(torch.arange(23)), data.take(torch.arange(23, 50))]
    apart = [evaluate(model, part, loss, classification(2), **how)["accuracy"] for part in parts]
    assert [choice["value"] for choice in found.choices] == apart
    assert found.best["value"] == whole["accuracy"]
    assert torch.equal(found.best["outputs"]["rows"], torch.arange(50))
    assert torch.equal(found.best["outputs"]["targets"], data.y)


def _outputs(outputs):
    count = len(outputs)
    return {"rows": torch.arange(count), "outputs": outputs, "targets": torch.zeros(count).long()}


def test_the_standard_error_of_a_share_is_binomial():
    right = torch.arange(400) % 4 != 0
    outputs = _outputs(torch.stack([right.float(), 1 - right.float()], 1))
    judge = bind_metric("accuracy", classification(2), LossStep(nn.CrossEntropyLoss()))
    error = estimate_error(judge, outputs, None, 0)
    assert error == pytest.approx(math.sqrt(0.75 * 0.25 / 400), rel=0.25)
    assert error == estimate_error(judge, outputs, None, 0), "a function of its seed"


def test_samples_of_a_group_stay_together():
    """Ten groups of forty equal results have the standard error of ten samples."""
    right = torch.arange(400) // 40 % 2 == 0
    outputs = _outputs(torch.stack([right.float(), 1 - right.float()], 1))
    judge = bind_metric("accuracy", classification(2), LossStep(nn.CrossEntropyLoss()))
    error = estimate_error(judge, outputs, np.arange(400) // 40, 0)
    assert error == pytest.approx(math.sqrt(0.25 / 10), rel=0.25)


def test_the_standard_error_of_a_metric_of_a_set_is_not_too_small():
    """Copies of samples, as in a bootstrap, would be nearest neighbors of each other: half of the true error."""
    rng = torch.Generator().manual_seed(0)
    centers = 2 * torch.randn(10, 4, generator=rng)

    def draw():
        labels = torch.randint(10, (200,), generator=rng)
        return {**_outputs(centers[labels] + torch.randn(200, 4, generator=rng)), "targets": labels}

    def compute_recall(kept):
        nearest = torch.cdist(kept["outputs"], kept["outputs"]).fill_diagonal_(math.inf).argmin(1)
        return float((kept["targets"][nearest] == kept["targets"]).double().mean())

    true = np.std([compute_recall(draw()) for _ in range(300)])
    estimated = np.sqrt(np.mean([estimate_error(compute_recall, draw(), None, 0) ** 2 for _ in range(8)]))
    assert 0.9 < estimated / true < 1.4


def test_few_groups_have_no_standard_error():
    right = torch.arange(40) % 2 == 0
    outputs = _outputs(torch.stack([right.float(), 1 - right.float()], 1))
    judge = bind_metric("accuracy", classification(2), LossStep(nn.CrossEntropyLoss()))
    assert estimate_error(judge, outputs, np.arange(40) // 20, 0) is None


def test_the_loss_has_a_standard_error_but_step_metrics_do_not():
    outputs = _outputs(torch.randn(6, 2))
    judge = bind_metric("loss", classification(2), LossStep(nn.CrossEntropyLoss()))
    assert judge(outputs) == pytest.approx(float(nn.CrossEntropyLoss()(outputs["outputs"], outputs["targets"])))
    assert bind_metric("loss", classification(2), lambda *_: None) is None


def test_a_metric_that_fails_for_most_half_samples_has_no_standard_error():
    def refuses(_):
        raise ValueError("one class only")

    outputs = _outputs(torch.zeros(4, 2))
    assert estimate_error(refuses, outputs, None, 0) is None


def test_a_run_on_a_new_split_has_a_score_on_it():
    assert fit(Wine(), epochs=3, split_seed=5).resplit_score is None
    runs = [fit(Wine(), epochs=3, split_seed=5, resplit_seed=seed) for seed in (1, 1, 2)]
    first, again, other = (run.resplit_score for run in runs)
    assert first == again != other
    assert (first.has_new_split, first.sizes, len(first.epochs)) == (True, (106, 36, 36), 2)
    assert first.error > 0
    assert runs[0].split_hash == runs[1].split_hash != runs[2].split_hash
