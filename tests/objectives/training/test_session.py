"""Checkpoints of a local session: their number, interval and snapshots."""

import pytest
import torch

from hpsearch import LocalSession, ObjectiveError, TrainConfig, Trainer
from hpsearch.objectives.training.reproducibility import checkpoint
from tests.objectives.training.support import same_result

ABOUT = dict.fromkeys(("format", "objective", "config", "seed", "split_seed", "split_hash"), 0)


def _state(epoch, epochs=10):
    return {**ABOUT, "epochs": epochs, "history": [0] * (epoch + 1), "best": {"epoch": epoch, "model": {}}}


def _epochs(folder):
    return {path.name: len(checkpoint.read(path)["history"]) - 1 for path in sorted(folder.glob("[elp]*.pt"))}


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (1, {"last.pt": 4}),
        (2, {"last.pt": 4, "previous.pt": 3}),
        (3, {"last.pt": 4, "previous-2.pt": 2, "previous.pt": 3}),
    ],
)
def test_keep_limits_the_number_of_stored_states(tmp_path, keep, expected):
    session = LocalSession(tmp_path, keep=keep)
    for epoch in range(5):
        session.save(_state(epoch), best=False)
    assert _epochs(tmp_path) == expected


def test_a_run_can_resume_from_every_stored_state(tmp_path):
    session = LocalSession(tmp_path, keep=3)
    for epoch in range(5):
        session.save(_state(epoch), best=False)
    for torn, left in (("last.pt", 3), ("previous.pt", 2)):
        (tmp_path / torn).write_bytes(b"torn")
        assert len(session.restore()["history"]) - 1 == left
    (tmp_path / "previous-2.pt").write_bytes(b"torn")
    assert session.restore() is None


def test_snapshots_are_not_removed(tmp_path):
    session = LocalSession(tmp_path, keep=1, snapshot_every=2)
    for epoch in range(6):
        session.save(_state(epoch), best=False)
    assert _epochs(tmp_path) == {"epoch-0001.pt": 1, "epoch-0003.pt": 3, "epoch-0005.pt": 5, "last.pt": 5}


def test_states_can_be_saved_at_time_intervals(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    session = LocalSession(tmp_path, keep=1, interval=60.0)
    saved = []
    for epoch in range(8):
        session.save(_state(epoch, epochs=8), best=epoch == 2)
        saved.append(_epochs(tmp_path).get("last.pt"))
        now[0] += 25.0
    assert saved == [0, 0, 0, 3, 3, 3, 6, 7], "the first, then each minute, and the last epoch"


@pytest.mark.slow
def test_a_run_saved_at_time_intervals_resumes_exactly(wine, tmp_path):
    class DiedError(Exception):
        pass

    class Dying(LocalSession):
        def report(self, record):
            verdict = super().report(record)
            if record.epoch == 3:
                raise DiedError
            return verdict

    def trainer(session):
        return Trainer(wine, TrainConfig(lr=0.02, batch_size=16), epochs=5, seed=1, session=session)

    expected = trainer(None).fit()
    with pytest.raises(DiedError):
        trainer(Dying(tmp_path, interval=3600.0)).fit()
    assert _epochs(tmp_path)["last.pt"] == 0, "three epochs are to be trained again"
    torch.manual_seed(9)
    same_result(trainer(LocalSession(tmp_path, interval=3600.0)).fit(), expected)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 5


def test_a_run_can_resume_from_a_snapshot(wine, tmp_path):
    """A snapshot is a complete state: copied over the last checkpoint, the run resumes from it."""

    def trainer(run_dir, **settings):
        config = TrainConfig(lr=0.02, batch_size=16)
        return Trainer(wine, config, epochs=4, seed=1, session=LocalSession(run_dir, **settings))

    expected = trainer(tmp_path, snapshot_every=2).fit()
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "epoch-0001.pt").rename(other / "last.pt")
    same_result(trainer(other).fit(), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0}, "keep must be at least 1, not 0"),
        ({"interval": -1.0}, "interval must be at least 0, not -1.0"),
        ({"snapshot_every": 0}, "snapshot_every must be at least 1, not 0"),
    ],
)
def test_invalid_checkpoint_settings_are_rejected(tmp_path, settings, message):
    with pytest.raises(ObjectiveError, match=message):
        LocalSession(tmp_path, **settings)


def test_shards_are_kept_as_long_as_a_checkpoint_names_them(tmp_path):
    session = LocalSession(tmp_path, snapshot_every=2)
    for epoch in range(5):
        (session.shards / f"after-{epoch}").mkdir(parents=True)
        state = {**_state(epoch), "shards": {"folder": f"after-{epoch}", "files": {}}}
        session.save(state, best=False)
    assert sorted(path.name for path in session.shards.iterdir()) == ["after-1", "after-3", "after-4"]
    (tmp_path / "previous.pt").write_bytes(b"torn")
    (tmp_path / "epoch-0001.pt").unlink()
    assert session.restore()["shards"]["folder"] == str(session.shards / "after-4")
    assert sorted(path.name for path in session.shards.iterdir()) == ["after-3", "after-4"]
