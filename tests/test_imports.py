"""The import rules: no cycles between packages, and each folder imports only allowed libraries.

The tests read the sources, so that imports inside functions and under TYPE_CHECKING count too.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from docs.packages import FOLDERS, PACKAGES, ROOT, find_module_imports, find_package, list_imports, list_modules
from hpsearch.kill_points import KILL_POINTS

FORBIDDEN = {
    "objectives": {"search", "storage", "optuna", "optuna_dashboard", "mlflow", "sqlalchemy", "alembic", "psycopg2"},
    "storage": {"search", "objectives"},
    "search": set[str](),
}
# Only the code that writes a model for MLflow may import torch in `storage`.
KNOW_TORCH = {"storage/mlflow/model_export.py"}
TORCH = {"torch", "torchmetrics"}
# Only code for the machine with the services may import packages of the extra `server`.
ON_SERVERS = {"storage/dashboard.py", "storage/metrics.py", "storage/mlflow/server.py", "storage/web/server.py"}


def violations(source: str, path: Path) -> list[str]:
    """Return the forbidden imports of a source at ``path``, relative to the root."""
    forbidden = set(FORBIDDEN[path.parts[0]])
    if path.parts[0] == "storage" and path.as_posix() not in KNOW_TORCH:
        forbidden |= TORCH
    found = list_imports(source, path)
    return [f"{path}:{line} imports {name}" for line, name in found if name.split(".")[0] in forbidden]


def sources() -> list[Path]:
    return [path.relative_to(ROOT) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def test_packages_import_only_allowed_libraries() -> None:
    paths = sources()
    assert {path.parts[0] for path in paths} == set(FOLDERS)
    assert [line for path in paths for line in violations((ROOT / path).read_text(), path)] == []


def test_every_module_belongs_to_a_package() -> None:
    assert [module for module in list_modules() if find_package(module) is None] == []
    assert [name for name in PACKAGES if name not in list_modules()] == []


def test_imports_between_packages_have_one_direction() -> None:
    order = {name: place for place, name in enumerate(PACKAGES)}
    upward = [
        f"{module} imports {target}"
        for module, targets in find_module_imports().items()
        for target in targets
        if order[find_package(module) or ""] < order[find_package(target) or ""]
    ]
    assert upward == []


def test_files_have_no_import_cycles() -> None:
    """Imports inside functions and for type checkers count: a reader of a file needs the files that it names."""
    left = {module: set(targets) for module, targets in find_module_imports().items()}
    while free := [module for module, targets in left.items() if not targets & left.keys()]:
        for module in free:
            del left[module]
    assert sorted(left) == []


def test_imports_create_no_folder_that_other_users_can_create_first(tmp_path: Path) -> None:
    """Torch's compiler creates one in the temporary folder, and executes the code in it."""
    programs = {"search.fleet.preload", "storage.database.migrations.env"}
    names = [name for name in list_modules() if name not in programs and ".versions." not in name]
    program = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(f'hpsearch.{name}')"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "HPSEARCH_HOME": str(tmp_path / "home")}
    subprocess.run([sys.executable, "-c", program, *names], env=environment, check=True)
    assert list(tmp_path.iterdir()) == []


def test_no_small_module_has_only_one_importer() -> None:
    """A few lines that one module uses belong in that module."""
    importers = Counter(target for targets in find_module_imports().values() for target in targets)
    small = {name for name, path in list_modules().items() if len(path.read_text().splitlines()) < 40}
    fragments = {name for name in small if importers[name] == 1 and list_modules()[name].name != "__init__.py"}
    assert sorted(fragments) == []


def test_every_kill_point_is_one_step_and_tested() -> None:
    marked = [name for path in sources() for name in re.findall(r'@kill_point\("(.+)"\)', (ROOT / path).read_text())]
    assert sorted(set(marked)) == sorted(KILL_POINTS)
    assert [name for name in marked if marked.count(name) > 1] == ["train epoch"] * 2  # one fold, and all folds
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "faults").rglob("*.py"))
    assert [name for name in KILL_POINTS if f'"{name}"' not in tests] == []


def test_no_test_module_imports_another() -> None:
    """Shared helpers of tests are in `tests/factories.py` and in the module `support` of a folder."""
    found = [
        f"{path}:{line} imports {name}"
        for path in sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py"))
        for line, name in list_imports((ROOT / path).read_text(), path)
        if re.search(r"^tests\..*\btest_", name)
    ]
    assert found == []


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
def test_a_forbidden_import_is_detected(path: str, source: str) -> None:
    assert len(violations(source, Path(path))) == 1


def test_allowed_imports_are_accepted() -> None:
    assert (
        violations("from .training import loop\nimport torch\nfrom objectives import x", Path("objectives/a.py")) == []
    )
    assert violations("import storage, objectives, optuna", Path("search/a.py")) == []


# Of src/hpsearch.
MODULES = (
    "standard_streams",
    "causes",
    "changeable_paths",
    "cuda_library",
    "former_names",
    "host_name",
    "kill_points",
    "redaction",
    "short_lists",
    "tolerant_logger",
    "working_folder",
)


def test_every_import_is_a_declared_dependency() -> None:
    """An import of an undeclared, transitive dependency can break with any release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {_required(line) for line in project["dependencies"]}
    extras = {name: {_required(line) for line in lines} for name, lines in project["optional-dependencies"].items()}
    providers = importlib.metadata.packages_distributions()
    missing = set()
    for path in sources():
        # Adapters, objectives and readers of journals may import an optional library, which is an extra of its name.
        declared = needed | extras.get(path.stem, set()) | extras.get(path.parent.name.removesuffix("_runs"), set())
        if path.as_posix() in ON_SERVERS:
            declared |= extras["server"]
        for _, name in list_imports((ROOT / path).read_text(), path):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top in {*FOLDERS, *MODULES}:
                continue
            if not declared & {_normal(distribution) for distribution in providers.get(top, [])}:
                missing.add(f"{path} imports {top}")
    assert sorted(missing) == []


def test_constraints_pin_every_requirement() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    wanted = {_required(line) for line in lines}
    text = "".join((ROOT / name).read_text() for name in ("constraints.txt", "constraints-torch.txt"))
    pins = re.findall(r"^[\w.-]+(?===)", text, re.MULTILINE)
    assert wanted <= {_normal(pin) for pin in pins}
    assert "torch==2.13.0" in text.split()


def _required(line: str) -> str:
    return _normal(re.split(r"[^\w.-]", line)[0])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_commands_that_only_read_do_not_import_torch() -> None:
    """Their imports take two seconds of CPU, in which a user waits for `hpsearch show`."""
    modules = ["search.api.opening", "search.api.actions", "search.report", "search.report.dataframes", "search.cli"]
    imports = ", ".join(f"hpsearch.{module}" for module in modules)
    code = f"import sys, {imports}; print(*{{'torch', 'sklearn'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
