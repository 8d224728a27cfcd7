"""The examples of all methods, run in their order on one small study."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpsearch import Study, delete_study, list_studies
from hpsearch.storage.embedded.stack import StackInfo
from tests.faults.harness import Zygote
from tests.search.api.support import run_forked


def documented() -> Iterator[tuple[str, str]]:
    """Return name and docstring of each public method, property and function, in the order of the module."""
    for name, member in [*vars(Study).items(), ("list_studies", list_studies), ("delete_study", delete_study)]:
        if not name.startswith("_"):
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            yield name, inspect.getdoc(function) or ""


def example(doc: str) -> str:
    return textwrap.dedent(doc.partition("\nExample:\n")[2])


# In another thread than the main one, as in a server or a user interface, where no signal handlers can be set.
PROGRAM = """
from concurrent.futures import ThreadPoolExecutor
from hpsearch import SearchError, Study, delete_study, list_studies

print("from the first line")
names = dict(globals())
with ThreadPoolExecutor(1) as thread:
    for name, example in {examples!r}:
        if name == "delete_study":
            print(names["study"]._repr_html_())
        thread.submit(exec, compile(example, f"example of {{name}}", "exec"), names).result()
print("left:", [row.name for row in list_studies()])
"""


@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.soak
def test_every_example_runs(folder: Path, stack: StackInfo, zygote: Zygote) -> None:
    examples = [(name, example(doc)) for name, doc in documented()]
    said = run_forked(PROGRAM.format(examples=examples), cwd=folder, stack=stack, zygote=zygote)
    assert said.count("from the first line") == 1, "the workers ran the program again"
    assert "winner: trial" in said
    assert "test set: accuracy" in said
    assert "example" not in said.rpartition("left:")[2]


def test_every_method_has_an_example() -> None:
    assert [name for name, doc in documented() if not example(doc)] == []
    assert len([name for name in dir(Study) if not name.startswith("_")]) <= 26
