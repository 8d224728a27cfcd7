"""Run commands in tests, and read a finished search."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import mlflow
import optuna

from hpsearch.storage.embedded.stack import StackInfo
from tests.faults.harness import Command, Zygote
from tests.waiting import wait_for


@dataclass(frozen=True)
class Cli:
    """The command line, on the embedded stack of the tests.

    Commands are forked from a process with all libraries loaded, which saves 15 s of imports per `run`.
    """

    stack: StackInfo
    cwd: Path
    zygote: Zygote

    @property
    def environment(self) -> dict[str, str]:
        return {
            "HPSEARCH_HOME": str(self.stack.home),
            "COLUMNS": "1000",
        }  # however many studies there are, and wherever this lies

    def start(self, *arguments: str, input: str = "", log: Path | None = None, **environment: str) -> Command:  # noqa: A002 as subprocess names it
        folder = Path(tempfile.mkdtemp(dir=self.cwd))
        (folder / "input").write_text(input)
        log = log or folder / "output"
        pid = self.zygote.start(
            list(arguments),
            {**self.environment, **environment},
            log,
            puppet=False,
            cwd=self.cwd,
            input=folder / "input",
        )
        return Command(self.zygote, pid, log)

    def __call__(self, *arguments: str, code: int = 0, input: str = "", **environment: str) -> str:  # noqa: A002 as subprocess names it
        command = self.start(*arguments, input=input, **environment)
        output, _ = command.communicate()
        assert command.returncode == code, output
        return output

    def study(self, name: str) -> optuna.Study:
        """Open the study with plain Optuna, as in a notebook."""
        return optuna.load_study(study_name=name, storage=self.stack.storage_url)


@dataclass(frozen=True)
class Search:
    """A finished search."""

    name: str
    output: str
    study: optuna.Study
    client: mlflow.MlflowClient
    parent: str  # run id

    @property
    def model_name(self) -> str:
        """Return the prefix of its model names in MLflow, which rejects dots there."""
        return self.name.replace(".", "_")


EPOCHS = 4
TOP_MODELS = 2

GATED = str(Path(__file__).with_name("gated.py"))
BROKEN = str(Path(__file__).with_name("broken.py"))
CHEAP = str(Path(__file__).with_name("cheap.py"))


def reached(gate: Path) -> list[int]:
    return [int(path.name.removeprefix("reached-")) for path in gate.glob("reached-*")]


def values(study: optuna.Study) -> list[dict[int, float]]:
    return [trial.intermediate_values for trial in study.trials]


# With these options the worker does not affect a trial's results. These tests need no models.
PLAIN = ("--sampler", "random", "--pruner", "none", "--models", "none")


def start(cli: Cli, name: str, gate: Path, *, log: Path | None = None) -> Command:
    process = cli.start("run", GATED, "--name", name, "--workers", "1", *PLAIN, log=log, GATE=str(gate))
    wait_for(lambda: reached(gate) or process.poll() is not None, "the worker to arrive at the gate")
    assert process.poll() is None
    return process
