"""Signs of leakage and invalid bounds are found before the study exists."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from hpsearch.objectives.template import write_template
from hpsearch.search.cli import run_command
from hpsearch.storage.attributes import BOUNDS
from hpsearch.storage.study_storage.storage import open_storage

DUPLICATE = """

class Leaking(Wine):
    def data(self, seed):
        splits = super().data(seed)
        some = splits.train.take(torch.arange(3))
        val = Dataset(torch.cat([splits.val.x, some.x]), torch.cat([splits.val.y, some.y]))
        return Splits(splits.train, {val}, {test})
"""

COUNTED = """
class Counted(Wine):
    def data(self, seed):
        with open("loads", "a") as file:
            file.write(".")
        return super().data(seed)

Wine = Counted
"""


@pytest.fixture(autouse=True, scope="module")
def _load_libraries() -> None:
    """Import slow libraries of the checks, which each forked process would import otherwise."""
    for name in ("sklearn.datasets", "sklearn.model_selection", "torch._inductor", "torchmetrics"):
        importlib.import_module(name)


@pytest.fixture
def leaking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPSEARCH_STORAGE_URL", database_url)
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path / "home"))
    path = tmp_path / "wine.py"
    write_template(path)
    return path


def run(path: Path, val: str, test: str, more: str = "") -> int:
    imports = "import torch\nfrom hpsearch import Dataset\n"
    path.write_text(path.read_text() + "\n" + imports + DUPLICATE.format(val=val, test=test) + more)
    return run_command(
        ["run", f"{path}:Leaking", "--name", "s", "--workers", "0", "--tracking-uri", "http://127.0.0.1:1"]
    )


def test_a_split_that_is_used_twice_is_rejected_before_the_study_exists(
    leaking: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = "Dataset(splits.val.x, splits.val.y)"
    assert run(leaking, same, same) == 2
    assert "all 36 test samples are also validation samples" in capsys.readouterr().err
    assert run_command(["train", f"{leaking}:Leaking"]) == 2
    assert "all 36 test samples are also validation samples" in capsys.readouterr().err
    assert not Path("runs").exists()
    assert run_command(["show", "s"]) == 2
    assert "no study 's'" in capsys.readouterr().err


def test_shared_samples_are_shown(leaking: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(leaking, "val", "splits.test")
    capsys.readouterr()
    assert run_command(["show", "s"]) == 0
    assert "warning: 3 of 39 validation inputs are also train inputs: split by groups" in capsys.readouterr().out


def test_ignored_leaks_are_not_shown(leaking: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(leaking, "val", "splits.test", '    ignored_leaks = {"shared_samples"}\n')
    capsys.readouterr()
    assert run_command(["show", "s"]) == 0
    assert "warning" not in capsys.readouterr().out


def test_equal_splits_can_be_allowed(leaking: Path) -> None:
    same = "Dataset(splits.val.x, splits.val.y)"
    assert run(leaking, same, same, '    ignored_leaks = {"shared_samples"}\n') == 0


def test_unknown_kinds_of_leaks_are_rejected(leaking: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(leaking, "val", "splits.test", '    ignored_leaks = {"x"}\n') == 2
    assert (
        "Leaking.ignored_leaks has 'x'; choose from shared_samples, near_duplicates, target_in_features"
        in capsys.readouterr().err
    )


def test_the_checks_of_a_command_and_its_training_load_the_data_once(leaking: Path) -> None:
    leaking.write_text(f"{leaking.read_text()}\n{COUNTED}")
    assert run(leaking, "val", "splits.test") == 0
    assert Path("loads").read_text() == ".", "preflight check, check of the data and smoke test"
    Path("loads").unlink()
    assert run_command(["train", f"{leaking}:Leaking", "--epochs", "1", "--test"]) == 0
    assert Path("loads").read_text() == "."


ENDING = """
import faulthandler
import os
import signal

class Ending(Wine):
    calls = 0
    def model(self, config, train):
        self.calls += 1
        if self.calls == {call}:
            {end}
        return super().model(config, train)

