from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage.stack import StackInfo
from tests.faults.harness import Arena, Zygote, wait_for

_numbers = itertools.count()


@pytest.fixture(scope="session")
def zygote(_no_settings_of_the_user: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    made = Zygote(tmp_path_factory.mktemp("zygote") / "log")
    yield made
    made.close()


@pytest.fixture
def arena(zygote: Zygote, database_url: str, stack: StackInfo, open_folder: Path) -> Iterator[Arena]:
    """A study to be, on a database of its own and the MLflow of all tests."""
    made = Arena(zygote, f"faults-{next(_numbers)}", open_folder, database_url, stack.tracking_uri)
    yield made
    made.close()


@pytest.fixture(scope="session")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[list[float]]]:
    """The values of the first trials of any study, trained alone."""
    folder = tmp_path_factory.mktemp("undisturbed")
    known: list[list[float]] = []

    def values(n_trials: int) -> list[list[float]]:
        if len(known) < n_trials:
            path = folder / f"{n_trials}.json"
            start = ["undisturbed", str(n_trials), str(path)]
            zygote.ask(start=start, environment={}, log=str(folder / "log"))
            wait_for(lambda: zygote.ask(reap=True), "the undisturbed runs")
            known[:] = [[float.fromhex(v) for v in line] for line in json.loads(path.read_text())]
        return known[:n_trials]

    return values
