"""The commands that need no study: train, smoke, lr-range, objective show. These tests have no database."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

from hpsearch.changeable_paths import find_changeable_part
from hpsearch.objectives.template import write_template
from hpsearch.search.cli import run_command
from hpsearch.storage.embedded.process import wait_until
from tests.factories import LOOP_OBJECTIVE
from tests.faults.harness import Zygote

SMALL = ["--set", "model.kind=mlp", "--set", "model.width=16", "--epochs", "3"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path / "home"))


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    code = run_command(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_run_is_trained_with_the_given_settings(capsys, tmp_path: Path) -> None:
    code, out, _ = call(capsys, "train", "digits", *SMALL, "--set", "lr=1e-3", "--set", "ema_decay=null")
    assert code == 0
    assert [line.split()[1] for line in out.splitlines() if line.startswith("epoch ")] == ["1", "2", "3"]
    assert re.search(r"best accuracy 0\.\d+ at epoch \d; report: runs/digits-\d{8}-\d{6}/report.md", out)
    assert "test" not in out
    (run_dir,) = (tmp_path / "runs").iterdir()
    config = yaml.safe_load((run_dir / "config.yaml").read_text())["config"]
    assert (config["lr"], config["ema_decay"]) == (0.001, None)
    assert config["model"] == {"kind": "mlp", "layers": 2, "width": 16, "dropout": 0.3}
    assert not (tmp_path / "home").exists(), "no service was started"


def test_an_objective_that_changes_the_working_folder_has_its_files_in_the_run_dir(capsys, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "loop.py").write_text(
        LOOP_OBJECTIVE.replace("for _ in", 'import os; os.chdir("other")\n        for _ in')
    )
    code, out, _ = call(capsys, "train", "loop.py", "--run-dir", "a")
    assert (code, out.splitlines()[-1]) == (0, "best score 1 at epoch 1; report: a/report.md")
    assert (tmp_path / "a" / "report.md").exists()


_CHANGEABLE = (
    "hpsearch: other users can change or replace '{}'; give a folder that only you can change with --run-dir\n"
)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_default_run_directory_of_another_user_is_rejected(capsys, open_folder: Path, monkeypatch) -> None:
    """Its owner could replace the files of the run by links."""
    monkeypatch.chdir(open_folder)
    (open_folder / "runs").mkdir(mode=0o777)
    os.chown(open_folder / "runs", 65534, -1)
    code, _, err = call(capsys, "train", "digits", *SMALL)
    assert (code, err) == (2, _CHANGEABLE.format(open_folder / "runs"))


@pytest.mark.parametrize("command", ["train", "lr-range"])
@pytest.mark.parametrize("mode", [0o777, 0o2775])
def test_a_folder_that_other_users_can_write_to_is_rejected(
    capsys, open_folder: Path, command: str, mode: int, monkeypatch
) -> None:
    """They could replace files by links while the command runs."""
    monkeypatch.chdir(open_folder)
    folder = open_folder / "open"
    folder.mkdir()
    os.chown(folder, -1, 65534 if os.geteuid() == 0 else -1)
    folder.chmod(mode)
    for given in ("open", "open/new"):
        code, _, err = call(capsys, command, "digits", "--run-dir", given)
        assert (code, err) == (2, _CHANGEABLE.format(folder))
    assert not list(folder.iterdir())
    open_folder.chmod(0o700)
    assert find_changeable_part(folder, as_folder=True) is None, "others cannot reach it"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to another user")
def test_a_default_run_directory_behind_a_link_of_another_user_is_rejected(
    capsys, open_folder: Path, monkeypatch
) -> None:
    """Its owner could let it lead to another folder while the command runs."""
    monkeypatch.chdir(open_folder)
    (open_folder / "mine").mkdir()
    (open_folder / "runs").symlink_to("mine")
    os.chown(open_folder / "runs", 65534, -1, follow_symlinks=False)
    code, _, err = call(capsys, "train", "digits", *SMALL)
    assert (code, err) == (2, _CHANGEABLE.format(open_folder / "runs"))
    assert not list((open_folder / "mine").iterdir())


def test_the_test_split_is_opened_once_and_only_on_request(capsys) -> None:
    code, out, _ = call(capsys, "train", "digits", *SMALL, "--test", "--run-dir", "a")
    assert code == 0
    assert len(re.findall(r"^test loss \S+  accuracy \S+  macro_f1 \S+$", out, re.MULTILINE)) == 1


@pytest.mark.soak
def test_digits_with_defaults_reaches_a_good_accuracy(capsys) -> None:
    code, out, _ = call(capsys, "train", "digits", "--run-dir", "a")
    assert code == 0
    assert float(re.search(r"best accuracy (\S+)", out)[1]) >= 0.985


@pytest.mark.slow
def test_a_run_resumes_in_its_folder(capsys) -> None:
    call(capsys, "train", "digits", *SMALL, "--run-dir", "a", "--keep", "1", "--snapshot-every", "2")
    assert {path.name for path in Path("a").glob("*.pt")} == {"best.pt", "last.pt", "epoch-0001.pt"}
    before = Path("a/metrics.jsonl").read_text()
    code, _, _ = call(capsys, "train", "digits", *SMALL, "--run-dir", "a")
    assert code == 0
    assert Path("a/metrics.jsonl").read_text() == before


def test_ctrl_c_prints_how_to_resume(zygote: Zygote, tmp_path: Path) -> None:
    run_dir = tmp_path / "a"
    process = zygote.command(["train", "digits", "--epochs", "500", "--run-dir", str(run_dir)], cwd=tmp_path)
    try:
        while not (run_dir / "metrics.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130
    epochs, last_line = said.splitlines()[:-1], said.splitlines()[-1]
    assert all(line.startswith("epoch ") for line in epochs), said
    assert last_line == f"hpsearch: training stopped; repeat the command with --run-dir {run_dir} to resume it"
    assert (run_dir / "last.pt").exists()


def test_processes_that_an_import_starts_leave_no_temporary_folder(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short path, as that of a socket has to be
        code = LOOP_OBJECTIVE.replace("class", "import multiprocessing\nmanager = multiprocessing.Manager()\n\nclass")
        (tmp_path / "loop.py").write_text(code)
        command = [sys.executable, "-m", "hpsearch", "train", "loop.py", "--run-dir", "a"]
        done = subprocess.run(
            command, env={**os.environ, "TMPDIR": folder}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert wait_until(lambda: not list(Path(folder).glob("pymp-*")), timeout=60), list(Path(folder).iterdir())


def test_a_divergence_is_one_line_and_exit_code_1(capsys) -> None:
    diverging = ["optimizer=sgd", "lr=1e30", "momentum=0", "clip_grad_norm=null", "warmup_fraction=0"]
    code, _, err = call(capsys, "train", "digits", *SMALL, *[word for pair in diverging for word in ("--set", pair)])
    assert code == 1
    assert re.fullmatch(r"hpsearch: (loss|gradient norm|val_loss) is (nan|inf) at epoch .*", err.splitlines()[-1])


def test_smoke_prints_and_stores_the_curve(capsys) -> None:
    code, out, _ = call(capsys, "smoke", "digits", "--run-dir", "a")
    assert code == 0
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss (\S+)$", out, re.MULTILINE)]
    assert losses[0] > 2
    assert losses[-1] < 0.01
    assert 10 < len(losses) < 50
    assert re.search(r"passed: the loss of 32 samples fell from \S+ to \S+ at lr", out)
    assert Path("a/smoke.json").exists()
    assert Path("a/smoke.png").exists()


BROKEN = """
from hpsearch.objectives.builtin.digits import Digits
from torch import nn

