"""Errors that an objective can cause, each reported in one line."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

# Where the package that brings a module has another name than the module.
_PACKAGES = {
    "Bio": "biopython",
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",  # the other one needs the libraries of a desktop
    "dateutil": "python-dateutil",
    "faiss": "faiss-cpu",
    "hydra": "hydra-core",
    "open_clip": "open_clip_torch",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "umap": "umap-learn",
    "yaml": "pyyaml",
}

# Packages of hpsearch before it had one namespace; objectives of that time import from them.
_FORMER = {"objectives", "search", "storage"}


def how_to_install(error: BaseException) -> str:
    """How to install the module that is not there, in brackets; nothing for other errors.

    A part of a package that is there is a mistake of another kind, and so is a module of Python's own.
    """
    module = error.name if isinstance(error, ModuleNotFoundError) else None
    if not module or "." in module or module in sys.stdlib_module_names:
        return ""
    if module in _FORMER:
        return (
            " (of hpsearch: `from hpsearch import Objective, Splits, TrainConfig`; a package of your own must be "
            "next to the objective's file)"
        )
    return f" (where it is a package: `{installing(_PACKAGES.get(module, module))}`)"


def installing(package: str) -> str:
    """The command that installs a package beside hpsearch."""
    wrapper = os.environ.get("HPSEARCH_COMMAND")  # what the user calls; not set where hpsearch is a wheel
    return f"{wrapper} add {package}" if wrapper else f"pip install {package}"


_OWN = tuple(Path(__file__).resolve().parents[1] / name for name in _FORMER)
_LIBRARIES = tuple(
    Path(folder).resolve()
    for key, folder in sysconfig.get_paths().items()
    if key in {"stdlib", "platstdlib", "purelib", "platlib"}
)


class ObjectiveError(Exception):
    """A mistake in an objective or its configuration: one line for the user."""


class MetricError(ObjectiveError):
    """A metric that the objective does not have, or that does not fit its outputs; `why` follows its name."""

    def __init__(self, metric: str, why: str) -> None:
        super().__init__(f"metric {metric!r} {why}")
        self.metric, self.why = metric, why


def nearest(name: str, known: list[str]) -> str:
    """The hint after an unknown name: `did you mean 'cosine'?`, or the list of the known names."""
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(match) for match in close) + "?"
    return "known: " + ", ".join(sorted(known))


def shown(path: str | Path) -> str:
    """A path as a person in the current directory would write it."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def source_file(cls: type) -> Path | None:
    """Return the file that defines a class; None for a class made in a console."""
    try:
        source = inspect.getsourcefile(cls)
    except (TypeError, OSError):
        return None
    return Path(source).resolve() if source and Path(source).exists() else None


def blame(error: BaseException, file: Path | None = None) -> str:
    """`my_objective.py:12: NameError: name 'x' is not defined`: an error with the user's file and line.

    The line is that of the deepest frame in `file`, or in any file that is neither this package nor a library.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shown(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}"
    what = f"{type(error).__name__}: {_first_line(error)}{how_to_install(error)}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename, file):
            return f"{shown(frame.filename)}:{frame.lineno}: {what}"
    return what


def _is_users(filename: str, file: Path | None) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    if file is not None and path == file.resolve():
        return True
    return not any(path.is_relative_to(folder) for folder in (*_LIBRARIES, *_OWN))


def _first_line(error: BaseException) -> str:
    lines = ["".join(filter(str.isprintable, line)).strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else ""


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Turns any error of the objective's own code into an ObjectiveError that names its file and line."""
    try:
        yield
    except ObjectiveError:
        raise
    except Exception as error:  # whatever the user's code raises
        if is_out_of_memory(error):
            raise
        raise ObjectiveError(f"{what}: {blame(error)}") from error


@contextmanager
def needing(package: str, objective: str) -> Iterator[None]:
    """Around the imports of a package that only this built-in objective needs: says how it is installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ObjectiveError(f"{objective} needs {package}: {installing(package)}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a CPU or an accelerator."""
    import torch  # most that load this module never need it

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # The CPU allocator has no error class of its own.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
