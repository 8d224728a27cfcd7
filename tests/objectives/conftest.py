"""A small real objective, and a fixture to change parts of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hpsearch import Objective
from hpsearch.objectives.training.reports import run_dir
from tests.objectives.training.support import Wine


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at none: drawing them takes longer than such short runs take otherwise."""
    for name in ("plot_curves", "plot_gradient_norms"):
        monkeypatch.setattr(run_dir, name, lambda *_args, **_kwargs: None)


@pytest.fixture
def wine() -> Objective:
    return Wine()


@pytest.fixture
def objective_with() -> Callable[..., Objective]:
    """Makes a Wine objective with some of its attributes replaced."""

    def make(**replaced: Any) -> Objective:
        return type("Changed", (Wine,), replaced)()

    return make