class Broken(Digits):
    def model(self, config, train):
        class Blind(nn.Linear):
            def forward(self, x):
                return super().forward(x.flatten(1) * 0)
        return Blind(64, 10)
"""


def test_smoke_leaves_no_empty_folder(capsys) -> None:
    write_template(Path("wine.py"))
    with Path("wine.py").open("a") as file:
        file.write(
            "\n\nclass Equal(Wine):\n    def data(self, seed):\n        x, y = load_wine(return_X_y=True)\n"
            "        return Splits.make(x, 0 * y, seed=seed)\n"
        )
    assert call(capsys, "smoke", "wine.py:Equal", "--run-dir", "empty")[0] == 2
    assert not Path("empty").exists()


def test_smoke_fails_for_a_model_that_cannot_learn(capsys) -> None:
    Path("broken.py").write_text(BROKEN)
    code, out, err = call(capsys, "smoke", "broken.py", "--steps", "50")
    assert code == 1
    assert out.startswith("step     0  loss 2.3")
    assert "step    49" in out.splitlines()[-1]
    assert re.fullmatch(r"hpsearch: smoke test failed: the loss of one batch is \S+ after 50 steps, .*\n", err)


def test_lr_range_suggests_a_rate_and_plots_the_curve(capsys) -> None:
    code, out, _ = call(capsys, "lr-range", "breast_cancer", "--run-dir", "a", "--steps", "100")
    assert code == 0
    assert re.search(r"suggested learning rate \S+ \(the loss falls fastest\)", out)
    assert Path("a/lr-range.png").exists()


def test_an_objective_is_shown_with_every_setting_and_its_search_space(capsys, monkeypatch) -> None:
    from hpsearch import TrainConfig

    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = call(capsys, "objective", "show", "digits", "--set", "lr=0.123")
    assert code == 0
    for name in TrainConfig().to_dict():
        row = next(line for line in out.splitlines() if re.match(rf"{name}[ .]", line))
        assert len(row.split()) > 3, f"{name} is not explained"
    assert re.search(r"^lr = 0\.123 +peak learning rate$", out, re.MULTILINE)
    assert re.search(r"^warmup_steps = null +warm-up in .* \(int or None\)$", out, re.MULTILINE)
    assert re.search(r"^model\.width = 32 +setting of the objective's model$", out, re.MULTILINE), "as --set takes it"
    assert re.search(r"^adamw_lr +0\.0001 to 0\.1 on a log scale$", out, re.MULTILINE)
    assert re.search(r"^optimizer +one of adamw, sgd$", out, re.MULTILINE)


@pytest.mark.parametrize("columns", [80, 60, 50])
def test_show_objective_fits_a_terminal_of_any_width(capsys, monkeypatch, columns: int) -> None:
    from hpsearch.objectives.training.config import FIELDS

    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = call(capsys, "objective", "show", "digits")
    assert max(map(len, out.splitlines())) <= columns
    words = " ".join(out.split())
    for name, field in FIELDS.items():
        assert f"{name}" in words, "no word is torn"
        assert name == "model" or str(field.description) in words, "nothing is cut"


OWN = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Annotated
from hpsearch import LoopObjective

@dataclass
class Config:
    lr: Annotated[float, "of both networks"]
    width: int = 8

class Own(LoopObjective):
    def suggest(self, trial): return Config(trial.suggest_float("lr", 0.1, 0.5), 2 ** trial.suggest_int("power", 1, 3))
    def run(self, trial): ...

class Plain(LoopObjective):
    def suggest(self, trial): return {"lr": trial.suggest_float("lr", 0.1, 0.5), "rounds": 3}
    def run(self, trial): ...
"""


