import numpy as np
import pytest
import scipy.sparse
import torch

from hpsearch import Dataset, ObjectiveError, Splits, Standardize, TrainConfig
from hpsearch.objectives.training.data.samplers import EpochOrder
from hpsearch.objectives.training.loop.prepare import prepare_splits
from tests.objectives.training.support import Wine

CPU = torch.device("cpu")


def _make(seed=0, n=100, **kwargs):
    rng = np.random.default_rng(1)
    return Splits.make(rng.normal(size=(n, 3)), np.arange(n) % 4, seed=seed, **kwargs)


def test_splits_keep_the_proportions_of_given_categories():
    hospitals = np.array(["a"] * 80 + ["b"] * 20)
    splits = Splits.make(torch.randn(100, 2), torch.randn(100), seed=0, stratify=hospitals)
    shares = [float(np.mean(hospitals[part.rows.numpy()] == "b")) for _, part in splits.parts()]
    assert shares == pytest.approx([0.2, 0.2, 0.2], abs=1e-6)
    with pytest.raises(
        ObjectiveError, match=r"stratify has the shape \[3\]; give one category for each of 100 samples"
    ):
        Splits.make(torch.randn(100, 2), torch.randn(100), seed=0, stratify=[1, 2, 3])
    with pytest.raises(ObjectiveError, match="groups and categories for stratify cannot be combined"):
        Splits.make(torch.randn(100, 2), torch.randn(100), seed=0, stratify=hospitals, groups=hospitals)
    with pytest.raises(ObjectiveError, match="least populated class"):
        Splits.make(torch.randn(100, 2), torch.randn(100), seed=0, stratify=["c", *hospitals[1:]])


