from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from hpsearch.storage.embedded.stack import StackInfo
from tests.faults.breakable import Breakable
from tests.faults.harness import Arena, Zygote

_numbers = itertools.count()


@pytest.fixture
def arena(zygote: Zygote, database_url: str, stack: StackInfo, open_folder: Path) -> Iterator[Arena]:
    """A study, not created yet, on its own database and the shared MLflow server."""
    made = Arena(zygote, f"faults-{os.getpid()}-{next(_numbers)}", open_folder, database_url, stack.tracking_uri)
    yield made
    made.close()


@pytest.fixture(scope="session")
def breakable(guarded_homes: Callable[[], AbstractContextManager[Path]]) -> Iterator[Breakable]:
    """A Postgres that no other test uses."""
    with guarded_homes() as home:
        yield Breakable.started(home)


@pytest.fixture
def broken_arena(zygote: Zygote, breakable: Breakable, stack: StackInfo, open_folder: Path) -> Iterator[Arena]:
    """A study, not created yet, on a Postgres that the test can break."""
    made = Arena(zygote, f"faults-{os.getpid()}-{next(_numbers)}", open_folder, breakable.url, stack.tracking_uri)
    yield made
    made.close()


@pytest.fixture(scope="session")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[list[float]]]:
    """Return a function for the values of the first N trials of any study, trained without services and faults."""
    folder = tmp_path_factory.mktemp("undisturbed")
    known: list[list[float]] = []

    def values(n_trials: int) -> list[list[float]]:
        if len(known) < n_trials:
            known[:] = zygote.undisturbed(n_trials, folder / f"{n_trials}.json")
        return known[:n_trials]

    return values