Wine = Ending
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the checks run in a forked process on Linux only")
@pytest.mark.parametrize(
    ("end", "fault", "remedy"),
    [
        (
            "faulthandler.disable(); os.kill(os.getpid(), signal.SIGSEGV)",
            "(SIGSEGV)",
            "python -X faulthandler -m hpsearch smoke",
        ),
        ("os._exit(0)", "(exit code 0)", "remove the call that ends the process"),
        ("raise KeyboardInterrupt", "raises KeyboardInterrupt", "remove it"),
        ("raise MemoryError", "needs too much memory", "smaller bounds in suggest"),
    ],
    ids=["segfault", "exit", "exception", "memory"],
)
def test_a_model_that_ends_the_process_is_rejected_before_the_study_exists(
    leaking: Path, capsys: pytest.CaptureFixture[str], end: str, fault: str, remedy: str
) -> None:
    leaking.write_text(f"{leaking.read_text()}\n{ENDING.format(call=1, end=end)}")
    assert run(leaking, "val", "splits.test") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (fault in line, remedy in line) == (True, True), line
    run_command(["show", "s"])
    assert "no study 's'" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="the checks run in a forked process on Linux only")
@pytest.mark.parametrize(
    "end",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        "raise MemoryError",
        "raise ValueError",
        "torch.Tensor.backward = None",  # an error outside of the objective's code, as of an optimizer
    ],
)
def test_a_smoke_test_that_raises_an_error_or_ends_the_process_does_not_end_the_search(
    leaking: Path, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    """The random configuration may need more memory than others, or the code may fail at its second call only."""
    leaking.write_text(f"{leaking.read_text()}\n{ENDING.format(call=2, end=end)}")
    assert run(leaking, "val", "splits.test") == 0
    assert "smoke test of a random configuration failed: " in " ".join(capsys.readouterr().out.split())


FAULTY = """
class Faulty(Wine):
    def model(self, config, train):
        net = super().model(config, train)
        {fault}
        return net

Wine = Faulty
"""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "next(net.parameters()).register_hook(lambda _: [][0])",
            r"Leaking in a training step: wine.py:\d+: IndexError: list index out of range",
        ),
        (
            "net[-1].register_forward_hook(lambda *_: _[2].detach())",
            "the loss depends on no trainable parameter: .*",
        ),
        (
            "net._register_state_dict_hook(lambda *_: 5)",
            r"Leaking.model: state_dict\(\) must return a dictionary, not int",
        ),
        (
            "net.register_buffer('cache', None); net.register_forward_hook(lambda m, _, y: setattr(m, 'cache', y))",
            r"the model cannot load its state_dict\(\) after a training step: .*mismatch for cache.*",
        ),
        (
            "type(self).sampler = lambda *_: [0, 10**9]",
            r"sampler\(\) returned sample 1000000000, but the training split has 106 samples",
        ),
    ],
    ids=["hook", "detached", "state", "buffer", "sampler"],
)
def test_a_model_that_cannot_be_trained_is_rejected_before_the_study_exists(
    leaking: Path, capsys: pytest.CaptureFixture[str], fault: str, message: str
) -> None:
    leaking.write_text(f"{leaking.read_text()}\n{FAULTY.format(fault=fault)}")
    assert run(leaking, "val", "splits.test") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"hpsearch: {message}", line), line
    run_command(["show", "s"])
    assert "no study 's'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "smoke", "lr-range"])
def test_an_error_of_the_objective_in_training_is_one_line(
    leaking: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    fault = "next(net.parameters()).register_hook(lambda _: [][0])"
    leaking.write_text(leaking.read_text() + FAULTY.format(fault=fault))
    assert run_command([command, f"{leaking}:Wine"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"hpsearch: Faulty in .*: wine.py:\d+: IndexError: list index out of range", line), line


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ("(0, 1, 2)", r"Leaking.bounds is (0, 1, 2); give two numbers or None, such as (0, 1)"),
        ("('a', 1)", "Leaking.bounds is ('a', 1); give two numbers or None"),
        ("(1, 0)", "Leaking.bounds is (1, 0), but the first bound must be below the second"),
    ],
)
def test_invalid_bounds_are_rejected(
    leaking: Path, capsys: pytest.CaptureFixture[str], bounds: str, message: str
) -> None:
    assert run(leaking, "val", "splits.test", f"    bounds = {bounds}\n") == 2
    assert message in capsys.readouterr().err


def test_declared_bounds_are_stored_with_the_study(leaking: Path, database_url: str) -> None:
    run(leaking, "val", "splits.test", "    bounds = (0, None)\n")
    storage = open_storage(database_url, application_name="test")
    assert storage.get_study_user_attrs(1)[BOUNDS] == [0, None]
