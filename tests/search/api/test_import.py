"""What importing the API costs, and what it has."""

from __future__ import annotations

import json
from pathlib import Path

import search
from tests.search.api.support import run_program

LARGE = ("torch", "mlflow", "optuna", "pandas", "numpy", "sqlalchemy", "plotly", "sklearn")


def test_the_import_loads_nothing_large(tmp_path: Path) -> None:
    source = "import sys, json\nfrom search import Study, SearchError, StorageError, ObjectiveError\n"
    said = run_program(f"{source}print(json.dumps([name for name in {LARGE} if name in sys.modules]))", cwd=tmp_path)
    assert json.loads(said) == []


def test_the_package_lists_what_it_has() -> None:
    assert set(search.__all__) <= set(dir(search))
    assert {name: getattr(search, name).__name__ for name in search.__all__} == {name: name for name in search.__all__}
    assert not hasattr(search, "Stduy")
