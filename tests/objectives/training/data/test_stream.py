"""Streams of samples from a torch `IterableDataset`."""

import pytest
import torch
from torch.utils import data as torch_data

from hpsearch import (
    Dataset,
    LocalSession,
    ObjectiveError,
    Splits,
    TrainConfig,
    Trainer,
    Verdict,
)
from tests.objectives.training.support import Numbers, Sums, exact, fit, same_result


def test_a_stream_is_read_once_per_epoch_and_learned_from():
    objective = Sums()
    result = fit(objective, TrainConfig(lr=0.05, batch_size=16), epochs=3)
    assert result.best_value > 0.8
    assert objective.source.epochs == [0, 1, 2]
    assert objective.source.begun < 15, "a pass begins it once"


@pytest.mark.parametrize("workers", [None, pytest.param(2, marks=pytest.mark.soak)])
def test_a_resumed_run_is_bit_identical(workers, tmp_path):
    class Stopped(LocalSession):
        def report(self, record):
            return Verdict.STOP if record.epoch == 1 else Verdict.CONTINUE

    config = TrainConfig(lr=0.05, batch_size=16, num_workers=workers)
    whole = fit(Sums(), TrainConfig(lr=0.05, batch_size=16))
    assert Trainer(Sums(), config, epochs=5, seed=0, session=Stopped(tmp_path)).fit().status == "stopped"
    resumed = fit(Sums(), config, session=LocalSession(tmp_path))
    assert exact(resumed.history) == exact(whole.history), "in this process or in a loader process"
    same_result(resumed, whole)


def test_validation_sees_the_same_samples_each_time():
    data = Dataset.of(list(range(5)), length=5, fingerprint="five", collate=lambda rows: (torch.tensor(rows),) * 2)
    assert [data.batch(torch.arange(2, 4)).x.tolist() for _ in range(2)] == [[2, 3]] * 2
    assert data.batch(slice(0, 5)).x.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dataset.of(Numbers()), "Numbers needs length=, the number of samples per epoch"),
        (lambda: Dataset.of(Numbers(), length=9), "Numbers needs fingerprint="),
        (lambda: Dataset.of(Numbers(), length=0), "must be from 1 to 1,000,000,000, not 0"),
        (lambda: Dataset.of(Numbers(), length=10**12), "must be from 1 to 1,000,000,000, not 1000000000000"),
        (
            lambda: Dataset.of((n for n in range(9)), length=9, fingerprint="x"),
            "the generator does not start again at each epoch;",
        ),
        (
            lambda: Dataset.of(set(), length=9, fingerprint="x").batch(slice(0, 5)),
            "the stream has no samples; pass an iterable that starts again at each epoch, not an iterator",
        ),
        (
            lambda: Splits.make(Numbers(), seed=0),
            r"Numbers cannot be split; use Splits\(train, val, test\), each from Dataset.of\(stream, length=\)",
        ),
        (
            lambda: Dataset.of(Numbers(3), length=9, fingerprint="x").batch(slice(0, 5)),
            "the stream ended after 3 samples; set length=3 instead of 9",
        ),
    ],
)
def test_mistakes_are_errors_of_one_line(make, message):
    with pytest.raises(ObjectiveError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_a_stream_rejects_a_batch_sampler():
    objective = type("Chosen", (Sums,), {"sampler": lambda *_: torch_data.SequentialSampler(range(3))})()
    with pytest.raises(
        ObjectiveError, match=r"a stream has a fixed order and cannot use a sampler; remove the method sampler\(\)"
    ):
        fit(objective)
