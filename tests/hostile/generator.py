"""A generator of hostile command lines: odd values, environment variables and homes, each from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import typer

from hpsearch.search.cli import app

NUMBERS = [
    "-1",
    "0",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1e-400",
    "1.5",
    "-0",
    "1_0",
    "0x10",
    "\u0661",
    " 1",
    "True",
    "1,5",
]
TEXTS = [
    *(
        "",
        " ",
        "\n",
        "\x1b[31m",
        "a" * 5000,
        "../..",
        "/",
        "/dev/null",
        "/dev/null/x",
        "~nosuch/x",
        "%20",
        "'",
        '"',
        "é",
    ),
    *(
        "\udcff",
        "null",
        "{}",
        "[]",
        "[" * 500,
        "=",
        "=1",
        "lr",
        "lr=",
        "a=b=c",
        ":",
        "a:b",
        "a.b:c",
        "s3://",
        "file://",
    ),
    *(
        "http://[",
        "http://127.0.0.1:1",
        "postgresql://",
        "sqlite:///x",
        "$HOME",
        "--",
        "--help",
        "-h",
        "-",
        "digits.py",
    ),
    *("accuracy", "loss", "maximize", "digits", "tpe", "{a: [1]}", "latency_ms=<= 1", "cuda:99", "meta", "2026-01-01"),
]
HUGE = "99999999999999999999"
VARIABLES = {
    "COLUMNS": NUMBERS,
    "LANG": ["C", "nosuch", "\udcff"],
    "TZ": ["Mars/Phobos", "", ":"],
    "TMPDIR": ["/dev/null", "/nosuch"],
    "PGHOST": ["nosuch.invalid"],
    "PGPORT": ["x", "-1"],
    "PGSERVICE": ["nosuch"],
    "PGOPTIONS": ["-c nosuch=3"],
    "PGSSLMODE": ["nosuch"],
    "HPSEARCH_TRACKING_URI": ["file:///x", "http://[", "http://127.0.0.1:1"],
    "HPSEARCH_CHECKPOINT_URL": ["foo://x", "/dev/null/x", "file://relative", " "],
    "HPSEARCH_LEASE": NUMBERS,
    "HPSEARCH_GRACE": NUMBERS,
    "HPSEARCH_DEVICES": NUMBERS,
    "MLFLOW_TRACKING_URI": ["nosuch://x"],
    "OMP_NUM_THREADS": ["x"],
}
# Commands that serve until a signal, or start the embedded services.
EXCLUDED = {"serve", "up", "backup", "restore"}
TRAINING = {"train", "smoke", "lr-range"}
NEW_STUDY = "new"  # name of the studies that `run` creates


@dataclass(frozen=True)
class Case:
    """A command line with its environment variables and home."""

    arguments: list[str]
    environment: dict[str, str]
    home: str


def list_commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the name and the typer command of all commands."""
    command = typer.main.get_command(app) if command is None else command
    if not hasattr(command, "commands"):
        yield " ".join(path), command
    for name, child in getattr(command, "commands", {}).items():
        yield from list_commands(child, (*path, name))


class Generator:
    """Generator of hostile command lines.

    Args:
        seed: seed; the same seed and folder give the same cases.
        folder: existing folder for homes.
        objective: reference of an objective whose trials need no time.
        study: name of an existing study.
    """

    def __init__(self, seed: int, folder: Path, *, objective: str, study: str) -> None:
        self._random = Random(seed)
        self._objective, self._study = objective, study
        (folder / "file").touch()
        names = ["plain", "a%20b #?'\"$x;&", "ünï\udcff", "n" * 200, "file", "file/x", "n" * 300]
        self._homes = [*(str(folder / name) for name in names), "/dev/null", "/proc/x", "~nosuch/x", "\n"]
        self._commands = sorted((name, command) for name, command in list_commands() if name.split()[0] not in EXCLUDED)

    def make_case(self) -> Case:
        """Return the next case."""
        random = self._random
        name, command = random.choice(self._commands)
        arguments = name.split()
        options = [param for param in command.params if param.param_type_name == "option"]
        for param in command.params:
            if param.param_type_name == "argument" and (param.required or random.random() < 0.8):
                arguments.append(self._choose_argument(param.name))
        if name == "worker":
            arguments += ["--study", random.choice(["nosuch", *TEXTS])]  # an existing study would be searched
        for param in random.sample(options, min(len(options), random.choice([0, 1, 1, 2, 3]))):
            arguments += [random.choice(param.opts + list(param.secondary_opts))]
            if not param.is_flag and param.name != "study" and random.random() < 0.98:
                arguments.append(self._choose_value(name))
        if name == "run":
            arguments += ["--workers", "0", "--name", NEW_STUDY]
        elif name == "top":
            arguments.append("--once")
        variables = random.sample(sorted(VARIABLES), random.choice([0, 0, 1, 2]))
        environment = {variable: random.choice(VARIABLES[variable]) for variable in variables}
        if name == "worker":  # ten devices would be processes of their own
            arguments = ["0" if argument == "1_0" else argument for argument in arguments]
            environment = {key: "0" if value == "1_0" else value for key, value in environment.items()}
        return Case(arguments, environment, random.choice(self._homes) if random.random() < 0.3 else self._homes[0])

    def _choose_argument(self, name: str) -> str:
        known = self._objective if name == "objective" else self._study
        return known if self._random.random() < 0.7 else self._random.choice([*TEXTS, *NUMBERS])

    def _choose_value(self, command: str) -> str:
        values = self._random.choice([NUMBERS, TEXTS])
        is_huge = command not in TRAINING and self._random.random() < 0.05
        return HUGE if is_huge else self._random.choice(values)
