"""Finding an objective by its reference: a built-in name, `package.module:Class`, or a path to a file."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from hpsearch.objectives.errors import ObjectiveError, blame, nearest, shown, source_file
from hpsearch.objectives.objective import BaseObjective
from hpsearch.objectives.own_loop.loop_objective import objective_of

BUILTIN: dict[str, str] = {
    "digits": "hpsearch.objectives.builtin.digits:Digits",
    "breast_cancer": "hpsearch.objectives.builtin.breast_cancer:BreastCancer",
    "text": "hpsearch.objectives.builtin.text:Text",
    "molecules": "hpsearch.objectives.builtin.molecules:Molecules",
    "gan": "hpsearch.objectives.builtin.gan:Gan",
    "denoise": "hpsearch.objectives.builtin.denoise:Denoise",
    "language": "hpsearch.objectives.builtin.language:Language",
    "series": "hpsearch.objectives.builtin.series:Series",
}


_FORMER = {path.replace("hpsearch.objectives.builtin.", "objectives."): name for name, path in BUILTIN.items()}


def current_reference(reference: str) -> str:
    """Return the reference as this version writes it: built-ins had other module names before the namespace."""
    return _FORMER.get(reference, reference)


def load_objective(reference: str) -> BaseObjective:
    """The objective that a reference names, made and checked.

    Args:
        reference: `digits`, `package.module:Class`, `path/to/file.py` or `path/to/file.py:Class`.

    Raises:
        ObjectiveError: nothing has that name, its code does not import, or it is not a usable Objective.
    """
    cls = _find_class(reference)
    if inspect.isabstract(cls):
        lacking = ", ".join(sorted(cls.__abstractmethods__))
        raise ObjectiveError(
            f"{cls.__name__} lacks {lacking}: an Objective defines suggest, data and model; "
            "a LoopObjective, suggest and run"
        )
    try:
        objective = cls()
    except Exception as error:  # whatever the user's code raises
        raise ObjectiveError(f"{cls.__name__} cannot be made: {blame(error, source_file(cls))}") from error
    _check(objective)
    return objective


def objective_reference(reference: str) -> str:
    """The form to store with a study, good from any directory: files become `/absolute/file.py:Class`.

    Raises:
        ObjectiveError: as `load_objective`.
    """
    cls = _find_class(reference)
    reference = current_reference(reference)
    if reference in BUILTIN or (file := _file_reference(reference)) is None:
        return reference
    return f"{file[0].resolve()}:{cls.__name__}"


def source_hash(objective: BaseObjective) -> str:
    """SHA-256, in hexadecimal, of the file that defines the objective's class."""
    path = source_file(type(objective))
    if path is None:
        raise ObjectiveError(f"{type(objective).__name__} has no source file: define it in a module or a file")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _find_class(reference: str) -> type[BaseObjective]:
    reference = current_reference(reference)
    reference = BUILTIN.get(reference, reference)
    if (file := _file_reference(reference)) is not None:
        path, name = file
        module = _import_file(path)
        return _named_class(module, name, shown(path)) if name else _only_class(module, path)
    module_name, _, name = reference.partition(":")
    if not name:
        raise ObjectiveError(_unknown(reference))
    return _named_class(_import_module(module_name), name, module_name)


def _unknown(reference: str) -> str:
    if "." in reference:
        return f"objective {reference!r}: write package.module:Class, or a path that ends in .py"
    if Path(f"{reference}.py").is_file():
        return f"unknown objective {reference!r}: did you mean the file {reference}.py?"
    return f"unknown objective {reference!r}: {nearest(reference, list(BUILTIN))}"


def _file_reference(reference: str) -> tuple[Path, str] | None:
    """Return the file and the class, which may be empty, of a reference to a file; None for other references."""
    head, _, name = reference.rpartition(":")
    path, name = (head, name) if head and not name.endswith(".py") else (reference, "")
    return (Path(path).expanduser(), name) if Path(path).suffix == ".py" or os.sep in path else None


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ObjectiveError(f"no objective file {shown(path)}: `hpsearch init {path.name}` writes one to start from")
    path = path.resolve()
    with _telling_import_errors(path):
        content = path.read_bytes()
        _search_first(path.parent)
    # A name of its own, so that a file called search.py or numpy.py hides nothing, and a notebook may write it anew.
    name = f"hpsearch_objective_{path.stem}_{hashlib.sha256(str(path).encode() + content).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ObjectiveError(f"objective file {shown(path)} must end in .py")
    loader = spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _telling_import_errors(path):
            loader.exec_module(module)
    except BaseException:  # also Ctrl-C leaves no half of a module
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ObjectiveError(f"{name!r} is not the name of a module")
    _search_first(Path.cwd())
    with _telling_import_errors(None):  # a parent package runs its own code
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(f"{error.name}.")):
                raise ObjectiveError(f"no module {error.name!r} for the objective {name!r}") from error
            raise
    if spec is None:
        raise ObjectiveError(f"no module {name!r}: start where it can be imported, or install its package")
    origin = Path(spec.origin) if spec.has_location and spec.origin else None
    with _telling_import_errors(origin):
        return importlib.import_module(name)


