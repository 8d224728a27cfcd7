import gzip
import json
from pathlib import Path

import pytest
import torch

from hpsearch import ObjectiveError, TrainConfig, Trainer
from hpsearch.objectives.training.loop.profiling import Instruments
from tests.objectives.training.support import Memory, same_result

CONFIG = TrainConfig(lr=0.02, batch_size=16)


def _fit(objective, run_dir=None, epochs=2, **instruments):
    return Trainer(
        objective, CONFIG, epochs=epochs, seed=0, run_dir=run_dir, instruments=Instruments(**instruments)
    ).fit()


def test_profiling_some_steps_changes_no_result(wine, tmp_path):
    result = _fit(wine, tmp_path, profile_steps=3)
    same_result(result, _fit(wine))
    with gzip.open(tmp_path / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert sum(name.startswith("ProfilerStep") for name in names) == 3
    assert any("aten::addmm" in name or "aten::linear" in name for name in names)


def test_the_trace_is_not_compressed_in_the_temporary_folder(wine, tmp_path, monkeypatch):
    """Torch follows a link there, which another user can create with the name of the next file."""
    paths = []
    export = torch.profiler.profile.export_chrome_trace
    monkeypatch.setattr(
        torch.profiler.profile, "export_chrome_trace", lambda self, path: (paths.append(Path(path)), export(self, path))
    )
    _fit(wine, tmp_path, epochs=1, profile_steps=2)
    (path,) = paths
    assert path.suffix == ".json", "torch compresses only files named *.gz"
    assert path.parent.name.startswith("hpsearch-")
    assert not path.parent.exists()


def test_the_trace_is_passed_to_the_session(wine, tmp_path):
    session = Memory()
    Trainer(
        wine, CONFIG, epochs=1, seed=0, run_dir=tmp_path, session=session, instruments=Instruments(profile_steps=2)
    ).fit()
    assert tmp_path / "trace.json.gz" in session.logged


def test_a_resumed_run_is_not_profiled_again(wine, tmp_path):
    _fit(wine, tmp_path, profile_steps=2)
    (tmp_path / "trace.json.gz").unlink()
    _fit(wine, tmp_path, profile_steps=2)
    assert not (tmp_path / "trace.json.gz").exists()


def test_tensorboard_shows_every_epoch(wine, tmp_path):
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="TensorBoard is not installed"
    )
    result = _fit(wine, tmp_path, epochs=3, tensorboard=True)
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"loss/train", "loss/val", "accuracy/val", "lr"} <= set(events.Tags()["scalars"])
    shown = [(event.step, event.value) for event in events.Scalars("loss/val")]
    expected = [(record.epoch, pytest.approx(record.metrics["val_loss"])) for record in result.history]
    assert shown == expected


def test_a_missing_tensorboard_package_is_an_error(wine, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ObjectiveError, match="needs TensorBoard; run pip install tensorboard"):
        _fit(wine, tmp_path, tensorboard=True)


@pytest.mark.parametrize("instruments", [{"profile_steps": 1}, {"tensorboard": True}])
def test_instruments_need_a_run_dir(wine, instruments):
    with pytest.raises(ObjectiveError, match="need a directory; set run_dir"):
        _fit(wine, **instruments)


def test_a_negative_number_of_profiled_steps_is_rejected(wine, tmp_path):
    with pytest.raises(ObjectiveError, match="profile_steps must be at least 0, not -1"):
        _fit(wine, tmp_path, profile_steps=-1)
