"""The directory of a run."""

import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import yaml

from hpsearch import EpochRecord, TrainConfig
from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.reports import plots
from hpsearch.objectives.training.reports.plots import plot_curves, plot_gradient_norms
from hpsearch.objectives.training.reports.run_dir import RunDir
from hpsearch.objectives.training.reproducibility import checkpoint
from tests.full_disk import full_disk
from tests.objectives.training.support import Memory, fit, same_result


def test_a_run_dir_has_the_documented_files(wine, tmp_path):
    session = Memory()
    config = TrainConfig(lr=0.02, model={"width": 4})
    result = fit(wine, config, session=session, run_dir=tmp_path, split_seed=3)
    names = ["config.yaml", "curves.png", "gradients.png", "metrics.jsonl", "report.md", "steps.jsonl", "train.log"]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "changes.diff") == names
    assert sorted(p.name for p in session.logged if p.name != "changes.diff") == names
    kept = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert TrainConfig.from_dict(kept["config"]) == config
    assert (kept["epochs"], kept["seed"], kept["split_seed"]) == (5, 0, 3)
    assert kept["split_hash"] == result.split_hash == wine.data(3).hash()
    assert kept["environment"]["torch"] == torch.__version__
    assert kept["environment"]["threads"] == 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [EpochRecord(d.pop("epoch"), d.pop("timestamp"), d) for d in lines] == result.history
    log = (tmp_path / "train.log").read_text()
    assert "before training: loss=" in log
    assert log.count("epoch ") >= 5
    assert "completed: best epoch" in log


def test_a_local_run_saves_checkpoints_in_its_run_dir(wine, tmp_path):
    result = fit(wine, run_dir=tmp_path)
    assert (result.best_path, result.last_path) == (tmp_path / "best.pt", tmp_path / "last.pt")
    state = checkpoint.read(result.last_path)
    for part in ("model", "optimizer", "schedule", "scaler", "step", "skipped", "best", "history", "config", "seed"):
        assert part in state


@pytest.mark.slow
def test_a_new_run_in_an_old_run_dir_replaces_its_metrics(wine, tmp_path):
    for lr in (0.1, 0.001):  # these sessions have no checkpoint
        result = fit(wine, TrainConfig(lr=lr), session=Memory(), run_dir=tmp_path, epochs=2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["val_loss"] for line in lines] == [record.metrics["val_loss"] for record in result.history]
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["config"]["lr"] == 0.001


@pytest.mark.slow
def test_a_configuration_is_written_without_aliases_of_yaml(tmp_path):
    """`promote` reads no files with aliases, because nested ones could fill the memory."""
    shared = ["a"]
    RunDir(tmp_path, should_log=False).start({"one": shared, "two": shared}, "", resumed_at=None)
    assert (tmp_path / "config.yaml").read_text() == "one:\n- a\ntwo:\n- a\n"


def test_a_run_on_a_full_disk_has_the_same_results(wine, tmp_path, caplog):
    with full_disk():
        result = fit(wine, session=Memory(), run_dir=tmp_path)
    assert "config.yaml cannot be written: File too large; the run continues" in caplog.messages
    same_result(result, fit(wine))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [[math.nan, math.nan], [math.inf, 1e308], [0.0, 0.0], [-1.0, math.nan]])
def test_values_that_cannot_be_drawn_are_left_out_of_plots(tmp_path, values):
    history = [EpochRecord(n, 0.0, {"train_loss": value, "val_loss": value}) for n, value in enumerate(values)]
    steps = [{"step": n, "layers": {"weight": abs(value)}} for n, value in enumerate(values)]
    assert plot_curves(history, tmp_path / "curves.png", ["loss"], best_epoch=0).exists()
    plot_gradient_norms(steps, tmp_path / "gradients.png")
    assert plots.plot_overfit(values, tmp_path / "overfit.png", target=0.1).exists()
    assert plots.plot_lr_range([1e-4, 1e-3], values, tmp_path / "lr.png", suggestion=1e-3).exists()


