"""The packages of this project, in order: a package imports from itself and from earlier ones, never from later ones.

A package here is a sub-package or a top-level module of one of the folders. Its docstring describes its content.
tests/test_imports.py checks the imports against this list. The table and the picture in docs/architecture.md are
generated from it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hpsearch

ROOT = Path(__file__).parent.parent
FOLDERS = ("storage", "objectives", "search")
_PUBLIC = {f"hpsearch.{name}": f"{module}.{name}" for name, module in hpsearch.MODULE_BY_NAME.items()}

PACKAGES = (
    # storage: the database, checkpoints and trackers
    *("storage", "storage.errors", "storage.display", "storage.files", "storage.sockets"),
    *("storage.home", "storage.urls", "storage.attributes"),
    "storage.web",
    "storage.database",
    "storage.study_storage",
    "storage.checkpoints",
    "storage.rungs",
    "storage.trials",
    "storage.journals",
    "storage.mlflow",
    "storage.trackers",
    "storage.records",
    "storage.dashboard",
    "storage.metrics",
    "storage.embedded",
    "storage.backup",
    # objectives: the training
    *(
        "objectives",
        "objectives.errors",
        "objectives.private_folders",
        "objectives.search_space",
        "objectives.model_metric_names",
    ),
    "objectives.base_objective",
    "objectives.training",
    "objectives.training.ranks",
    "objectives.training.reproducibility",
    *("objectives.training.strategies.strategy_settings", "objectives.training.config"),
    "objectives.training.optimizers",
    "objectives.training.data",
    "objectives.training.evaluation",
    "objectives.training.strategies",
    "objectives.objective",
    *("objectives.training.session", "objectives.training.ranked_session"),
    *("objectives.training.serving_module", "objectives.training.result"),
    "objectives.training.loop",
    "objectives.training.reports",
    *(
        "objectives.training.base_trainer",
        "objectives.training.trainer",
        "objectives.training.fold_metrics",
        "objectives.training.folds_trainer",
    ),
    "objectives.training.checks",
    *("objectives.custom_loop", "objectives.adapters", "objectives.fit"),
    *("objectives.references", "objectives.loading", "objectives.template"),
    "objectives.builtin",
    # search: the service
    "search",
    *(
        "search.errors",
        "search.secret_files",
        "search.process",
        "search.error_lines",
        "search.private_output",
        "search.console",
        "search.services",
    ),
    "search.freeze_thaw",
    "search.spec.kinds",
    *("search.samplers", "search.pruners"),
    "search.spec",
    *("search.samplers.suggest", "search.pruners.study_pruner"),
    "search.study",
    "search.finalists",
    "search.report",
    "search.tracking",
    "search.promotion",
    "search.worker",
    "search.launch",
    "search.fleet",
    "search.doctor",
    "search.run",
    "search.api",
    "search.cli",
)


def list_modules() -> dict[str, Path]:
    """Return all modules of the project: dotted name to path."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {_dotted(path.relative_to(ROOT)): path for path in paths}


def _dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def find_package(module: str) -> str | None:
    """Return the innermost package of the list that contains a module; None if there is none."""
    packages = [name for name in PACKAGES if module == name or module.startswith(f"{name}.")]
    return max(packages, key=len, default=None)


@cache
def list_imports(source: str, path: Path) -> tuple[tuple[int, str], ...]:
    """Return the line and the absolute name of each import of a source, nested statements included.

    The name of ``from a import b`` is ``a.b``, which may be a module or an object in a module. The prefix ``hpsearch.``
    is removed. A public name of the root package becomes the name in its defining module.
    """
    found = _iterate_raw_imports(source, path)
    return tuple((line, _PUBLIC.get(name, name).removeprefix("hpsearch.")) for line, name in found)


def _iterate_raw_imports(source: str, path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parents = list(path.with_suffix("").parts[: -node.level]) if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and _is_import_call(node.func) and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def _is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in {"__import__", "import_module"}


@cache
def find_module_imports() -> dict[str, set[str]]:
    """Return the project's modules that each of its modules imports."""
    known = list_modules()
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        names = {name for _, name in list_imports(path.read_text(), path.relative_to(ROOT))}
        found[module] = {target for name in names if (target := _find_module(name, known)) and target != module}
    return found


def _find_module(name: str, known: dict[str, Path]) -> str | None:
    """Return the module of an imported name: the name itself or its parent; None if neither is a module."""
    if name in known:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in known else None


def find_package_imports() -> dict[str, set[str]]:
    """Return the packages that each package imports from."""
    found: dict[str, set[str]] = {name: set() for name in PACKAGES}
    for module, targets in find_module_imports().items():
        if (name := find_package(module)) is not None:
            found[name] |= {other for target in targets if (other := find_package(target)) not in (name, None)}  # type: ignore[misc]
    return found
