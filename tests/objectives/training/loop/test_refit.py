"""A refit: trained on all data except the test split for a fixed number of epochs, with the last epoch's weights."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_wine

from hpsearch import Dataset, LocalSession, LoopObjective, ObjectiveError, Splits, TrainConfig
from hpsearch.objectives.fit import fit as fit_any
from hpsearch.objectives.training.checks.restore_best import restore_best
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.loop.prepare import prepare_splits
from hpsearch.objectives.training.reproducibility import checkpoint
from tests.objectives.training.support import Stopped, exact, fit, same_result

CONFIG = TrainConfig(lr=0.05, batch_size=16, patience=1, schedule="cosine")


def _rows(part):
    return set(part.rows.tolist())


def _by_hand(sizes=(30, 60, 90), rows=True, **how):
    """Return fixed splits of 90 samples."""

    def data(self, seed):
        x = torch.randn(90, 13, generator=torch.Generator().manual_seed(0))
        parts = torch.tensor_split(torch.arange(90), sizes[:2])
        return Splits(*(Dataset(x[part], part % 3, part if rows else None, **how) for part in parts))

    return data


@pytest.mark.parametrize("how", [{}, {"groups": np.arange(178) // 2}, {"times": np.arange(178)[::-1]}])
def test_a_refit_trains_on_all_data_except_the_test_split(objective_with, how):
    def data(self, seed):
        return Splits.make(*load_wine(return_X_y=True), seed=seed, **how)

    objective = objective_with(data=data)
    own, _ = prepare_splits(objective, 3)
    splits, _ = prepare_splits(objective, 3, "all")
    assert _rows(splits.train) == _rows(own.train) | _rows(own.val)
    assert len(splits.train) == len(own.train) + len(own.val)
    assert splits.hash_of("validation") == own.hash_of("validation")
    assert splits.hash_of("test") == own.hash_of("test")


def test_a_refit_applies_the_scaling_and_filters_of_data_to_all_samples(objective_with):
    def data(self, seed):
        splits = type(self).__mro__[1].data(self, seed)
        train = splits.train.take(splits.train.y != 2)
        mean = train.x.mean(0)
        return Splits(*(Dataset(part.x - mean, part.y, part.rows) for part in (train, splits.val, splits.test)))

    splits, _ = prepare_splits(objective_with(data=data), 3, "all")
    assert splits.train.x.mean(0).abs().max() < 1e-3
    assert 2 not in splits.train.y, "what data() leaves out is not put back"


@pytest.mark.parametrize("rows", [True, False])
def test_custom_splits_in_tensors_are_joined(objective_with, rows):
    objective = objective_with(data=_by_hand(rows=rows))
    own, _ = prepare_splits(objective, 3)
    splits, _ = prepare_splits(objective, 3, "all")
    assert torch.equal(splits.train.x, torch.cat([own.train.x, own.val.x]))
    assert torch.equal(splits.train.y, torch.cat([own.train.y, own.val.y]))
    assert torch.equal(splits.val.x, own.val.x)


def test_a_custom_split_after_make_is_joined(objective_with):
    def data(self, seed):
        splits = type(self).__mro__[1].data(self, seed)
        rest = torch.arange(len(splits.train))
        return Splits(splits.train.take(rest[:-20]), splits.train.take(rest[-20:]), splits.test)

    splits, _ = prepare_splits(objective_with(data=data), 3, "all")
    assert _rows(splits.val) <= _rows(splits.train)
    assert len(_rows(splits.train)) == len(splits.train)


def test_splits_that_cannot_be_joined_are_an_error(objective_with):
    objective = objective_with(data=_by_hand(load=lambda entry: entry))
    with pytest.raises(ObjectiveError, match=r"data: a refit .* not in-memory tensors; split the data with Splits"):
        fit(objective, refit=2)


def test_a_custom_loop_cannot_be_refit():
    class Own(LoopObjective):
        def suggest(self, trial):
            return None

        def run(self, context):
            raise AssertionError

    with pytest.raises(ObjectiveError, match="custom loop, but a refit needs"):
        fit_any(Own(), None, RunPlan(2, 0, 0, refit=1))


@pytest.mark.parametrize(("refit", "said"), [(0, r"in \[1, epochs=5\], not 0"), (6, "not 6")])
def test_a_refit_with_an_invalid_number_of_epochs_is_rejected(wine, refit, said):
    with pytest.raises(ObjectiveError, match=said):
        fit(wine, refit=refit)


def test_a_refit_keeps_the_last_epoch_and_ignores_patience(wine, tmp_path):
    result = fit(wine, CONFIG, epochs=9, refit=6, run_dir=tmp_path)
    values = [record.metrics["val_accuracy"] for record in result.history]
    assert values.index(max(values)) < 4, "its patience would have ended it"
    assert (result.status, len(result.history), result.best_epoch) == ("completed", 6, 5)
    assert result.best_value == values[-1]
    whole = fit(wine, CONFIG, epochs=9, refit=9)
    assert exact(whole.history)[:6] == exact(result.history), "its schedule is that of all epochs"
    best = checkpoint.read(tmp_path / "best.pt")
    assert (best["refit"], best["epoch"]) == (6, 5)


def test_a_stopped_refit_resumes_bit_identically(wine, tmp_path):
    fit(wine, CONFIG, epochs=6, refit=4, session=Stopped(tmp_path, 1))
    again = fit(wine, CONFIG, epochs=6, refit=4, session=LocalSession(tmp_path))
    same_result(again, fit(wine, CONFIG, epochs=6, refit=4))


def test_a_checkpoint_of_another_run_is_rejected(wine, tmp_path):
    fit(wine, CONFIG, epochs=6, refit=4, session=Stopped(tmp_path, 1))
    with pytest.raises(ObjectiveError, match="its refit is 4, not 5"):
        fit(wine, CONFIG, epochs=6, refit=5, session=LocalSession(tmp_path))


def test_the_model_of_a_refit_is_restored_from_its_checkpoint(wine, tmp_path):
    result = fit(wine, CONFIG, epochs=6, refit=4, run_dir=tmp_path)
    restored = restore_best(wine, checkpoint.read(tmp_path / "best.pt"))
    weights = result.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in restored.model.state_dict().items())
    assert restored.validate()["accuracy"] == result.best_value
    assert len(restored.splits.train) == 178 - len(restored.splits.test)
