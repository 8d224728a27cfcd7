"""The command line as a test calls it, and a finished search as a test looks at it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import mlflow
import optuna

from storage.embedded.stack import StackInfo


@dataclass(frozen=True)
class Cli:
    """The command line, on the embedded stack of the tests."""

    stack: StackInfo
    cwd: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "HPSEARCH_HOME": str(self.stack.home), "COLUMNS": "200"}

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "search.cli", *arguments],
            env={**self.environment, **environment},
            cwd=self.cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __call__(self, *arguments: str, code: int = 0, input: str = "", **environment: str) -> str:  # noqa: A002 as subprocess names it
        process = self.start(*arguments, **environment)
        output, _ = process.communicate(input)
        assert process.returncode == code, output
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


EPOCHS = 6
