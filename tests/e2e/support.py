"""The command line as a test calls it, and a finished search as a test looks at it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import mlflow
import optuna

from hpsearch.storage.embedded.stack import StackInfo
from tests.faults.harness import Command, Zygote


@dataclass(frozen=True)
class Cli:
    """The command line, on the embedded stack of the tests.

    Commands are forked from a process that has all libraries loaded: a `run` is spared 15 s of imports.
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
        """The study as a notebook opens it: plain Optuna on the URL."""
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
        """How the names of its models begin in MLflow, which takes no dots there."""
        return self.name.replace(".", "_")


EPOCHS = 4
TOP_MODELS = 2
