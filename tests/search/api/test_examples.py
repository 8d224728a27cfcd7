"""Every method's example, run in the order in which they stand, against one small study."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from search import SearchError, Study
from storage.embedded.stack import StackInfo

PROPERTIES_OF_A_PLACE = {"stored", "running", "dashboard_url", "mlflow_url"}


def documented() -> Iterator[tuple[str, str]]:
    """The name and the docstring of each public method and property, as they stand in the class."""
    for name, member in vars(Study).items():
        if not name.startswith("_"):
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            yield name, inspect.getdoc(function) or ""


def example(doc: str) -> str:
    return textwrap.dedent(doc.partition("\nExample:\n")[2])


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_every_example_runs(folder: Path, stack: StackInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HPSEARCH_HOME", str(stack.home))
    names: dict[str, object] = {"Study": Study, "SearchError": SearchError}
    # In another thread than the main one, as a server or a user interface runs a study: signals are not for it to set.
    with ThreadPoolExecutor(1) as thread:
        for name, doc in documented():
            thread.submit(exec, compile(example(doc), f"example of {name}", "exec"), names).result()
    assert "example" not in [row.name for row in Study.list()]


def test_every_method_has_an_example() -> None:
    lacking = {name for name, doc in documented() if not example(doc)}
    assert lacking == PROPERTIES_OF_A_PLACE
