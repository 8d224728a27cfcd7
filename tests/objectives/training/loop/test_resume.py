"""A killed and resumed run is bit-identical to an uninterrupted one."""

import signal

import pytest
import torch

from hpsearch import LocalSession, ObjectiveError, TrainConfig, Trainer, Verdict, load_objective
from hpsearch.objectives.training.reproducibility import checkpoint
from tests.objectives.training.support import DiedError, Dying, exact, raise_died, same_result

EPOCHS = 3
FILES = {"report.md", "config.yaml", "metrics.jsonl", "steps.jsonl", "train.log", "curves.png", "gradients.png"}
CONFIGS = {
    "cnn": TrainConfig(
        lr=5e-3,
        schedule="one_cycle",
        ema_decay=0.9,
        model={"kind": "cnn", "layers": 2, "width": 8, "dropout": 0.3},
    ),
    "sgd": TrainConfig(
        optimizer="sgd",
        lr=0.05,
        nesterov=True,
        gradient_accumulation_steps=2,
        model={"kind": "mlp", "layers": 2, "width": 32, "dropout": 0.3},
    ),
    "fp16": TrainConfig(precision="fp16", model={"kind": "mlp", "layers": 1, "width": 32, "dropout": 0.3}),
}


def _trainer(config, run_dir=None, session=None, **changed):
    settings = {"epochs": EPOCHS, "seed": 11, "split_seed": 5, "session": session, "run_dir": run_dir, **changed}
    return Trainer(load_objective("digits"), config, **settings)


@pytest.fixture(scope="module")
def undisturbed():
    done = {}

    def get(name):
        if name not in done:
            done[name] = _trainer(CONFIGS[name]).fit()
        return done[name]

    return get


@pytest.mark.slow
@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize(
    ("name", "point"),
    [("cnn", "unsaved"), ("cnn", "unreported"), ("cnn", "reported"), ("sgd", "reported"), ("fp16", "reported")],
)
@pytest.mark.parametrize("epoch", [1, *(pytest.param(epoch, marks=pytest.mark.soak) for epoch in (0, 2))])
def test_a_run_stopped_at_any_epoch_resumes_exactly(tmp_path, undisturbed, name, epoch, point):
    with pytest.raises(DiedError):
        _trainer(CONFIGS[name], session=Dying(tmp_path, epoch, point, raise_died)).fit()
    torch.manual_seed(epoch)  # random numbers drawn in between must not matter
    torch.rand(7)
    result = _trainer(CONFIGS[name], run_dir=tmp_path).fit()
    assert result.status == "completed"
    assert result.resume_note is None
    same_result(result, undisturbed(name))
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == EPOCHS


KILLED = """
import sys, signal, os, torch
from pathlib import Path
from tests.objectives.training.loop.test_resume import CONFIGS, Dying, _trainer
torch.set_num_threads(1)
run_dir, name, epoch, point = sys.argv[1:]
session = Dying(Path(run_dir), int(epoch), point, lambda: os.kill(os.getpid(), signal.SIGKILL))
_trainer(CONFIGS[name], session=session).fit()
"""


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize(("epoch", "point"), [(1, "unreported"), (2, "unsaved")])
def test_a_run_killed_by_sigkill_resumes_exactly_in_another_process(zygote, tmp_path, undisturbed, epoch, point):
    said, _ = (done := zygote.python(KILLED, tmp_path, "cnn", str(epoch), point)).communicate()
    assert done.returncode == -signal.SIGKILL, said
    same_result(_trainer(CONFIGS["cnn"], run_dir=tmp_path).fit(), undisturbed("cnn"))


@pytest.mark.usefixtures("no_plots")
def test_a_checkpoint_with_former_names_is_resumed(tmp_path, undisturbed):
    with pytest.raises(DiedError):
        _trainer(CONFIGS["sgd"], session=Dying(tmp_path, 1, "reported", raise_died)).fit()
    state = checkpoint.read(tmp_path / "last.pt")
    config = state["config"]
    config["accumulate"] = config.pop("gradient_accumulation_steps")
    config["shard_above"] = config.pop("shard_checkpoint_above_gib")
    checkpoint.write(tmp_path / "last.pt", state)
    (tmp_path / "previous.pt").unlink()
    same_result(_trainer(CONFIGS["sgd"], run_dir=tmp_path).fit(), undisturbed("sgd"))


@pytest.mark.usefixtures("no_plots")
def test_a_torn_checkpoint_costs_one_epoch_but_no_exactness(tmp_path, undisturbed):
    with pytest.raises(DiedError):
        _trainer(CONFIGS["cnn"], session=Dying(tmp_path, 2, "reported", raise_died)).fit()
    last = tmp_path / "last.pt"
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    same_result(_trainer(CONFIGS["cnn"], run_dir=tmp_path).fit(), undisturbed("cnn"))


@pytest.mark.usefixtures("no_plots")
def test_a_completed_run_returns_its_result_without_training(tmp_path, undisturbed, monkeypatch):
    expected = undisturbed("cnn")
    _trainer(CONFIGS["cnn"], run_dir=tmp_path).fit()
    monkeypatch.setattr("hpsearch.objectives.training.trainer.train_epoch", None)
    again = _trainer(CONFIGS["cnn"], run_dir=tmp_path).fit()
    assert again.status == "completed"
    same_result(again, expected)


