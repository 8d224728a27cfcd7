"""The rooms of this project, in order: a room imports from itself and from those before it, never from those after.

A room is a sub-package, or a module that stands alone. Its docstring describes its content. tests/test_imports.py
checks the imports against this table; the table and the picture in docs/architecture.md are generated from it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hpsearch

ROOT = Path(__file__).parent.parent
PACKAGES = ("storage", "objectives", "search")
_PUBLIC = {f"hpsearch.{name}": f"{module}.{name}" for name, module in hpsearch.MODULES.items()}

ROOMS = (
    # storage: where everything is kept
    *("storage", "storage.errors", "storage.files", "storage.home", "storage.urls", "storage.attributes"),
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
    "storage.embedded",
    "storage.backup",
    # objectives: what a trial does
    *("objectives", "objectives.errors", "objectives.search_space", "objectives.model_metrics"),
    "objectives.training",
    "objectives.training.ranks",
    "objectives.training.reproducibility",
    "objectives.training.config",
    "objectives.training.optimizers",
    "objectives.training.data",
    "objectives.training.evaluation",
    "objectives.training.strategies",
    "objectives.objective",
    *("objectives.training.session", "objectives.training.exportable", "objectives.training.result"),
    "objectives.training.loop",
    "objectives.training.reports",
    "objectives.training.trainer",
    "objectives.training.checks",
    *("objectives.custom_loop", "objectives.adapters", "objectives.fit"),
    *("objectives.loading", "objectives.template"),
    "objectives.builtin",
    # search: the service
    "search",
    *("search.errors", "search.secret_files", "search.process", "search.console", "search.services"),
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
    "search.dashboard",
    "search.api",
    "search.cli",
)


def modules() -> dict[str, Path]:
    """Every module of the project by its dotted name."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {_dotted(path.relative_to(ROOT)): path for path in paths}


def _dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str | None:
    """The room that a module lives in: the longest name in the table that it begins with."""
    rooms = [room for room in ROOMS if module == room or module.startswith(f"{room}.")]
    return max(rooms, key=len, default=None)


def imported(source: str, path: Path) -> Iterator[tuple[int, str]]:
    """The line and the absolute name of all that a source imports, however deep the statement stands.

    Of ``from a import b`` that is ``a.b``, which may be a module or something in one. The prefix ``hpsearch.`` is left
    out, and a name of the root package is that of the module that defines it.
    """
    for line, name in _imported(source, path):
        yield line, _PUBLIC.get(name, name).removeprefix("hpsearch.")


def _imported(source: str, path: Path) -> Iterator[tuple[int, str]]:
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


def arrows() -> dict[str, set[str]]:
    """The project's modules that each of its modules imports."""
    known = modules()
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        names = {name for _, name in imported(path.read_text(), path.relative_to(ROOT))}
        found[module] = {target for name in names if (target := _module_in(name, known)) and target != module}
    return found


def _module_in(name: str, known: dict[str, Path]) -> str | None:
    """The module that an imported name is, or is in."""
    if name in known:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in known else None


def room_arrows() -> dict[str, set[str]]:
    """The rooms that each room imports from."""
    found: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module, targets in arrows().items():
        if (room := room_of(module)) is not None:
            found[room] |= {other for target in targets if (other := room_of(target)) not in (room, None)}  # type: ignore[misc]
    return found