@contextmanager
def _telling_import_errors(file: Path | None) -> Iterator[None]:
    try:
        yield
    except ObjectiveError:
        raise
    except (Exception, SystemExit) as error:
        raise ObjectiveError(blame(error, file)) from error


_FOLDERS: list[str] = []  # that objectives were loaded from and that the search path got for them
_ASIDE: dict[str, dict[str, ModuleType]] = {}  # by folder: its modules while another folder's have their names


def _search_first(folder: Path) -> None:
    """Let the user's code import its neighbours, also where another objective's folder has modules of the same names.

    The folder is searched after installed packages, and before the working folder and those of other objectives.
    """
    own, others = str(folder), [other for other in _FOLDERS if other != str(folder)]
    behind = {*others, *(path for path in sys.path[-1:] if path == str(Path.cwd()))}  # it may be a clone of hpsearch
    first = next((place for place, path in enumerate(sys.path) if path in behind), len(sys.path))
    if own not in sys.path[:first]:
        sys.path[:] = [*sys.path[:first], own, *(path for path in sys.path[first:] if path != own)]
        _FOLDERS[:] = [own, *others]
    names = {entry.stem for entry in folder.iterdir() if entry.is_dir() or entry.suffix == ".py"}
    for name in names & sys.modules.keys():
        if (other := _folder_of(sys.modules[name])) in others:
            parts = [part for part in sys.modules if part == name or part.startswith(f"{name}.")]
            _ASIDE.setdefault(other, {}).update({part: sys.modules.pop(part) for part in parts})
    sys.modules.update(_ASIDE.pop(own, {}))


def _folder_of(module: ModuleType) -> str:
    """Return the folder in which a module or package was found; empty for one without files."""
    paths = [*getattr(module, "__path__", ()), getattr(module, "__file__", None)]
    return str(Path(paths[0]).parent) if paths[0] else ""


def _objectives_in(module: ModuleType) -> dict[str, type[BaseObjective]]:
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, BaseObjective) and value.__module__ == module.__name__
    }


def _only_class(module: ModuleType, path: Path) -> type[BaseObjective]:
    found = {name: cls for name, cls in _objectives_in(module).items() if not name.startswith("_")}
    if not found and inspect.isfunction(getattr(module, "main", None)):
        raise ObjectiveError(f"{shown(path)} defines no Objective: is it its function, {path.name}:main?")
    if not found:
        raise ObjectiveError(f"{shown(path)} defines no Objective: subclass hpsearch.Objective in it")
    if len(found) > 1:
        names, first = ", ".join(found), next(iter(found))
        raise ObjectiveError(
            f"{shown(path)} defines {len(found)} objectives ({names}): say which, as in {path.name}:{first}"
        )
    return next(iter(found.values()))


def _named_class(module: ModuleType, name: str, where: str) -> type[BaseObjective]:
    value = getattr(module, name, None)
    if value is None:
        known = list(_objectives_in(module))
        hint = nearest(name, known) if known else "it defines no Objective"
        raise ObjectiveError(f"{where} has no {name!r}: {hint}")
    if inspect.isfunction(value):
        return objective_of(value)
    if not (inspect.isclass(value) and issubclass(value, BaseObjective)):
        raise ObjectiveError(
            f"{where}:{name} is not an Objective: it must subclass hpsearch.Objective or LoopObjective, or be a "
            "function"
        )
    return value


def _check(objective: BaseObjective) -> None:
    who = type(objective).__name__
    if objective.direction not in ("maximize", "minimize"):
        raise ObjectiveError(f"{who}.direction must be 'maximize' or 'minimize', not {objective.direction!r}")
    constraints: Any = objective.constraints
    if not isinstance(constraints, Mapping):
        raise ObjectiveError(f"{who}.constraints must be a dictionary of bounds by metric")
    for name, bound in constraints.items():
        if not (isinstance(name, str) and isinstance(bound, str)):
            raise ObjectiveError(f"{who}.constraints: {name!r} must be a bound such as '<= 10', not {bound!r}")
    for field in ("name", "metric"):
        value = getattr(objective, field)
        if not (isinstance(value, str) and value):
            raise ObjectiveError(f"{who}.{field} must be a word, not {value!r}")
    for field in ("epochs", "n_trials"):
        value = getattr(objective, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ObjectiveError(f"{who}.{field} must be a whole number of at least 1, not {value!r}")