def test_the_settings_of_a_custom_loop_are_described(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    Path("own.py").write_text(OWN)
    _, out, _ = call(capsys, "objective", "show", "own.py:Own")
    assert "lr = 0.3   of both networks; searched: 0.1 to 0.5\nwidth = 4\n" in out
    assert "search space\npower  1 to 3\n" in out
    _, out, _ = call(capsys, "objective", "show", "own.py:Plain")
    assert "lr = 0.3    searched: 0.1 to 0.5\nrounds = 3  the same in every trial\n" in out
    assert "search space" not in out


SEVERAL = """
from hpsearch.objectives.builtin.digits import Digits

class Several(Digits):
    directions = {"accuracy": "maximize", "latency_ms": "minimize"}
    constraints = {"model_mb": "<= 10", "shrunk": ">= 0"}
    def model_metrics(self, model, config):
        return {"shrunk": 0.25}

class Wrong(Digits):
    directions = {"accuracy": "maximize", "latncy_ms": "minimize"}

class Torn(Digits):
    metric = "loss"
    directions = {"accuracy": "maximize"}
"""


def test_several_metrics_are_shown_and_printed_at_the_end_of_a_run(capsys) -> None:
    Path("several.py").write_text(SEVERAL.rpartition("class Torn")[0])
    _, out, _ = call(capsys, "objective", "show", "several.py:Several")
    assert out.splitlines()[1:3] == [
        "directions: maximize accuracy, minimize latency_ms",
        "constraints: model_mb <= 10, shrunk >= 0",
    ]
    code, out, _ = call(capsys, "train", "several.py:Several", *SMALL, "--run-dir", "a")
    assert code == 0
    assert re.search(r"^latency_ms \S+  model_mb 0\.\d+  shrunk 0\.25$", out, re.MULTILINE)
    assert out.count("latency_ms") == 1
    assert "latency_ms" in Path("a/metrics.jsonl").read_text()
    code, _, err = call(capsys, "train", "several.py:Wrong", *SMALL)
    assert code == 2
    assert "did you mean 'latency_ms'?" in err


def test_conflicting_metric_and_directions_are_an_error_of_one_line(capsys) -> None:
    Path("several.py").write_text(SEVERAL)
    code, _, err = call(capsys, "objective", "show", "several.py:Several")
    assert code == 2
    assert "Torn.metric is 'loss', but the first entry of directions is 'accuracy'" in err
    assert err.count("\n") == 1


MISTAKES = [
    (["train", "digts"], ["'digts'", "digits"]),
    (["train", "digits", "--set", "lrr=1"], ["'lrr'", "'lr'"]),
    (["train", "digits", "--set", "lr"], ["--set", "KEY=VALUE"]),
    (["train", "digits", "--set", "lr=fast"], ["lr must be a number", "'fast'"]),
    (["train", "digits", "--set", "optimizer=adamm"], ["'adamm'", "'adam'"]),
    (["train", "digits", "--set", "model.widht=3"], ["model.widht", "'width'"]),
    (["train", "digits", "--set", "model.kind=transformer"], ["transformer"]),
    (["train", "digits", "--set", "gradient_accumulation_steps=99"], ["gradient_accumulation_steps 99", "at most 16"]),
    (["train", "digits", "--set", "warmup_steps=9999"], ["warmup_steps must be", "9999"]),
    (["train", "digits", "--epochs", "0"], ["--epochs", "0"]),
    (["train", "digits", "--device", "toaster"], ["'toaster'"]),
    (["train", "digits", "--keep", "0"], ["--keep", "0"]),
    (["train", "digits", "--keep", "1000000000"], ["--keep", "1000"]),
    (["train", "digits", "--epochs", "99999999999999"], ["--epochs", "1000000"]),
    (["smoke", "digits", "--steps", "3"], ["--steps", "3"]),
    (["lr-range", "digits", "--lowest", "5", "--highest", "1"], ["0 < lowest < highest", "5"]),
    (["objective", "show", "digts"], ["'digts'"]),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=lambda value: " ".join(value)[:60])
def test_a_mistake_is_an_error_of_one_line(capsys, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    code, _, err = call(capsys, *arguments)
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith("hpsearch: ")
    for word in words:
        assert word in err
    assert [path for path in tmp_path.rglob("*") if path.name != "runs"] == [], "nothing was trained"


def test_a_checkpoint_of_another_run_is_rejected(capsys) -> None:
    call(capsys, "train", "digits", *SMALL, "--run-dir", "a")
    code, _, err = call(capsys, "train", "digits", *SMALL, "--run-dir", "a", "--set", "lr=0.5")
    assert code == 2
    assert "another run: its lr is 0.01, not 0.5" in err


@pytest.mark.slow
def test_warnings_of_a_run_are_printed(capsys) -> None:
    code, _, err = call(capsys, "train", "digits", *SMALL, "--set", "batch_size=5000", "--run-dir", "a")
    assert (code, err) == (
        0,
        "hpsearch: batch_size 5000 exceeds the 1077 training samples; each step uses all of them\n",
    )
    for name in ("last.pt", "previous.pt"):
        Path("a", name).write_bytes(b"torn")
    code, out, err = call(capsys, "train", "digits", *SMALL, "--run-dir", "a")
    assert code == 0
    assert "epoch   1" in out
    lines = err.splitlines()
    assert "last.pt is truncated or changed" in lines[0]
    assert "no valid checkpoint in " in lines[-1]
    assert lines[-1].endswith("/a; the run starts from the beginning")
    Path("a", "last.pt").unlink()
    Path("a", "last.pt").mkdir()
    code, _, err = call(capsys, "train", "digits", *SMALL, "--run-dir", "a")
    assert (code, err.partition("a/last.pt ")[2]) == (
        2,
        "cannot be read (Is a directory); remove it, or use another folder\n",
    )


def test_a_run_dir_in_which_another_command_trains_is_rejected(capsys, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    code, _, error = call(capsys, "train", "digits", *SMALL, "--run-dir", str(folder))
    assert (code, error.count("\n")) == (2, 1)
    assert "another command trains in --run-dir" in error
    assert list(folder.iterdir()) == []
    os.close(descriptor)
    assert call(capsys, "train", "digits", *SMALL, "--run-dir", str(folder))[0] == 0
