"""Sharded checkpoints: resume on any number of ranks, and rejection of incomplete ones."""

import dataclasses
import io
import logging
import pathlib
import pickle
import shutil

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from hpsearch import Trainer
from hpsearch.objectives.training.reproducibility import checkpoint
from hpsearch.objectives.training.session import LocalSession, MidEpochAction, Verdict
from hpsearch.objectives.training.strategies.shards import _MetadataUnpickler, read_shards
from tests.objectives.training.ranks.support import AVERAGED, WideSides, on_ranks, outcome

EPOCHS = 3
IN_PARTS = dataclasses.replace(AVERAGED, shard_checkpoint_above_gib=0.0)
REPLICATED = dataclasses.replace(IN_PARTS, shard_mesh_size=2)
LEFT = ("after", "within")


class Leaving(LocalSession):
    """Stops the run after its second epoch, or in the middle of it."""

    def __init__(self, run_dir, where=None):
        super().__init__(run_dir, synced=False)
        self.where, self.reported = where, 0

    def mid_epoch_action(self, left):
        return MidEpochAction.SAVE_AND_STOP if self.where == "within" and self.reported == 1 else MidEpochAction.NONE

    def report(self, record):
        self.reported = record.epoch + 1
        return Verdict.STOP if self.where == "after" and record.epoch == 1 else Verdict.CONTINUE


def fit(run_dir, where=None, config=IN_PARTS):
    result = Trainer(WideSides(), config, epochs=EPOCHS, seed=0, session=Leaving(run_dir, where)).fit()
    assert result.status == ("completed" if where is None else "stopped")
    whole = not any(parameter.is_meta for parameter in result.model.parameters())
    return outcome(result) if whole else None


def on_two(_ranks, folder):
    for where in LEFT:
        fit(folder / where, where)
        for copy in ("one", "two", "four", "torn"):
            if _ranks.is_rank_zero:
                shutil.copytree(folder / where, folder / copy / where)
    _ranks.all_gather_object(None)
    return {where: fit(folder / "two" / where) for where in LEFT}


def on_four_with_replicas(_ranks, folder):
    fit(folder, "within", REPLICATED)
    return fit(folder, config=REPLICATED)


def on_two_torn(_ranks, folder, where):
    return fit(folder / where)


def on_four(_ranks, folder):
    return {where: fit(folder / where) for where in LEFT}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    torch.set_num_threads(1)
    return fit(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def two(tmp_path_factory, undisturbed):
    folder = tmp_path_factory.mktemp("two")
    return folder, on_ranks(2, on_two, folder)


def assert_same(found, expected, where):
    """Compare each epoch's metrics and the best weights; skip training metrics of an epoch that was resumed within."""
    assert len(found[0]) == EPOCHS
    for epoch, (one, other) in enumerate(zip(found[0], expected[0], strict=True)):
        partly = where == "within" and epoch == 1
        for key in (key for key in other if not (partly and key.startswith("train_") and key != "train_loss")):
            assert one[key] == pytest.approx(other[key], abs=1e-6), (epoch, key)
    assert max(abs(found[1][key] - weight).max() for key, weight in expected[1].items()) < 1e-5


@pytest.mark.parametrize("where", LEFT)
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_sharded_checkpoint_resumes_on_any_number_of_ranks(world, where, two, undisturbed):
    folder, found = two
    if world == 1:
        result = fit(folder / "one" / where)
        last, previous = (checkpoint.read(folder / "one" / where / f"{name}.pt") for name in ("last", "previous"))
        assert "shards" not in last, "one process has nothing to share"
        left = folder / "one" / where / "shards"
        assert ([p.name for p in left.iterdir()] if left.exists() else []) == (
            [previous["shards"]["folder"]] if "shards" in previous else []
        )
    else:
        result = (found if world == 2 else on_ranks(4, on_four, folder / "four"))[0][where]
    assert_same(result, undisturbed, where)


@pytest.mark.soak
def test_a_sharded_checkpoint_of_replicas_resumes(undisturbed, tmp_path):
    result, *_ = on_ranks(4, on_four_with_replicas, tmp_path)
    assert_same(result, undisturbed, "within")


def test_a_sharded_checkpoint_names_the_shard_of_each_rank(two):
    run_dir = two[0] / "torn" / "after"
    state = checkpoint.read(run_dir / "last.pt")
    assert all(tensor.is_meta for tensor in state["model"].values())
    assert not any(tensor.is_meta for tensor in state["best"]["model"].values())
    assert sorted(state["shards"]["files"]) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    named = {checkpoint.read(run_dir / name)["shards"]["folder"] for name in ("last.pt", "previous.pt")}
    assert {path.name for path in (run_dir / "shards").iterdir()} == named, "nothing but what can be resumed from"
    assert len(named) == 2
    sizes = [state["shards"]["files"][f"__{rank}_0.distcp"]["size"] for rank in range(2)]
    assert max(sizes) < 2 * min(sizes)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["torn", "changed", "gone"])
