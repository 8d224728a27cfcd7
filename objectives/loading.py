"""Load an objective by its reference: a built-in name, `package.module:Class`, or a path to a file."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from hpsearch.changeable_paths import find_changeable_part
from hpsearch.objectives.base_objective import BaseObjective, check_metric_prefix
from hpsearch.objectives.custom_loop.loop_objective import format_not_executed, is_coroutine_or_generator, wrap_function
from hpsearch.objectives.errors import (
    ObjectiveError,
    find_source_file,
    format_path,
    format_user_error,
    get_message,
    keep_child_signals,
    keep_recursion_limit,
    keep_streams,
    suggest_names,
    wrap_user_errors,
)
from hpsearch.objectives.file_modules import execute_file, make_module_name, share_module
from hpsearch.objectives.private_folders import use_private_compiler_cache
from hpsearch.objectives.references import (
    BUILTIN,
    describe_unknown_reference,
    has_kind,
    normalize_reference,
    split_file_reference,
    suggest_file,
)
from hpsearch.working_folder import import_matplotlib


def load_objective(reference: str) -> BaseObjective:
    """Load and check an objective.

    Args:
        reference: `digits`, `package.module:Class`, `path/to/file.py` or `path/to/file.py:Class`.

    Raises:
        ObjectiveError: the reference is unknown, its code cannot be imported, or the class is not a valid objective.
    """
    if not isinstance(reference, str):
        raise ObjectiveError(f"objective {reference!r} is not text; give a name such as 'digits' or 'wine.py'")
    return _create(_find_class(reference))


def load_checked_objective(reference: str, file: Path, sha256: str) -> BaseObjective:
    """Load an objective as `load_objective` does, but only from the file and the code that were checked before.

    Another user could exchange the file between its check and its import. For a module, this is the caller's task,
    because Python finds and reads the module.

    Args:
        reference: as for `load_objective`.
        file: resolved path of the checked file.
        sha256: hexadecimal SHA-256 of the checked code.

    Raises:
        ObjectiveError: as for `load_objective`, or a reference to a file now leads to other code.
    """
    return _create(_find_class(reference, checked=(file, sha256)))


def _create(cls: type[BaseObjective]) -> BaseObjective:
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise ObjectiveError(
            f"{cls.__name__} does not define {missing}; an Objective needs the methods suggest, data and model, "
            "and a LoopObjective needs suggest and run"
        )
    try:
        with keep_recursion_limit(), keep_child_signals(), keep_streams():
            objective = cls()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's code raises
        raise ObjectiveError(f"{cls.__name__}() failed: {format_user_error(error, find_source_file(cls))}") from error
    with wrap_user_errors(cls.__name__):  # attributes may be properties
        _check(objective)
    return objective


def objective_reference(reference: str) -> str:
    """Return the reference in the form that a study stores: a file becomes `/absolute/file.py:Class`.

    Raises:
        ObjectiveError: as for `load_objective`.
    """
    reference = normalize_reference(reference)
    file = None if reference in BUILTIN else split_file_reference(reference)
    path = file and file[0].resolve()  # before the import, which may change the working folder
    cls = _find_class(reference)
    return reference if path is None else f"{path}:{cls.__name__}"


def source_hash(objective: BaseObjective) -> str:
    """Return the hexadecimal SHA-256 of the file that defines the objective's class.

    Raises:
        ObjectiveError: the class has no source file.
    """
    if (path := find_source_file(type(objective))) is None:
        raise ObjectiveError(f"{type(objective).__name__} has no source file; define the class in a file")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _find_class(reference: str, *, checked: tuple[Path, str] | None = None) -> type[BaseObjective]:
    use_private_compiler_cache()  # the code may compile models itself
    import_matplotlib()
    reference = normalize_reference(reference)
    reference = BUILTIN.get(reference, reference)
    if (file := split_file_reference(reference)) is not None:
        path, name = file
        module = _import_file(path, checked)
        return _named_class(module, name, format_path(path)) if name else _only_class(module, path)
    module_name, _, name = reference.partition(":")
    if not name:
        raise ObjectiveError(describe_unknown_reference(reference))
    _check_module_name(module_name)
    if reference not in BUILTIN.values() and _should_search(Path.cwd(), module_name):
        _search_first(Path.cwd())
    return _named_class(_import_module(module_name), name, module_name)


def _import_file(path: Path, checked: tuple[Path, str] | None = None) -> ModuleType:
    """Import a file; if `checked` is set, only if this is the resolved path and the SHA-256 of the code.

    The file can import modules of the working folder, unless this belongs to another user: libraries try to import
    packages that are not installed.
    """
    if not has_kind(path, stat.S_ISREG):
        if has_kind(path, lambda _: True):
            kind = "a folder" if path.is_dir() else "not a regular file"
            raise ObjectiveError(f"{format_path(path)} is {kind}; give a file of Python code")
        if os.path.islink(path):  # noqa: PTH114 unlike Path.is_symlink, it accepts names of any length
            raise ObjectiveError(f"{format_path(path)} is a link to a missing file or to itself; correct the link")
        raise ObjectiveError(f"file {format_path(path)} does not exist; {suggest_file(path)}")
    path = path.resolve()
    with _wrap_import_errors(path):
        content = path.read_bytes()
        if checked not in (None, (path, hashlib.sha256(content).hexdigest())):
            raise ObjectiveError(
                f"file {format_path(path)} changed between its check and its import; repeat the command"
            )
        if (here := str(Path.cwd())) not in sys.path and _is_as_safe(Path.cwd(), path):
            sys.path.append(here)
        _search_first(path.parent)
    name = make_module_name(path, content)
    with _IMPORT_LOCK:  # another thread must not get a partly loaded module
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            raise ObjectiveError(f"objective file {format_path(path)} must end in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        share_module(name, path, content)
        _IMPORTED.append(path)
        try:
            with _wrap_import_errors(path):
                execute_file(module, path, content)
        except BaseException:  # Ctrl-C must not leave a partly loaded module either
            del sys.modules[name]
            raise
        finally:
            _IMPORTED.pop()
        return module


def require_no_import(what: str) -> None:
    """Reject a call that an objective's file makes while it is imported: each worker would repeat it.

    Args:
        what: the call, for the message.

    Raises:
        ObjectiveError: this thread imports such a file.
    """
    if _IMPORTED and _IMPORT_LOCK._is_owned():  # type: ignore[attr-defined]
        raise ObjectiveError(
            f"{format_path(_IMPORTED[-1])} calls {what} while it is imported, and each worker imports it; "
            'move the call below: if __name__ == "__main__":'
        )


def _is_as_safe(folder: Path, file: Path) -> bool:
    """Return whether no other users can add modules to a folder than those who can change the objective's file.

    The folder belongs to this user, root or the owner of the file, and not all users can write to it. Members of a
    group with write permission can replace the path of a file in it, unless the folder is sticky.
    """
    status = folder.stat()
    if status.st_uid not in {os.geteuid(), 0, file.stat().st_uid} or status.st_mode & stat.S_IWOTH:
        return False
    if find_changeable_part(folder, as_folder=True) is None:
        return True
    return file.is_relative_to(folder) and not status.st_mode & stat.S_ISVTX


def _check_module_name(name: str) -> None:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ObjectiveError(f"{name!r} is not a module name; write package.module:Class")
    if name == "__main__":
        raise ObjectiveError("workers cannot import '__main__'; pass the class itself, or write FILE.py:CLASS")


def _should_search(folder: Path, name: str) -> bool:
    """Return whether to search a folder for a module; if others can change it, only for one that is not installed."""
    if find_changeable_part(folder, as_folder=True) is None:
        return True
    with _wrap_import_errors(None):
        spec = importlib.util.find_spec(name.partition(".")[0])
        if spec is None or spec.origin is not None:
            return spec is None
        with suppress(ModuleNotFoundError):  # a namespace package, which any folder of this name extends
            return importlib.util.find_spec(name) is None
        return True


def _import_module(name: str) -> ModuleType:
    with _wrap_import_errors(None):  # find_spec imports parent packages
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(f"{error.name}.")):
                raise ObjectiveError(f"no module {error.name!r} for objective {name!r}; correct the name") from error
            raise
    if spec is None:
        raise ObjectiveError(f"module {name!r} not found; run hpsearch in its folder, or install its package")
    origin = Path(spec.origin) if spec.has_location and spec.origin else None
    with _wrap_import_errors(origin):
        return importlib.import_module(name)


@contextmanager
def _wrap_import_errors(file: Path | None) -> Iterator[None]:
    try:
        with keep_recursion_limit(), keep_child_signals(), keep_streams():
            yield
        text = json.dumps(_RECORD)  # the code may have replaced the function
        if not isinstance(text, str) or "\n" in text or json.loads(text) != _RECORD:
            raise ObjectiveError(
                "json.dumps was replaced by a function that does not return one line of JSON; use the other function "
                "under its own name"
            )
    except (ObjectiveError, KeyboardInterrupt):
        raise
    except BaseException as error:  # whatever the user's code raises
        text = format_user_error(error, file)
        if file is not None and isinstance(error, SyntaxError) and "null bytes" in get_message(error):
            text = f"{format_path(file)} contains a null byte; save it as a text file in UTF-8"
        elif file is not None and "relative import with no known parent" in get_message(error):
            text += f"; give its module instead of the file, such as {file.parent.name}.{file.stem}:CLASS"
        raise ObjectiveError(text) from error


_RECORD = {"b": [1, 2], "a": None}

_IMPORT_LOCK = threading.RLock()
_IMPORTED: list[Path] = []  # files that are being imported, under this lock
_SEARCH_FOLDERS: list[str] = []  # folders of objectives that were added to sys.path
_SHADOWED_MODULES: dict[str, dict[str, ModuleType]] = {}  # replaced modules by folder


def _search_first(folder: Path) -> None:
    """Let an objective import modules of its folder, even if other objectives' folders have modules of the same names.

    In sys.path, the folder comes after installed packages, and before the working directory and other objectives'
    folders.
    """
    own, others = str(folder), [other for other in _SEARCH_FOLDERS if other != str(folder)]
    later = {*others, *(path for path in sys.path[-1:] if path == str(Path.cwd()))}  # cwd may be a clone of hpsearch
    first = next((index for index, path in enumerate(sys.path) if path in later), len(sys.path))
    if own not in sys.path[:first]:
        sys.path[:] = [*sys.path[:first], own, *(path for path in sys.path[first:] if path != own)]
        _SEARCH_FOLDERS[:] = [own, *others]
    names = {entry.stem for entry in folder.iterdir() if entry.is_dir() or entry.suffix == ".py"}
    for name in names & sys.modules.keys():
        if (other := _folder_of(sys.modules[name])) in others:
            parts = [part for part in sys.modules if part == name or part.startswith(f"{name}.")]
            _SHADOWED_MODULES.setdefault(other, {}).update({part: sys.modules.pop(part) for part in parts})
    sys.modules.update(_SHADOWED_MODULES.pop(own, {}))


def _folder_of(module: ModuleType) -> str:
    """Return the folder that contains a module or package; empty if the module has no file."""
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
        raise ObjectiveError(f"{format_path(path)} defines no Objective; did you mean its function, {path.name}:main?")
    if not found:
        raise ObjectiveError(f"{format_path(path)} defines no Objective; add a subclass of hpsearch.Objective")
    if len(found) > 1:
        names, first = ", ".join(found), next(iter(found))
        raise ObjectiveError(f"{format_path(path)} defines objectives {names}; select one, as in {path.name}:{first}")
    return next(iter(found.values()))


def _named_class(module: ModuleType, name: str, where: str) -> type[BaseObjective]:
    if (value := getattr(module, name, None)) is None:
        known = list(_objectives_in(module))
        hint = suggest_names(name, known) if known else "it defines no objective class"
        raise ObjectiveError(f"{where} has no {name!r}; {hint}")
    if inspect.isfunction(value):
        return wrap_function(value)
    if not (inspect.isclass(value) and issubclass(value, BaseObjective)):
        raise ObjectiveError(f"{where}:{name} is not an objective; it must be a function, Objective or LoopObjective")
    return value


def _check(objective: BaseObjective) -> None:
    owner = type(objective).__name__
    _check_methods(objective)
    if objective.direction not in ("maximize", "minimize"):
        raise ObjectiveError(f"{owner}.direction must be 'maximize' or 'minimize', not {objective.direction!r}")
    constraints: Any = objective.constraints
    if not isinstance(constraints, Mapping):
        raise ObjectiveError(f"{owner}.constraints must be a dict such as {{'model_mb': '<= 10'}}, not {constraints!r}")
    for name, bound in constraints.items():
        if not (isinstance(name, str) and isinstance(bound, str)):
            raise ObjectiveError(f"{owner}.constraints[{name!r}] must be a bound such as '<= 10', not {bound!r}")
    for field in ("name", "metric"):
        value = getattr(objective, field)
        if not (isinstance(value, str) and value):
            raise ObjectiveError(f"{owner}.{field} must be a non-empty string, not {value!r}")
        if not value.isprintable():
            raise ObjectiveError(f"{owner}.{field} is {value!r}, which contains control characters; use another text")
    for metric in (objective.metric, *objective.directions):
        check_metric_prefix(metric)
    defaults: Any = objective.defaults
    if defaults and not (isinstance(defaults, Mapping) and all(isinstance(name, str) for name in defaults)):
        raise ObjectiveError(f"{owner}.defaults must be a dict such as {{'lr': 0.01}}, not {defaults!r}")
    floor: Any = getattr(objective, "loss_floor", None)
    if floor is not None and (not isinstance(floor, int | float) or isinstance(floor, bool)):
        raise ObjectiveError(f"{owner}.loss_floor must be a number or None, not {floor!r}")
    for field in ("epochs", "n_trials"):
        value = getattr(objective, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ObjectiveError(f"{owner}.{field} must be an integer of at least 1, not {value!r}")


def _check_methods(objective: BaseObjective) -> None:
    """Reject methods that are coroutines or generators, because hpsearch would not execute them.

    Raises:
        ObjectiveError: a method that hpsearch calls is a coroutine or a generator.
    """
    cls = type(objective)
    called = {name for base in cls.__mro__ if base.__module__.split(".")[0] == "hpsearch" for name in vars(base)}
    for name in sorted(called - {"parameter_groups"}):  # hpsearch iterates over the groups
        if is_coroutine_or_generator(vars(objective).get(name, getattr(cls, name, None))):
            raise ObjectiveError(format_not_executed(f"{cls.__name__}.{name}"))