@pytest.mark.parametrize("how", [{}, {"stratify": False}, {"groups": np.arange(100) // 5}])
def test_a_split_is_a_pure_function_of_data_and_seed(how):
    made = []
    with torch.random.fork_rng():
        for state in (1, 2):
            torch.manual_seed(state)
            np.random.seed(state)
            made.append(_make(seed=3, **how).hash())
    assert made[0] == made[1] != _make(seed=4, **how).hash()


def test_splits_divide_all_rows_and_keep_the_shares_of_classes():
    splits = _make()
    rows = torch.cat([part.rows for _, part in splits.parts()])
    assert sorted(rows.tolist()) == list(range(100))
    assert [len(part) for _, part in splits.parts()] == [60, 20, 20]
    for _, part in splits.parts():
        assert torch.bincount(part.y).tolist() == [len(part) // 4] * 4


def test_no_group_is_in_two_splits():
    groups = np.repeat(np.arange(20), 5)
    splits = _make(groups=groups)
    members = [set(groups[part.rows.numpy()]) for _, part in splits.parts()]
    assert set.union(*members) == set(range(20))
    assert sum(map(len, members)) == 20


def test_values_are_split_without_strata():
    splits = Splits.make(np.zeros((50, 2)), np.linspace(0, 1, 50), seed=0)
    assert splits.train.y.dtype == torch.float32
    assert len(splits.train) == 30
    assert splits.strata is None


def test_splits_contain_the_strata_of_the_validation_samples():
    hospitals = np.repeat(["a", "b"], [80, 20])
    splits = Splits.make(np.zeros((100, 2)), np.linspace(0, 1, 100), seed=0, stratify=hospitals)
    assert splits.strata.tolist() == (splits.val.y > 0.8).int().tolist()
    assert _make().strata.tolist() == _make().val.y.tolist()
    assert _make(stratify=False).strata is None
    assert _make(groups=np.arange(100) // 5).strata is None


def test_the_hash_covers_every_part():
    base = _make()
    for split in ("train", "val", "test"):
        for what in ("x", "y"):
            changed = _make()
            getattr(getattr(changed, split), what)[0] += 1
            assert changed.hash() != base.hash(), (split, what)


def _data(x, y=None, rows=None):
    x = torch.as_tensor(x, dtype=torch.float32)
    return Dataset(x, torch.zeros(len(x), dtype=torch.int64) if y is None else torch.as_tensor(y), rows)


GOOD = torch.zeros(4, 3)
NAN = torch.tensor([[0.0, float("nan"), float("inf")], [0, 0, 0]])


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ((_data(GOOD), _data(torch.zeros(0, 3)), _data(GOOD)), "the validation split is empty"),
        ((_data(GOOD), _data(GOOD, [0]), _data(GOOD)), "validation split has 4 inputs but 1 targets"),
        ((_data(GOOD), _data(GOOD), _data(NAN)), "test inputs contain NaN or infinity in 1 of 2 samples"),
        ((_data(GOOD, [1.0, float("nan"), 0, 0]),) * 3, "train targets contain NaN or infinity in 1 of 4"),
        (
            (_data(GOOD), _data(torch.zeros(4, 2)), _data(GOOD)),
            r"each sample of the validation inputs is \[2\] float32, but",
        ),
        ((_data(GOOD), _data(GOOD), _data(GOOD, [0.0] * 4)), r"each sample of the test targets is \[\] float32, but"),
        (
            (_data(GOOD, rows=torch.arange(4)), _data(GOOD, rows=torch.arange(3, 7)), _data(GOOD)),
            "the validation split shares 1 samples with another split",
        ),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(splits, message):
    with pytest.raises(ObjectiveError, match=message):
        Splits(*splits).check()


@pytest.mark.parametrize(
    ("train", "val", "message"),
    [
        ([0, 1, 2, 1], [0, 1, 2, 3], r"validation labels are in \[0, 3\], but must be in \[0, 2\]"),
        ([3, 3, 3, 3], [0, 1, 1, 1], r"all train labels are 3, so there is nothing to learn; check the labels"),
        ([0, 1, 0, 2_000_000_000], [0, 1, 1, 1], r"train labels go up to 2000000000, .*number the classes from 0"),
        (
            [0, 1, -1, 1],
            [0, 1, 1, 1],
            r"train labels are in \[-1, 1\]; number the classes from 0, for example with torch\.unique",
        ),
    ],
)
def test_labels_missing_in_the_train_split_are_rejected(train, val, message):
    with pytest.raises(ObjectiveError, match=message):
        Splits(_data(GOOD, train), _data(GOOD, val), _data(GOOD)).check_classes()
    Splits(_data(GOOD, [0, 1, -1, 1]), _data(GOOD), _data(GOOD)).check_classes(ignored=-1)


def test_integer_targets_are_split_at_random_if_strata_are_impossible():
    values = np.random.default_rng(0).integers(25, 346, 200)
    splits = Splits.make(np.zeros((200, 2)), values, seed=0)
    assert sorted(torch.cat([part.y for _, part in splits.parts()]).tolist()) == sorted(values.tolist())
    assert [len(part) for _, part in splits.parts()] == [120, 40, 40]
    assert splits.strata is None
    with pytest.raises(ObjectiveError, match=r"least populated class.*; use stratify=False to ignore"):
        Splits.make(np.zeros((20, 2)), [0] * 19 + [1], seed=0)


def test_bytes_stay_bytes():
    images = np.random.default_rng(0).integers(0, 256, (20, 3, 4, 4), dtype=np.uint8)
    splits = Splits.make(images, np.arange(20, dtype=np.uint8) % 2, seed=0)
    assert (splits.train.x.dtype, splits.train.y.dtype) == (torch.uint8, torch.int64)
    assert torch.equal(splits.val.x, torch.from_numpy(images)[splits.val.rows])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"val": 0.0}, "must be above 0"),
        ({"val": 0.6, "test": 0.5}, "must be above 0, with a sum below 1"),
        ({"n": 0}, "x has no samples; check the source of the data"),
        ({"n": 8}, "the data cannot be split: "),  # fewer validation samples than classes
    ],
)
def test_a_split_that_cannot_be_made_is_refused(kwargs, message):
    with pytest.raises(ObjectiveError, match=message):
        _make(**kwargs)


def test_data_have_values_and_no_gradient_graph():
    whole = Dataset(torch.ones(4, 3), torch.ones(4))
    graph, meta = torch.ones(4, 3, requires_grad=True), torch.ones(4, device="meta")
    for part, message in (
        (Dataset(graph * 2, whole.y), "the validation inputs have a gradient graph"),
        (Dataset(whole.x, meta), "the validation targets are on the device 'meta', so they have no values"),
    ):
        with pytest.raises(ObjectiveError, match=message):
            Splits(whole, part, whole).check()


def test_inputs_without_features_are_refused():
    splits = Splits.make(np.zeros((20, 0)), np.arange(20) % 2, seed=0)
    with pytest.raises(ObjectiveError, match="the train inputs have no features; check the columns in data"):
        splits.check()


def test_inputs_and_targets_must_have_the_same_length():
    with pytest.raises(ObjectiveError, match="x has 3 samples, but y has 2"):
        Splits.make(np.zeros((3, 1)), np.zeros(2), seed=0)


@pytest.mark.parametrize("samples", [1, 7, 8, 9, 30, 32])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("drop_last", [True, False])
def test_windows_contain_each_sample_once(samples, accumulation, drop_last):
    settings = {"batch_size": 8, "gradient_accumulation_steps": accumulation, "drop_last": drop_last}
    order = EpochOrder(samples, TrainConfig(**settings), 5)
    found = list(order.iterate_steps(0, CPU))
    rows = torch.cat([batch for window in found for batch in window]).tolist()
    dropped = samples % 8 if drop_last and samples > 8 else 0
    assert len(rows) == len(set(rows)) == samples - dropped
    assert len(found) == order.steps
    assert all(len(window) <= accumulation for window in found)


def test_the_order_depends_only_on_the_seed():
    def order(seed):
        return torch.cat([b for w in EpochOrder(20, TrainConfig(batch_size=4), seed).iterate_steps(0, CPU) for b in w])

    first = order(1)
    torch.manual_seed(7)
    assert torch.equal(order(1), first)
    assert not torch.equal(order(2), first)


def test_standardize_is_fitted_once_and_stored_in_the_state():
    x = torch.randn(50, 3) * torch.tensor([1.0, 10.0, 0.0]) + 5
    layer = Standardize.fit(x)
    scaled = layer(x)
    torch.testing.assert_close(scaled.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(scaled.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0]), atol=1e-5, rtol=0)
    assert set(layer.state_dict()) == {"mean", "std"}
    assert not list(layer.parameters())
    other = Standardize.fit(torch.randn(50, 3))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), scaled)