def test_an_invalid_shard_invalidates_only_its_checkpoint(how, two, undisturbed, tmp_path, caplog):
    run_dir = tmp_path / "after"
    shutil.copytree(two[0] / "torn" / "after", run_dir)
    last = checkpoint.read(run_dir / "last.pt")["shards"]["folder"]
    part = run_dir / "shards" / last / "__1_0.distcp"
    data = part.read_bytes()
    if how == "gone":
        part.unlink()
    else:
        part.write_bytes(data[:-1] if how == "torn" else data[:-1] + bytes([data[-1] ^ 1]))
    with caplog.at_level(logging.WARNING):
        state = LocalSession(run_dir).restore()
    assert len(state["history"]) == 1, "the one before it"
    assert ("is missing" if how == "gone" else "is truncated or changed") in caplog.text
    assert "trying the previous checkpoint" in caplog.text
    assert_same(on_ranks(2, on_two_torn, tmp_path, "after")[0], undisturbed, "after")


class Touch:
    """Runs code when a pickle is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def _name(module, name):
    return f"c{module}\n{name}\n".encode()


_TEXT = b"X\x04\x00\x00\x00evil"
_SET = b"N}" + _TEXT + _TEXT + b"s\x86b"  # sets the attribute `evil`
_METADATA = "torch.distributed.checkpoint.metadata"


@pytest.mark.parametrize(
    "pickled",
    [
        _name("pathlib", "PosixPath") + _SET,
        _name(_METADATA, "Metadata") + _SET,
        _name(_METADATA, "_MEM_FORMAT_ENCODING") + b"K\x00\x85R" + _SET,
        _name("pathlib", "PosixPath") + b")R" + _SET,
    ],
    ids=["path class", "metadata class", "member", "path"],
)
def test_the_metadata_of_a_sharded_checkpoint_cannot_change_classes(tmp_path, pickled):
    """An attribute of the class `PosixPath` would change the meaning of all paths of the process."""
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + pickled + b".")
    with pytest.raises(RuntimeError, match=r"attributes of [A-Za-z_]+ are not allowed in the metadata of shards"):
        read_shards({"model": {"weight": torch.empty(1, device="meta")}}, tmp_path)
    assert not hasattr(pathlib.Path(), "evil")
    assert not hasattr(Metadata, "evil")


def test_the_metadata_of_a_sharded_checkpoint_names_only_files_of_its_folder(two, tmp_path):
    run_dir = tmp_path / "after"
    shutil.copytree(two[0] / "torn" / "after", run_dir)
    state = LocalSession(run_dir).restore()
    folder = run_dir / "shards" / checkpoint.read(run_dir / "last.pt")["shards"]["folder"]
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = f"../{info.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(RuntimeError, match=r"shard '\.\./__._0\.distcp' is not in the folder of the metadata"):
        read_shards({"model": state["model"]}, folder)


def test_the_metadata_of_python_3_13_can_be_read():
    found = _MetadataUnpickler(io.BytesIO(b"cpathlib._local\nPosixPath\n(S'0000'\ntR.")).load()
    assert found == pathlib.PosixPath("0000")


def test_the_metadata_of_a_sharded_checkpoint_cannot_run_code(two, tmp_path):
    run_dir = tmp_path / "after"
    shutil.copytree(two[0] / "torn" / "after", run_dir)
    state = LocalSession(run_dir).restore()
    folder = run_dir / "shards" / checkpoint.read(run_dir / "last.pt")["shards"]["folder"]
    (folder / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    with pytest.raises(RuntimeError, match=r"io\.open is not allowed in the metadata of shards"):
        read_shards({"model": state["model"]}, folder)
    assert not (tmp_path / "touched").exists()


def apart_at_first(ranks, folder, warned):
    """As on two machines: rank 1 does not see the files of rank 0."""
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("hpsearch.objectives.training").addHandler(handler)
    if ranks.rank == 1:
        seen = pathlib.Path.is_dir
        pathlib.Path.is_dir = lambda self: "shards" not in self.parts and seen(self)
    found = fit(folder / "run", "after")
    assert found is None or ranks.is_rank_zero
    state = LocalSession(folder / "run").restore() if ranks.is_rank_zero else None
    shutil.copytree(folder / "parts", folder / "resumed") if ranks.is_rank_zero else None
    ranks.all_gather_object(None)
    again = fit(folder / "resumed")
    return again, warned, state is not None and ("shards" in state, len(state["history"]))


@pytest.mark.soak
def test_ranks_without_a_shared_disk_use_a_full_checkpoint(two, undisturbed, tmp_path):
    shutil.copytree(two[0] / "torn" / "after", tmp_path / "parts")
    (again, warned, state), _ = on_ranks(2, apart_at_first, tmp_path, [])
    assert state == (False, 2)
    assert sum("not all ranks see" in line for line in warned) == 2, "once in each of two runs"
    assert_same(again, undisturbed, "after")
