"""Data that are loaded sample by sample: torch datasets, ragged lists, memory-mapped arrays."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils import data as torch_data

from hpsearch import Dataset, ObjectiveError, Splits, Standardize
from hpsearch.objectives.training.data.samples import MemmapRows, collate_rows, fingerprint_files, pad_collate

LENGTHS = np.random.default_rng(0).integers(2, 9, 40)
SEQUENCES = [np.arange(1, length + 1) for length in LENGTHS]


def _text(seed=0, **settings):
    return Splits.make(SEQUENCES, np.arange(40) % 2, seed=seed, collate=pad_collate, **settings)


def test_ragged_sequences_are_padded_batch_by_batch():
    splits = _text()
    batch = splits.val.batch(torch.tensor([0, 3, 5]))
    lengths = LENGTHS[splits.val.rows.numpy()][[0, 3, 5]]
    assert batch.x["lengths"].tolist() == lengths.tolist()
    assert batch.x["ids"].shape == (3, lengths.max())
    assert batch.size == len(batch.y) == 3
    assert (batch.x["ids"] > 0).sum(dim=1).tolist() == lengths.tolist()
    assert torch.bincount(splits.train.y).tolist() == [12, 12], "strata by the targets"


def test_the_hash_covers_the_content_of_samples():
    changed = [sequence.copy() for sequence in SEQUENCES]
    changed[7][0] += 1
    hashes = {
        _text().hash(), _text().hash(), _text(seed=1).hash(),
        Splits.make(changed, np.arange(40) % 2, seed=0, collate=pad_collate).hash(),
    }  # fmt: skip
    assert len(hashes) == 3


class _Folder(torch_data.Dataset):
    """Numbers in separate files; files whose number ends in 7 cannot be read."""

    def __init__(self, folder, broken=()):
        self.files = sorted(Path(folder).glob("*.npy"))
        self.broken = broken
        self.targets = [int(file.stem) % 2 for file in self.files]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, number):
        if number in self.broken:
            raise OSError("a torn file")
        return torch.from_numpy(np.load(self.files[number])), self.targets[number]


@pytest.fixture
def folder(tmp_path):
    for number in range(20):
        np.save(tmp_path / f"{number:03d}.npy", np.full((2, 3), number, dtype=np.float32))
    return tmp_path


def test_a_torch_dataset_is_split_by_its_own_targets(folder):
    splits = Splits.make(_Folder(folder), seed=0, fingerprint=fingerprint_files(folder))
    assert [len(part) for _, part in splits.parts()] == [12, 4, 4]
    assert torch.bincount(splits.val.y).tolist() == [2, 2]
    batch = splits.val.batch(slice(0, 2))
    assert batch.x[:, 0, 0].tolist() == splits.val.rows[:2].tolist()
    assert batch.y.tolist() == splits.val.y[:2].tolist()
    before = splits.hash()
    np.save(folder / "003.npy", np.zeros((2, 3), dtype=np.float32))
    assert Splits.make(_Folder(folder), seed=0, fingerprint=fingerprint_files(folder)).hash() != before


def test_a_dataset_for_each_split(folder):
    parts = [Dataset.of(torch_data.Subset(_Folder(folder), rows), fingerprint="f") for rows in ([0, 1], [2, 3], [4])]
    splits = Splits(*parts)
    splits.check()
    assert splits.test.batch(slice(None)).x[0, 0, 0] == 4
    assert splits.val.y.tolist() == [0, 1]


def test_targets_are_taken_from_a_sample_dictionary_by_name():
    rows = [{"ids": torch.tensor([k, k]), "labels": k % 3} for k in range(6)]
    batch = Dataset.of(rows).batch(slice(1, 3))
    assert batch.x["ids"].tolist() == [[1, 1], [2, 2]]
    assert batch.y.tolist() == [1, 2]


class _Endless(torch_data.IterableDataset):
    def __iter__(self):
        yield from range(9)


def _fails_beyond(count):
    def collate(samples):
        if len(samples) > count:
            raise ValueError("too many")
        return torch.zeros(len(samples)), torch.zeros(len(samples))

    return collate


def _fails_at(number):
    def collate(samples):
        if any(sample[1] == number for sample in samples):
            raise ValueError("a sample of the wrong kind")
        return torch.tensor([sample[1] for sample in samples]), torch.zeros(len(samples))

    return collate


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Splits.make(SEQUENCES, np.arange(40), seed=0), r"x is ragged: sample 0 has shape \[7\] and sample 1 .*"
         "pass collate=, a function that makes a batch from a list of samples, such as `pad_collate`"),
        (lambda: Splits.make(_Endless(), seed=0), "_Endless cannot be split; use Splits"),
        (lambda: Dataset.of(range(9)), "range needs fingerprint=, such as fingerprint_files"),
        (lambda: Dataset.of([object()] * 3), "sample 0 contains a object, which cannot be hashed; pass fingerprint="),
        (lambda: Dataset.of([1, 2], targets=[1]), "there are 2 samples, but 1 targets"),
        (lambda: Dataset.of([(torch.zeros(2), 1), (torch.zeros(3), 1)]).batch(slice(0, 2)),
         "samples 0 to 1 cannot be collated .*; pass a function as collate="),
        (lambda: Dataset.of([torch.zeros(2)] * 2).batch(slice(0, 2)), "a batch must be a pair of inputs and targets"),
        (lambda: Dataset.of([{"a": 1, "b": 2}]).batch(slice(0, 1)), "a batch has the keys 'a', 'b', but no targets"),
        (lambda: Dataset.of([(0, k) for k in range(9)], collate=_fails_at(5)).batch(slice(3, 8)),
         r"collate fails at sample 5: .*test_samples.py:\d+: ValueError: a sample of the wrong kind"),
        (lambda: Dataset.of([(0, k) for k in range(9)], collate=_fails_beyond(3)).batch(slice(2, 8)),
         r"collate fails at sample 5 \(position 4 in the batch\): .*test_samples.py:\d+: ValueError: too many"),
        (lambda: Splits.make({"a": np.zeros(3), "b": np.zeros(4)}, np.zeros(3), seed=0),
         "the parts of x have different lengths: 3, 4"),
        (lambda: Splits.make(np.zeros(3), seed=0), "y is missing"),
        (lambda: fingerprint_files("/nowhere"), "no files"),
    ],
)  # fmt: skip
def test_unusable_data_are_an_error_of_one_line(make, message):
    with pytest.raises(ObjectiveError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_an_unreadable_sample_is_named_by_its_index_in_the_source(folder):
    source = _Folder(folder, broken={13})
    splits = Splits.make(source, seed=0, fingerprint="f")
    part = next(part for _, part in splits.parts() if 13 in part.rows)
    with pytest.raises(ObjectiveError, match=r"sample 13 cannot be read: .*test_samples.py:\d+: OSError: a torn file"):
        part.batch(slice(None))


def test_too_little_shared_memory_is_named_with_its_remedy():
    def collate(_):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    with pytest.raises(ObjectiveError, match=r"^no shared memory is left for batches \(.*\); set num_workers=0, or"):
        collate_rows([(torch.zeros(1), 0)], [0], collate, [0])


def test_a_memory_mapped_array_is_read_lazily(tmp_path):
    values = np.random.default_rng(0).normal(5, 3, size=(60, 4)).astype(np.float64)
    np.save(tmp_path / "x.npy", values)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    splits, plain = (Splits.make(x, np.arange(60) % 2, seed=0) for x in (mapped, values))
    assert isinstance(splits.train.x, MemmapRows)
    assert not splits.train.in_memory
    batch = splits.val.batch(torch.tensor([1, 4]))
    assert torch.equal(batch.x, plain.val.x[[1, 4]])
    found, expected = Standardize.fit(splits.train.x), Standardize.fit(plain.train.x)
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.std, expected.std)
    splits.check()
    assert splits.hash() == plain.hash(), "the same data, wherever they lie"
    assert re.fullmatch("[0-9a-f]{64}", splits.hash())


@pytest.mark.parametrize("convert", [torch.Tensor.numpy, torch.Tensor.clone])
def test_a_batch_shares_no_memory_with_samples(convert):
    """A model may change its inputs in place."""
    samples = [(convert(torch.ones(size)), 0) for size in (2, 3)]
    data = Dataset.of(samples, collate=lambda rows: ([torch.as_tensor(x) for x, _ in rows], torch.zeros(len(rows))))
    for part in data.batch(slice(None)).x:
        part.zero_()
    assert [float(x.sum()) for x, _ in samples] == [2.0, 3.0]


def test_a_batch_may_be_sparse():
    samples = [(torch.eye(2).to_sparse(), 0), (torch.eye(2).to_sparse(), 1)]
    data = Dataset.of(samples, collate=lambda rows: (rows[0][0], torch.zeros(1)), fingerprint="two")
    assert data.batch(slice(None)).x.is_sparse
