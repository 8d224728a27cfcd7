"""The public names of the package, and the cost of its import."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hpsearch
from tests.search.api.support import run_program

LARGE = ("torch", "mlflow", "optuna", "pandas", "numpy", "sqlalchemy", "plotly", "sklearn")


def test_import_hpsearch_loads_no_large_package(tmp_path: Path) -> None:
    source = "import sys, json\nfrom hpsearch import Study, SearchError, StorageError, ObjectiveError\n"
    said = run_program(f"{source}print(json.dumps([name for name in {LARGE} if name in sys.modules]))", cwd=tmp_path)
    assert json.loads(said) == []


def test_the_package_exports_its_public_names() -> None:
    assert set(hpsearch.__all__) <= set(dir(hpsearch))
    found = {name: getattr(hpsearch, name) for name in hpsearch.__all__}
    assert {name: getattr(value, "__name__", name) for name, value in found.items()} == {name: name for name in found}
    assert not hasattr(hpsearch, "Stduy")


def test_a_misspelt_name_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ImportError, match="did you mean 'Objective'"):
        from hpsearch import Objectiv  # type: ignore[attr-defined]  # noqa: F401 the mistake
    with pytest.raises(AttributeError, match="did you mean 'Study'"):
        hpsearch.Stduy  # type: ignore[attr-defined]  # noqa: B018 the mistake
