"""Training with a DataLoader equals training from memory, for any number of loader processes."""

import multiprocessing
import re
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch.utils import data as torch_data

from hpsearch import Dataset, ObjectiveError, Splits, TrainConfig, Trainer
from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.data.loader import load_batches
from tests.objectives.training.support import exact, same_result, started

CPU = torch.device("cpu")


def _noise(x):
    """Draw from all three generators, as real augmentation does."""
    scale = float(np.random.uniform(0.9, 1.1))
    return x * scale + 0.1 * torch.randn_like(x)


def _augmented(objective_with):
    return objective_with(augment=lambda *_: _noise)


def _fit(objective, workers, **settings):
    settings = {"lr": 0.02, "batch_size": 16, "gradient_accumulation_steps": 2, **settings}
    return Trainer(objective, TrainConfig(num_workers=workers, **settings), epochs=3, seed=3).fit()


def test_the_number_of_loader_processes_changes_no_result(objective_with):
    objective = _augmented(objective_with)
    here, there = _fit(objective, 0), _fit(objective, 2)
    assert exact(here.history) == exact(there.history)
    weights = here.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in there.model.state_dict().items())


def test_a_loader_without_augmentation_equals_data_in_memory(wine):
    same_result(_fit(wine, 2), _fit(wine, None))


def test_augmentation_depends_on_epoch_and_seed_and_skips_validation(objective_with):
    seen = []

    def augment(x):
        seen.append(_noise(torch.zeros(2)))
        return x

    objective = objective_with(augment=lambda *_: augment)
    _fit(objective, 0)
    del seen[0]  # the check before training
    assert len(seen) == 18, "six batches of three epochs: training alone"
    assert len({tuple(draw.tolist()) for draw in seen}) == 18
    first = [draw.tolist() for draw in seen]
    seen.clear()
    torch.rand(5)
    _fit(objective, 0)
    assert [draw.tolist() for draw in seen[1:]] == first


def test_loading_draws_nothing_from_the_generators_of_training(objective_with):
    """Dropout must not depend on the loader's random numbers."""
    plain = started(_augmented(objective_with), TrainConfig(num_workers=0, batch_size=16))
    before = torch.get_rng_state()
    for window in plain.batch_source.iterate_steps(0):
        for batch in window:
            batch.load()
    assert torch.equal(torch.get_rng_state(), before)


def test_augmentation_in_memory_is_repeatable(objective_with):
    objective = _augmented(objective_with)
    assert exact(_fit(objective, None).history) == exact(_fit(objective, None).history)


def test_the_loader_is_seeded_and_its_processes_live_for_one_epoch(wine, monkeypatch):
    made = []

    class Spy(torch_data.DataLoader):
        def __init__(self, *args, **kwargs):
            made.append(kwargs)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(torch_data, "DataLoader", Spy)
    run = started(wine, TrainConfig(num_workers=1, batch_size=64))
    for epoch in (0, 1, 1):
        list(run.batch_source.iterate_steps(epoch))
    seeds = [kwargs["generator"].initial_seed() for kwargs in made]
    assert seeds[0] != seeds[1] == seeds[2]
    assert all(kwargs["worker_init_fn"] is not None for kwargs in made)
    assert {kwargs["persistent_workers"] for kwargs in made} == {False}
    assert {kwargs["pin_memory"] for kwargs in made} == {False}


def test_batches_are_pinned_for_a_gpu(monkeypatch):
    made = []
    monkeypatch.setattr(torch_data, "DataLoader", lambda *_, **kwargs: made.append(kwargs) or [])
    list(load_batches(Dataset(torch.zeros(3, 1), torch.zeros(3)), [torch.arange(3)], device=torch.device("cuda")))
    assert made[0]["pin_memory"]


def test_each_batch_is_loaded_with_its_own_seed():
    """`load` can be random, for example a crop. It is repeatable with any number of loader processes."""

    def drawn(seed, workers):
        data = Dataset(torch.arange(12), torch.zeros(12), load=lambda entry: entry + torch.rand(()))
        rows = list(torch.arange(12).split(3))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return torch.cat(
                [b.x for b in load_batches(data, rows, device=CPU, num_workers=workers, seed=seed)]
            ).tolist()

    assert drawn(1, 0) == drawn(1, 0) == drawn(1, 2) != drawn(2, 0)
    assert len({round(value % 1, 6) for value in drawn(1, 0)}) == 12