class Recording(LocalSession):
    """Returns the given verdict for each epoch and records the calls."""

    def __init__(self, run_dir, answers=None):
        super().__init__(run_dir)
        self.answers, self.calls, self.logged = answers or {}, [], []

    def save(self, state, *, best):
        super().save(state, best=best)
        self.calls.append(("save", len(state["history"]) - 1))

    def report(self, record):
        super().report(record)
        self.calls.append(("report", record.epoch))
        return self.answers.get(record.epoch, Verdict.CONTINUE)

    def log(self, path):
        self.logged.append(path.name)


def test_a_stopped_run_saves_a_checkpoint_and_logs_no_files(tmp_path, undisturbed):
    session = Recording(tmp_path, {1: Verdict.STOP})
    first = _trainer(CONFIGS["cnn"], session=session).fit()
    assert first.status == "stopped"
    assert session.calls == [("save", 0), ("report", 0), ("save", 1), ("report", 1)]
    assert session.logged == []
    assert exact(first.history) == exact(undisturbed("cnn").history[:2])
    again = Recording(tmp_path)
    second = _trainer(CONFIGS["cnn"], session=again).fit()
    assert again.calls[:4] == [("report", 0), ("report", 1), ("save", 2), ("report", 2)]
    assert set(again.logged) - {"changes.diff"} == FILES
    same_result(second, undisturbed("cnn"))
    assert [r.timestamp for r in second.history[:2]] == [r.timestamp for r in first.history]


@pytest.mark.usefixtures("no_plots")
def test_a_stop_at_the_last_epoch_completes_the_run(tmp_path):
    session = Recording(tmp_path, {EPOCHS - 1: Verdict.STOP})
    assert _trainer(CONFIGS["sgd"], session=session).fit().status == "completed"


@pytest.mark.usefixtures("no_plots")
def test_a_verdict_on_a_replayed_epoch_ends_the_run(tmp_path):
    with pytest.raises(DiedError):
        _trainer(CONFIGS["sgd"], session=Dying(tmp_path, 1, "unreported", raise_died)).fit()
    session = Recording(tmp_path, {1: Verdict.PRUNE})
    result = _trainer(CONFIGS["sgd"], session=session).fit()
    assert result.status == "pruned"
    assert len(result.history) == 2
    assert session.calls == [("report", 0), ("report", 1)]


@pytest.mark.usefixtures("no_plots")
def test_patience_continues_after_a_resume(tmp_path):
    config = TrainConfig(lr=1e-9, patience=3, schedule="constant", model={"kind": "mlp", "layers": 1, "width": 8})
    undisturbed = _trainer(config, epochs=9).fit()
    assert undisturbed.status == "completed"
    assert len(undisturbed.history) == 4
    with pytest.raises(DiedError):
        _trainer(config, session=Dying(tmp_path, 2, "reported", raise_died), epochs=9).fit()
    same_result(_trainer(config, run_dir=tmp_path, epochs=9).fit(), undisturbed)
    assert len(_trainer(config, run_dir=tmp_path, epochs=9).fit().history) == 4


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"config": TrainConfig(lr=0.5)}, "another run: its lr is 0.05, not 0.5"),
        ({"seed": 1}, "another run: its seed is 11, not 1"),
        ({"split_seed": 1}, "another run: its split_seed is 5, not 1"),
        ({"epochs": 9}, "another run: its epochs is 3, not 9"),
    ],
)
def test_a_checkpoint_of_another_run_is_rejected_and_kept(tmp_path, changed, message):
    config = CONFIGS["sgd"]
    _trainer(config, run_dir=tmp_path).fit()
    before = {p.name: p.read_bytes() for p in tmp_path.glob("*.pt")}
    if "config" in changed:
        changed = {"config": TrainConfig.from_dict({**config.to_dict(), "lr": 0.5})}
    with pytest.raises(ObjectiveError, match=message):
        _trainer(**{"config": config, **changed}, run_dir=tmp_path).fit()
    assert {p.name: p.read_bytes() for p in tmp_path.glob("*.pt")} == before


@pytest.mark.soak
@pytest.mark.usefixtures("no_plots")
def test_resuming_with_another_number_of_threads_is_reported(tmp_path):
    session = Recording(tmp_path, {0: Verdict.STOP})
    _trainer(CONFIGS["sgd"], session=session).fit()
    torch.set_num_threads(2)
    _trainer(CONFIGS["sgd"], session=Recording(tmp_path, {1: Verdict.STOP})).fit()
    result = _trainer(CONFIGS["sgd"], run_dir=tmp_path).fit()
    assert result.resume_note == "results after epoch 1 may differ: threads 1 -> 2"
    assert "threads 1 -> 2" in (tmp_path / "train.log").read_text()


@pytest.mark.usefixtures("no_plots")
def test_the_log_of_steps_has_each_step_once_after_a_resume(tmp_path):
    """Also if the run died in the middle of a write: the file has each step once, with its own number."""
    config = TrainConfig.from_dict({**CONFIGS["cnn"].to_dict(), "log_every": 5, "validate_every": 8})
    _trainer(config, run_dir=tmp_path / "whole").fit()
    with pytest.raises(DiedError):
        _trainer(config, session=Dying(tmp_path / "died", 1, "unsaved", raise_died)).fit()
    with (tmp_path / "died" / "steps.jsonl").open("a") as file:
        file.write('{"epoch": 1, "st')
    _trainer(config, run_dir=tmp_path / "died").fit()
    whole, died = ((tmp_path / name / "steps.jsonl").read_text() for name in ("whole", "died"))
    assert died == whole
    assert len(whole.splitlines()) == 20 + 6 + 6, (
        "of 48 steps the first each, then every fifth, and what was validated within"
    )
