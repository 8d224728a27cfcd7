"""The notebook script of the tutorial: a search that is stopped and extended, with finalists and a promotion."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import mlflow
import pytest

from docs.packages import ROOT
from hpsearch import Study, delete_study
from hpsearch.storage.embedded.stack import StackInfo
from tests.faults.harness import Zygote
from tests.search.api.support import run_forked

SCRIPT = ROOT / "docs" / "notebook.py"

pytestmark = [pytest.mark.timeout(900)]


def test_the_notebook_script_is_short_and_imports_only_study() -> None:
    lines = [line for line in SCRIPT.read_text().splitlines()[1:] if line.strip()]
    imports = [
        node for node in ast.walk(ast.parse(SCRIPT.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert len(lines) <= 15
    assert [ast.unparse(node) for node in imports] == ["from hpsearch import Study"]


def test_the_notebook_script_calls_existing_methods() -> None:
    """The names and arguments of its calls are valid. The examples run each method on the same objective."""
    called = []
    for node in ast.walk(ast.parse(SCRIPT.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = ast.unparse(node.func.value), node.func.attr
            first = () if owner == "Study" else (None,)  # create is a class method
            arguments = {str(keyword.arg): keyword.value for keyword in node.keywords}
            inspect.signature(getattr(Study, name)).bind(*first, *node.args, **arguments)
            called.append(f"{owner}.{name}")
    assert {"Study.create", "study.run", "study.train_finalists", "study.promote"} <= set(called)


@pytest.mark.e2e
@pytest.mark.soak  # test_examples.py runs each method, and checks that workers do not run the program again
def test_the_notebook_script_has_the_results_of_the_tutorial(folder: Path, stack: StackInfo, zygote: Zygote) -> None:
    said = run_forked(SCRIPT.read_text(), cwd=folder, stack=stack, zygote=zygote)
    study = Study.open("wine-notebook", home=str(stack.home))
    try:
        assert study.summary().finished == 4
        assert "(new): 3 trials" in said, "the workers did not run the script again"
        assert said.count("overfitting one batch") == 2
        winner = study.train_finalists(workers=0).winner
        client = mlflow.MlflowClient(stack.tracking_uri)
        version = client.get_model_version_by_alias("wine-notebook", "champion")
        assert client.get_run(version.run_id).data.tags["hpsearch.trial"] == str(winner)
        assert "winner: trial" in study._repr_html_()
        assert "test set: accuracy" in study._repr_html_()
    finally:
        delete_study("wine-notebook", home=str(stack.home))
