import json
import os
import pickle
import stat
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from hpsearch import EpochRecord, LocalSession, ObjectiveError
from hpsearch.objectives.training.reproducibility import checkpoint
from hpsearch.objectives.training.reproducibility.checkpoint import CheckpointError, RunFiles, check_readable
from hpsearch.objectives.training.reproducibility.metrics_file import MetricsFile, StepsFile

STATE = {
    "model": {"weight": torch.arange(1000.0)},
    "history": [{"epoch": 0, "metrics": {"val_loss": 0.1}}],
    "best": {"epoch": 0, "value": 0.5, "metrics": {}, "model": {"weight": torch.ones(3)}},
    "seed": 3,
    "ema": None,
    "flags": (True, "text"),
}


def _same(found):
    assert torch.equal(found["model"]["weight"], STATE["model"]["weight"])
    assert {k: found[k] for k in ("history", "seed", "ema", "flags")} == {
        k: STATE[k] for k in ("history", "seed", "ema", "flags")
    }


def test_a_checkpoint_round_trips_and_torch_load_reads_it(tmp_path):
    path = tmp_path / "deep" / "a.pt"
    checkpoint.write(path, STATE)
    _same(checkpoint.read(path))
    _same(torch.load(path, weights_only=True))
    assert [p.name for p in path.parent.iterdir()] == ["a.pt"]


def test_a_checkpoint_without_fsync_is_complete(tmp_path):
    session = LocalSession(tmp_path, synced=False)
    session.save(STATE, best=False)
    _same(session.restore())
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_any_changed_byte_is_detected(tmp_path):
    path = tmp_path / "a.pt"
    checkpoint.write(path, STATE)
    good = path.read_bytes()
    for position in [0, *range(7, len(good), 97), len(good) - 1]:
        bad = bytearray(good)
        bad[position] ^= 1
        path.write_bytes(bad)
        if position in (len(good) - 73, len(good) - 72):
            continue  # the two bytes of the comment's length are not hashed; torch does not read them
        with pytest.raises(CheckpointError, match="truncated or changed"):
            checkpoint.read(path)