def test_standardize_images_by_channel():
    x = torch.randn(20, 2, 4, 4) * torch.tensor([3.0, 0.5])[:, None, None]
    scaled = Standardize.fit(x, dim=(0, 2, 3))(x)
    torch.testing.assert_close(scaled.std(dim=(0, 2, 3), correction=0), torch.ones(2))


def _timed(times, **kwargs):
    return Splits.make(np.arange(len(times))[:, None], np.zeros(len(times)), seed=0, times=times, **kwargs)


@pytest.mark.parametrize("kind", ["float", "datetime64[s]"])
def test_a_split_by_time_trains_on_the_past(kind):
    times = np.random.default_rng(0).permutation(50).astype("int64").astype(kind)
    splits = _timed(times, val=0.2, test=0.1)
    train, val, test = (times[part.rows.numpy()] for _, part in splits.parts())
    assert (len(train), len(val), len(test)) == (35, 10, 5)
    assert train.max() < val.min() <= val.max() < test.min()
    assert splits.hash() == _timed(times, val=0.2, test=0.1).hash()


def test_no_time_is_in_two_splits():
    times = np.repeat([3, 1, 2, 0, 4], 7)
    moments = [set(times[part.rows.numpy()]) for _, part in _timed(times, val=0.3, test=0.15).parts()]
    assert sum(map(len, moments)) == 5
    assert max(moments[0]) < min(moments[1]) <= max(moments[1]) < min(moments[2])


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([1.0] * 10, "cannot be split by time: 1 distinct times"),
        ([1.0, float("nan")] * 5, "without missing values"),
        (["a"] * 10, "must be numbers or datetimes"),
        (np.zeros((10, 2)), "one value per sample"),
        (np.array(["2020-01-01", "NaT"] * 5, dtype="datetime64[D]"), "without missing values"),
    ],
)
def test_unusable_times_are_rejected(times, message):
    with pytest.raises(ObjectiveError, match=message):
        _timed(times) if len(times) == 10 else None


def test_groups_and_times_are_mutually_exclusive():
    with pytest.raises(ObjectiveError, match="groups and times"):
        _timed(np.arange(20), groups=np.arange(20))


@pytest.mark.parametrize(
    ("x", "fault"),
    [
        (torch.ones(3, 2, dtype=torch.complex64), "the data have complex numbers"),
        (np.ma.masked_greater(np.arange(6.0).reshape(3, 2), 4.0), "the data have masked values"),
        (scipy.sparse.eye(3, format="csr"), "the data have a sparse csr_matrix"),
    ],
)
def test_arrays_that_lose_content_as_tensors_are_rejected(x, fault):
    with pytest.raises(ObjectiveError, match=fault):
        Splits.make(x, np.arange(3), seed=0)


@pytest.mark.filterwarnings("error")
def test_flipped_big_endian_and_read_only_arrays_are_data():
    plain = Splits.make(np.arange(200, dtype="f4").reshape(100, 2), np.arange(100) % 4, seed=0)
    x = np.arange(200, dtype=">f4").reshape(100, 2)[::-1].copy()[::-1]
    y = (np.arange(100, dtype=">i4") % 4)[::-1].copy()[::-1]
    x.flags.writeable = y.flags.writeable = False
    assert Splits.make(x, y, seed=0).hash() == plain.hash()


def test_masks_in_structures_stay_boolean():
    mask = np.arange(20) % 2 == 0
    splits = Splits.make({"x": np.ones(20), "mask": mask}, {"y": np.arange(20) / 2, "known": mask}, seed=0)
    assert splits.train.x["mask"].dtype == splits.train.y["known"].dtype == torch.bool
    assert splits.train.y["y"].dtype == torch.float32


def test_data_is_computed_with_one_thread(objective_with):
    """The last digits depend on the number of threads, which differs between commands and workers."""
    threads = []

    def data(self, seed):
        threads.append(torch.get_num_threads())
        return Wine.data(self, seed)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        prepare_splits(objective_with(data=data), 0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert threads == [1]