@pytest.fixture
def filed(objective_with, tmp_path):
    """Wine with each sample in a separate file, which is read on demand."""

    def make():
        class Filed(type(objective_with())):
            def data(self, seed):
                from sklearn.datasets import load_wine

                x, y = load_wine(return_X_y=True)
                for number, row in enumerate(x.astype(np.float32)):
                    np.save(tmp_path / f"{number}.npy", row)

                def load(entry):
                    return torch.from_numpy(np.load(tmp_path / f"{int(entry)}.npy"))

                return Splits.make(np.arange(len(y)), y, seed=seed, load=load)

            def model(self, config, train):
                return super().model(config, Dataset(train.inputs(slice(None)), train.y))

        return Filed()

    return make()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [None, pytest.param(2, marks=pytest.mark.soak)])
def test_data_may_be_loaded_sample_by_sample(filed, wine, workers):
    config = {"batch_size": 16, "lr": 0.02}
    result = _fit(filed, workers, **config)
    expected = _fit(wine, None, **config)
    assert exact(result.history) == exact(expected.history)
    assert torch.equal(result.example.x, expected.example.x)


@pytest.mark.parametrize("workers", [None, 0, 2])
def test_an_error_of_augmentation_is_one_line_with_its_location(objective_with, workers):
    def augment(x):
        return x @ torch.zeros(2, 2)

    with pytest.raises(ObjectiveError, match=r"test_batches.py:\d+: RuntimeError: mat1 and mat2") as caught:
        _fit(objective_with(augment=lambda *_: augment), workers)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        ("unable to allocate shared memory(shm): No space left on device (28)", "enlarge /dev/shm, such as"),
        ("unable to open shared memory object: Too many open files (24)", "raise the limit of open files"),
    ],
)
def test_a_batch_that_cannot_be_sent_ends_the_training(wine, monkeypatch, fault, remedy):
    """Docker's default for /dev/shm has 64 MB. Without the error, the training would wait forever."""

    def fail(_tensor):
        raise RuntimeError(fault)

    monkeypatch.setitem(ForkingPickler._extra_reducers, torch.Tensor, fail)
    with pytest.raises(ObjectiveError, match=rf"^a batch cannot be sent .*{re.escape(fault)}; {remedy}"):
        _fit(wine, 2)


def test_a_queue_of_the_user_is_not_changed(objective_with, capfd):
    """A loader process may have queues besides that of the batches."""
    events = multiprocessing.get_context("fork").Queue()

    def augment(x):
        events.put(lambda: None)  # cannot be pickled
        events.put("event")
        return x

    _fit(objective_with(augment=lambda *_: augment), 1)
    assert events.get(timeout=60) == "event"
    assert "<lambda>" in capfd.readouterr().err


def test_an_error_while_augment_is_created_is_reported(objective_with):
    with pytest.raises(ObjectiveError, match=r"Changed.augment: .*ZeroDivisionError"):
        _fit(objective_with(augment=lambda *_: 1 / 0), None)


def test_data_in_memory_need_no_loader(wine, monkeypatch):
    monkeypatch.setattr(torch_data, "DataLoader", None)
    run = started(wine, TrainConfig(batch_size=16))
    batch = next(run.batch_source.iterate_steps(0))[0].load()
    assert (len(batch.x), len(batch.y), batch.size) == (16, 16, 16)


@pytest.mark.parametrize("workers", [None, 0])
def test_each_epoch_has_another_order(wine, workers):
    run = started(wine, TrainConfig(batch_size=16, num_workers=workers))

    def order(epoch):
        return torch.cat([batch.load()[0] for window in run.batch_source.iterate_steps(epoch) for batch in window])

    assert torch.equal(order(0), order(0))
    assert not torch.equal(order(0), order(1))


def test_batches_are_copied_to_the_device_asynchronously():
    """Pinned memory only helps non-blocking copies."""

    asked = []

    class Pinned(torch.Tensor):
        def to(self, device, *, non_blocking=False):
            asked.append((device, non_blocking))
            return self

    pinned = torch.zeros(2).as_subclass(Pinned)
    Batch({"ids": pinned}, pinned, 2).to(CPU)
    assert asked == [(CPU, True)] * 2


def test_the_short_last_training_batch_is_dropped_by_default(wine):
    sizes = [
        [batch.size for window in started(wine, config).batch_source.iterate_steps(0) for batch in window]
        for config in (TrainConfig(batch_size=16), TrainConfig(batch_size=16, drop_last=False))
    ]
    assert sizes == [[16] * 6, [16] * 6 + [10]]