def test_a_torn_file_is_rejected(tmp_path):
    path = tmp_path / "a.pt"
    checkpoint.write(path, STATE)
    good = path.read_bytes()
    for size in (0, 1, 50, 71, 72, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(CheckpointError):
            checkpoint.read(path)
    torch.save(STATE, path)  # complete, but without a checksum
    with pytest.raises(CheckpointError):
        checkpoint.read(path)


class _Code:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (self.target,)


def test_code_in_a_checkpoint_is_never_run(tmp_path):
    path, trap = tmp_path / "a.pt", tmp_path / "trap"
    checkpoint.write(path, {"model": _Code(str(trap))})  # with a correct checksum
    with pytest.raises(CheckpointError, match="contains other objects than plain values and tensors"):
        checkpoint.read(path)
    assert not trap.exists()


class Versioned(torch.Tensor):
    """A class that the user has allowed, and that no longer reads its old files."""

    def __setstate__(self, state):
        raise ValueError("old version")


def test_an_error_of_an_allowed_class_is_one_of_the_checkpoint(tmp_path):
    checkpoint.write(tmp_path / "a.pt", {"x": torch.ones(2).as_subclass(Versioned)})
    (tmp_path / "shards").mkdir()
    RunFiles(tmp_path).remove_unreferenced_shards()  # a class that the user has allowed may raise any error here, too
    with torch.serialization.safe_globals([Versioned]), pytest.raises(CheckpointError) as raised:
        checkpoint.read(tmp_path / "a.pt")
    assert str(raised.value.__cause__) == "old version"


def test_a_file_without_a_state_is_rejected(tmp_path):
    checkpoint.write(tmp_path / "a.pt", [1, 2])
    with pytest.raises(CheckpointError, match="not a checkpoint: it contains a list"):
        checkpoint.read(tmp_path / "a.pt")


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "a.pt"
    checkpoint.write(path, STATE)
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        checkpoint.write(path, {"model": lambda: None})
    _same(checkpoint.read(path))
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


WRITER = """
import sys, torch
from pathlib import Path
from hpsearch.objectives.training.session import LocalSession
session = LocalSession(Path(sys.argv[1]))
print("ready", flush=True)
number = 0
about = dict.fromkeys(("format", "objective", "config", "seed", "split_seed", "split_hash"), 1)
while True:
    number += 1
    state = {"number": number, "weights": torch.full((300_000,), float(number))}
    session.save({**about, **state, "best": {"model": state}}, best=True)
    if number >= 3:
        print(number, flush=True)
"""


@pytest.mark.parametrize("writes", [0, 5, *(pytest.param(writes, marks=pytest.mark.soak) for writes in (1, 9))])
def test_a_kill_during_a_write_leaves_a_complete_state(zygote, tmp_path, writes):
    process = zygote.python(WRITER, tmp_path)
    ready, *numbers = process.lines(writes + 2)
    assert ready == "ready"
    last = int(numbers[writes])
    process.kill()
    process.wait()
    session = LocalSession(tmp_path)
    state = session.restore()
    assert state is not None
    assert state["number"] >= last
    assert bool((state["weights"] == state["number"]).all())
    best = checkpoint.read(session.files.best_path)["model"]
    assert bool((best["weights"] == best["number"]).all())
    assert not list(tmp_path.glob(".*.tmp")), "leftovers are removed"


def _state(number):
    about = dict.fromkeys(("format", "objective", "config", "seed", "split_seed", "split_hash"), number)
    return {**about, "optimizer": {}, "best": {"epoch": number, "value": 1.0, "metrics": {}, "model": {}}}


def test_a_session_falls_back_to_the_previous_state(tmp_path, caplog):
    session = LocalSession(tmp_path)
    assert session.restore() is None
    for number in range(3):
        session.save(_state(number), best=number == 1)
    assert session.restore()["seed"] == 2
    assert checkpoint.read(session.files.best_path)["epoch"] == 1
    assert "optimizer" not in checkpoint.read(session.files.best_path)
    session.files.last_path.write_bytes(session.files.last_path.read_bytes()[:-9])
    assert session.restore()["seed"] == 1
    assert "last.pt is truncated" in caplog.text
    session.files.last_path.unlink()  # as after a kill between the two renames
    assert session.restore()["seed"] == 1
    session.files.previous_path.write_bytes(b"")
    assert session.restore() is None


def test_metrics_are_appended_once_and_a_torn_line_is_repaired(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    records = [EpochRecord(epoch, 100.0 + epoch, {"val_loss": 0.5, "odd": float("nan")}) for epoch in range(3)]
    for record in (*records[:2], *records[:2]):
        file.append(record)
    whole = path.read_text()
    assert whole.count("\n") == 2
    path.write_text(whole[:-10])  # killed in the middle of a line
    again = MetricsFile(path)
    for record in records:
        again.append(record)
    lines = path.read_text().splitlines()
    assert path.read_text().startswith(whole)
    assert lines[2] == '{"epoch": 2, "timestamp": 102.0, "val_loss": 0.5, "odd": null}'


def test_damaged_bytes_in_the_files_of_metrics_cost_only_their_lines(tmp_path):
    steps = StepsFile(tmp_path / "steps.jsonl")
    steps.append([{"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.5}])
    epochs = MetricsFile(tmp_path / "metrics.jsonl")
    epochs.append(EpochRecord(0, 100.0, {"val_loss": 0.5}))
    for path in (steps.path, epochs.path):
        path.write_bytes(path.read_bytes() + b'{"step": 0, "epoch": 0, "l\xffss": 2.0}\n\xff\xfe{"x')
    steps.rewind(1)
    assert steps.read() == [{"step": 0, "loss": 1.0}]
    MetricsFile(epochs.path).append(EpochRecord(1, 101.0, {"val_loss": 0.4}))
    assert [json.loads(line)["epoch"] for line in epochs.path.read_text().splitlines()] == [0, 1]


class Subclass(torch.Tensor):
    """A class that `torch.load` rejects."""


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        (torch.ones(2).as_subclass(Subclass), "Subclass"),
        (lambda: 1, "function"),
        (np.float64(0.5), "float64"),
    ],
)
def test_a_state_that_could_not_be_read_again_is_an_error_at_the_first_save(tmp_path, part, kind):
    """Before, every resume of the trial began with the first epoch."""
    files = RunFiles(tmp_path / "run")
    files.save_last({"model": torch.ones(3), "groups": [{}, {"part": 1}]})
    files.remove(files.last_path)
    with pytest.raises(ObjectiveError, match=rf"cannot store groups\.1\.part \(type {kind}\)"):
        files.save_last({"model": torch.ones(3), "groups": [{}, {"part": part}]})
    assert list(files.run_dir.iterdir()) == []


class Position(NamedTuple):
    """A key of a table, which `torch.load` rejects."""

    x: int


def test_a_key_that_could_not_be_read_again_is_an_error(tmp_path):
    with pytest.raises(ObjectiveError, match=r"cannot store table \(type dict\)"):
        RunFiles(tmp_path).save_last({"table": {Position(1): 0.5}})


def test_containers_that_a_state_contains_often_are_checked_once():
    shared: list = [1.0]
    for _ in range(60):
        shared = [shared, shared]
    shared.append(shared)
    assert checkpoint._find_types(shared) == {list, float}


def test_the_check_ignores_the_setting_to_map_files(monkeypatch):
    monkeypatch.setattr("torch.utils.serialization.config.load.mmap", True)
    check_readable({"model": torch.ones(3)})


def test_all_kinds_of_tensors_and_a_full_disk_pass_the_check(monkeypatch, recwarn):
    tensors = [torch.eye(3).to_sparse(), nn.Parameter(torch.ones(2)), torch.ones(2, device="meta")]
    tensors.append(torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged))
    recwarn.clear()
    check_readable({"tensors": tensors, "size": torch.Size([1]), "ordered": OrderedDict(a=1), "text": "\ud800"})
    assert recwarn.list == []
    full = os.open("/dev/full", os.O_RDWR)
    monkeypatch.setattr("tempfile.TemporaryFile", lambda: os.fdopen(full, "r+b", buffering=0))
    check_readable({"function": lambda: 1, "tensor": torch.ones(3)})


def test_a_logged_file_is_kept(tmp_path):
    made = tmp_path / "elsewhere.txt"
    made.write_text("x")
    session = LocalSession(tmp_path / "run")
    session.log(made)
    session.log(tmp_path / "run" / "elsewhere.txt")
    assert (tmp_path / "run" / "elsewhere.txt").read_text() == "x"


def test_a_file_is_synced_before_it_is_renamed(tmp_path, monkeypatch):
    """After a crash of the machine, the file must exist and must not be empty."""
    done = []
    fsync, replace = os.fsync, Path.replace

    def synced(handle):
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def renamed(path, target):
        done.append(f"{'whole' if torch.load(path, weights_only=True) else ''} renamed")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    checkpoint.write(tmp_path / "a.pt", STATE)
    assert done == ["file", "whole renamed", "folder"]


def test_only_leftovers_of_killed_writes_are_removed(tmp_path):
    session = LocalSession(tmp_path)
    session.save(_state(1), best=True)
    for name in (".last.pt.4711.tmp", ".best.pt.4712.tmp", ".config.yaml.tmp", "notes.tmp"):
        (tmp_path / name).write_bytes(b"half")
    assert session.restore()["seed"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.pt", "last.pt", "notes.tmp"]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system cannot read a file without its cache")
@pytest.mark.parametrize("is_complete", [True, False])
def test_an_error_of_a_sync_matters_if_the_file_is_lost(tmp_path, monkeypatch, caplog, is_complete):
    """A quota or a network file system may report at the sync that the data were not written."""
    files = checkpoint.RunFiles(tmp_path, synced=False)
    checkpoint.write(files.best_path, {"model": {"weight": torch.ones(3)}}, synced=False)

    def fail(descriptor):
        if not is_complete:
            os.truncate(files.best_path, 100)
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", fail)
    if is_complete:
        files.sync_best()
        assert "best.pt may not survive a power failure (Disk quota exceeded)" in caplog.text
    else:
        with pytest.raises(OSError, match="quota"):
            files.sync_best()
