"""The import arrows: search -> objectives and search -> storage, and what each package may know of the world.

Read from the sources, so that imports inside functions and under TYPE_CHECKING count too.
"""

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("search", "objectives", "storage")
FORBIDDEN = {
    "objectives": {"search", "storage", "optuna", "optuna_dashboard", "mlflow", "sqlalchemy", "alembic", "psycopg2"},
    "storage": {"search", "objectives"},
    "search": set[str](),
}
# Where a model is written for MLflow, and there alone, storage may know torch.
KNOW_TORCH = {"storage/mlflow/exported_model.py", "storage/checkpoints/store.py"}
TORCH = {"torch", "torchmetrics"}


def imported(source: str, path: Path) -> Iterator[tuple[int, str]]:
    """The line and the absolute name of every module that a source imports, however deep the statement stands."""
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parents = list(path.with_suffix("").parts[: -node.level]) if node.level else []
            yield node.lineno, ".".join([*parents, *([node.module] if node.module else [])])
        elif isinstance(node, ast.Call) and _is_import_call(node.func) and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def _is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in {"__import__", "import_module"}


def violations(source: str, path: Path) -> list[str]:
    """What a source at ``path``, relative to the root, imports although its package may not."""
    forbidden = set(FORBIDDEN[path.parts[0]])
    if path.parts[0] == "storage" and path.as_posix() not in KNOW_TORCH:
        forbidden |= TORCH
    found = imported(source, path)
    return [f"{path}:{line} imports {name}" for line, name in found if name.split(".")[0] in forbidden]


def sources() -> list[Path]:
    return [path.relative_to(ROOT) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_the_arrows_point_one_way() -> None:
    paths = sources()
    assert {path.parts[0] for path in paths} == set(PACKAGES)
    assert [line for path in paths for line in violations((ROOT / path).read_text(), path)] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("objectives/a.py", "import optuna"),
        ("objectives/a.py", "def f():\n    from mlflow.client import MlflowClient"),
        ("objectives/training/a.py", "from ...storage import urls"),
        ("objectives/a.py", "import importlib\nimportlib.import_module('sqlalchemy.orm')"),
        ("storage/a.py", "if TYPE_CHECKING:\n    from objectives import Objective"),
        ("storage/a.py", "class A:\n    def f(self):\n        import search.spec.spec as s"),
        ("storage/a.py", "import torch.nn"),
    ],
)
def test_a_forbidden_import_is_found(path: str, source: str) -> None:
    assert len(violations(source, Path(path))) == 1


def test_allowed_imports_are_left_alone() -> None:
    assert (
        violations("from .training import loop\nimport torch\nfrom objectives import x", Path("objectives/a.py")) == []
    )
    assert violations("import storage, objectives, optuna", Path("search/a.py")) == []


def test_every_import_is_a_declared_dependency() -> None:
    """An import that only happens to be there, as a dependency of a dependency, breaks with its next release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {_normal(re.split(r"[^\w.-]", line)[0]) for line in project["dependencies"]}
    providers = importlib.metadata.packages_distributions()
    missing = set()
    for path in sources():
        for _, name in imported((ROOT / path).read_text(), path):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top in PACKAGES:
                continue
            if not declared & {_normal(distribution) for distribution in providers.get(top, [])}:
                missing.add(f"{path} imports {top}")
    assert sorted(missing) == []


def test_constraints_pin_every_requirement() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    wanted = {_normal(re.split(r"[^\w.-]", line)[0]) for line in lines}
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert wanted <= {_normal(pin.split("==")[0]) for pin in pins}
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    assert "torch==2.13.0" in pins


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