def test_nothing_is_written_without_a_run_dir(wine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = fit(wine)
    assert list(tmp_path.iterdir()) == []
    assert (result.best_path, result.last_path) == (None, None)


def test_the_command_line_is_stored_without_passwords(wine, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["run", "--storage-url", "postgresql://bob:hunter2@db/optuna"])
    fit(wine, run_dir=tmp_path, epochs=1)
    text = (tmp_path / "config.yaml").read_text()
    assert "hunter2" not in text
    assert "postgresql://bob:***@db/optuna" in text


def test_curves_mark_the_best_epoch(wine, tmp_path):
    history = fit(wine).history
    path = plot_curves(history, tmp_path / "deep" / "a.png", ["loss", "accuracy"], best_epoch=2)
    plain = plot_curves(history, tmp_path / "b.png", ["loss", "accuracy"])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.read_bytes() != plain.read_bytes()


def test_a_plot_contains_nothing_of_the_previous_one(tmp_path, monkeypatch):
    """A process reuses figures: with other ranges, without a best epoch or a training curve."""

    def drawn(name, epochs, scale, best):
        splits = ("train", "val") if best else ("val",)
        history = [EpochRecord(n, 0.0, {f"{s}_loss": scale / (n + 1) for s in splits}) for n in range(epochs)]
        steps = [{"step": n, "layers": {"a": scale / (n + 1), "b": 1.0}} for n in range(9 * epochs)]
        files = [plot_curves(history, tmp_path / f"{name}.png", ["loss"], best_epoch=best)]
        return [path.read_bytes() for path in [*files, plot_gradient_norms(steps, tmp_path / f"{name}-gradients.png")]]

    drawn("another", 30, 1000.0, 3)
    after = drawn("after", 4, 0.01, None)
    monkeypatch.setattr(plots, "_figures", threading.local())
    assert after == drawn("alone", 4, 0.01, None)


def test_a_run_without_matplotlib_completes_with_a_remark(wine, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "_figures", threading.local())  # earlier runs of this process created figures
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    result = fit(wine, run_dir=tmp_path, epochs=2)
    assert result.status == "completed"
    assert (tmp_path / "report.md").exists()
    assert not list(tmp_path.glob("*.png"))
    assert "no plots: matplotlib" in (tmp_path / "train.log").read_text()


def test_a_run_continues_if_files_cannot_be_written(wine, tmp_path):
    class Full(Memory):
        def report(self, record):
            for name in ("metrics.jsonl", "steps.jsonl", "report.md"):
                path = tmp_path / name
                if not path.is_dir():
                    path.unlink(missing_ok=True)
                    path.mkdir()  # no file can be written here now
            return super().report(record)

    result = fit(wine, session=Full(), run_dir=tmp_path)
    assert (result.status, len(result.history)) == ("completed", 5)
    log = (tmp_path / "train.log").read_text()
    assert "metrics.jsonl cannot be written" in log
    assert "the report cannot be written" in log


def test_a_lost_trial_writes_no_metrics(wine, tmp_path):
    class LostError(Exception):
        pass

    class Lost(Memory):
        def report(self, record):
            raise LostError

    with pytest.raises(LostError):
        fit(wine, session=Lost(), run_dir=tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


_STYLES = """
import os
from pathlib import Path
from hpsearch import load_objective
from hpsearch.objectives.training.reports.plots import plot_overfit
load_objective("digits")
import matplotlib
if Path("matplotlibrc").exists():
    os.remove("matplotlibrc")  # another user can do this after the import
assert not matplotlib.rcParams["text.usetex"], "this is the style of the objective"
matplotlib.rcParams["text.usetex"] = True
plot_overfit([2.0, 1.0], Path("a.png"), target=0.1)
assert matplotlib.rcParams["text.usetex"]
"""


@pytest.mark.soak
def test_the_style_of_a_working_folder_of_all_users_cannot_start_latex(open_folder: Path) -> None:
    open_folder.chmod(0o1777)
    (open_folder / "matplotlibrc").write_text("text.usetex: True\n")
    (open_folder / "latex").write_text(f"#!/bin/sh\ntouch {open_folder / 'ran'}\n")
    (open_folder / "latex").chmod(0o755)
    environment = {**os.environ, "PATH": f"{open_folder}:{os.environ['PATH']}"}
    subprocess.run([sys.executable, "-c", _STYLES], cwd=open_folder, env=environment, check=True)
    assert (open_folder / "a.png").exists()
    assert not (open_folder / "ran").exists()


def test_a_run_dir_with_a_link_is_rejected(wine, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "other").write_text("kept")
    (tmp_path / "run" / "train.log").symlink_to(tmp_path / "other")
    with pytest.raises(ObjectiveError, match=r"contains the link 'train\.log'; remove it"):
        fit(wine, TrainConfig(model={"width": 4}), run_dir=tmp_path / "run")
    assert (tmp_path / "other").read_text() == "kept"


def test_linked_shards_are_not_removed(tmp_path):
    (tmp_path / "other" / "photos").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "shards").symlink_to(tmp_path / "other")
    checkpoint.RunFiles(tmp_path / "run").remove_unreferenced_shards()
    assert (tmp_path / "other" / "photos").is_dir()
