"""Errors of objectives, each reported in one line."""

from __future__ import annotations

import errno
import inspect
import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path

from hpsearch.former_names import CURRENT_NAMES
from hpsearch.standard_streams import find_broken_streams

# Package names that differ from the name of their module.
_PACKAGE_BY_MODULE = {
    "Bio": "biopython",
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",  # opencv-python needs the system libraries of a desktop
    "dateutil": "python-dateutil",
    "faiss": "faiss-cpu",
    "hydra": "hydra-core",
    "open_clip": "open_clip_torch",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "umap": "umap-learn",
    "yaml": "pyyaml",
}

# Top-level packages of earlier hpsearch versions, from which old objectives import.
_FORMER_PACKAGES = {"objectives", "search", "storage"}


def get_first_line(error: BaseException) -> str:
    """Return the first line of an error's text; the type of the error if it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def format_install_hint(error: BaseException) -> str:
    """Return a hint in brackets on how to install a missing module; empty for other errors.

    The hint is also empty for missing submodules and for modules of the standard library.
    """
    module = error.name if isinstance(error, ModuleNotFoundError) else None
    if not module or "." in module or module in sys.stdlib_module_names:
        return ""
    if module in _FORMER_PACKAGES:
        return (
            " (hpsearch has a package of this name: use `from hpsearch import Objective, Splits, TrainConfig`, or put "
            "your own package in the folder of your objective file)"
        )
    return f" (if it is a package, run `{format_install_command(_PACKAGE_BY_MODULE.get(module, module))}`)"


def _format_prompt_hint(error: BaseException) -> str:
    is_prompt = type(error).__name__ == "BdbQuit" or (isinstance(error, EOFError) and "reading a line" in str(error))
    return " (breakpoint() and input() need a terminal; remove them)" if is_prompt else ""


def format_install_command(package: str) -> str:
    """Return the command that installs a package into hpsearch's environment."""
    wrapper = os.environ.get("HPSEARCH_COMMAND")  # not set if hpsearch is installed from a wheel
    return f"{wrapper} add {package}" if wrapper else f"pip install {package}"


_PACKAGE_FOLDERS = (
    Path(__file__).parents[1].resolve(),
    *(Path(__file__).resolve().parents[1] / name for name in _FORMER_PACKAGES),  # in a clone, targets of links
)
_LIBRARY_FOLDERS = tuple(
    Path(folder).resolve()
    for key, folder in sysconfig.get_paths().items()
    if key in {"stdlib", "platstdlib", "purelib", "platlib"}
)


class ObjectiveError(Exception):
    """Fault of an objective or its configuration, with a message of one line."""


class MetricError(ObjectiveError):
    """Error for a metric that the objective does not report, or that is incompatible with its outputs.

    The message is `metric NAME` followed by `reason`.
    """

    def __init__(self, metric: str, reason: str) -> None:
        super().__init__(f"metric {metric!r} {reason}")
        self.metric, self.reason = metric, reason


def suggest_names(name: str, known: list[str]) -> str:
    """Return a hint for an unknown name: the new name if it was renamed, similar names, or the list of known names."""
    if (renamed := CURRENT_NAMES.get(name)) in known:
        return f"it is now {renamed!r}"
    if close := get_close_matches(name, known, n=3, cutoff=0.5):
        return "did you mean " + " or ".join(repr(match) for match in close) + "?"
    return "known: " + ", ".join(sorted(known))


def format_path(path: str | Path) -> str:
    """Return a path relative to the current directory; a path outside this directory is unchanged."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError, RuntimeError):  # RuntimeError: links that form a loop
        return str(path)


def find_source_file(cls: type) -> Path | None:
    """Return the file that defines a class; None for a class that was defined in a Python console."""
    try:
        source = inspect.getsourcefile(cls)
    except (TypeError, OSError):
        return None
    return Path(source).resolve() if source and Path(source).exists() else None


def format_user_error(error: BaseException, file: Path | None = None) -> str:
    """Format an error with the user's file and line: `my_objective.py:12: NameError: name 'x' is not defined`.

    The line is from the innermost frame of the user's code: of `file`, or of a file outside hpsearch and the libraries.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{format_path(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}"
    text = f": {line}" if (line := _first_line(error)) else ""
    message = f"{type(error).__name__}{text}{format_install_hint(error)}{_format_prompt_hint(error)}"
    frame = _find_user_frame(error, file)
    return message if frame is None else f"{format_path(frame.filename)}:{frame.lineno}: {message}"


def _find_user_frame(error: BaseException, file: Path | None = None) -> traceback.FrameSummary | None:
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((frame for frame in frames if _is_user_file(frame.filename, file)), None)


def _is_user_file(filename: str, file: Path | None) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    if file is not None and path == file.resolve():
        return True
    return not any(path.is_relative_to(folder) for folder in (*_LIBRARY_FOLDERS, *_PACKAGE_FOLDERS))


_LONGEST_MESSAGE = 1000  # characters; a message may contain a whole tensor


def get_message(error: BaseException) -> str:
    """Return the message of an exception of user code, cut if it is long; `str` of such an exception may fail."""
    try:
        text = str(error)
    except Exception as failure:  # whatever the user's code raises
        text = f"(its __str__ raises {type(failure).__name__})"
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}..."


_LONGEST_TRACEBACK = 20_000  # characters


def format_traceback(error: BaseException) -> str:
    """Return the traceback of an exception; if it is long, only its beginning and its end."""
    text = "".join(traceback.format_exception(error))
    if (omitted := len(text) - _LONGEST_TRACEBACK) <= 0:
        return text
    half = _LONGEST_TRACEBACK // 2
    return f"{text[:half]}\n... ({omitted} characters omitted) ...\n{text[-half:]}"


def _first_line(error: BaseException) -> str:
    text = get_message(error)
    lines = ["".join(filter(str.isprintable, line)).strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else ""


@contextmanager
def keep_recursion_limit() -> Iterator[None]:
    """Restore the recursion limit after code of the objective in this block, because hpsearch needs it too."""
    before = sys.getrecursionlimit()
    try:
        yield
    finally:
        if sys.getrecursionlimit() < before:
            sys.setrecursionlimit(before)


@contextmanager
def keep_streams() -> Iterator[None]:
    """Restore stdout and stderr if user code closes them, or replaces them by objects that hpsearch cannot print to.

    Raises:
        ObjectiveError: user code has closed file descriptors of hpsearch.
    """
    is_closed = False
    kept = [
        (name, getattr(sys, name), os.dup(descriptor), descriptor)
        for descriptor, name in ((1, "stdout"), (2, "stderr"))
    ]
    try:
        yield
    finally:
        for name, former, copy, descriptor in kept:
            try:
                getattr(sys, name).flush()
            except Exception:  # closed, None, or an object without this method
                if getattr(former, "closed", False):
                    with suppress(OSError):  # the copy is closed too
                        os.dup2(copy, descriptor)
                    setattr(sys, name, open(descriptor, "w", errors="backslashreplace", closefd=False))  # noqa: SIM115 stays open
                else:
                    setattr(sys, name, former)
            try:
                os.close(copy)
            except OSError as error:
                is_closed = is_closed or error.errno == errno.EBADF
    if is_closed:
        raise ObjectiveError(
            "the objective closes file descriptors of hpsearch; remove calls such as os.closerange(3, 4096)"
        )


@contextmanager
def keep_child_signals() -> Iterator[None]:
    """Restore the default of SIGCHLD if user code ignores it: no process could read the exit codes of its children."""
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextmanager
def wrap_user_errors(what: str) -> Iterator[None]:
    """Convert errors of the objective's code to an ObjectiveError; the message has `what` and the user's file and line.

    Out-of-memory errors are not converted.
    """
    try:
        with keep_recursion_limit():
            yield
    except (ObjectiveError, KeyboardInterrupt, GeneratorExit):  # a closed generator may end within the block
        raise
    except BaseException as error:  # whatever the user's code raises
        if is_out_of_memory(error):
            raise
        raise ObjectiveError(f"{what}: {format_user_error(error)}") from error


_OUTPUT_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE, errno.EIO})


@contextmanager
def wrap_training_errors(what: str, *, includes_torch: bool = True) -> Iterator[None]:
    """Convert errors that the objective's code raises in training, for example in a hook, to an ObjectiveError.

    Errors of hpsearch and of other libraries, of a full disk or a closed output, and out-of-memory errors are not
    converted.

    Args:
        what: what the block does, for the message.
        includes_torch: whether to convert errors of PyTorch; a model can consist of PyTorch's modules only.
    """
    try:
        yield
    except ObjectiveError:
        raise
    except Exception as error:  # whatever the user's code raises
        is_of_objective = _find_user_frame(error) is not None or (includes_torch and _is_raised_by_torch(error))
        if _is_output_error(error) or is_out_of_memory(error) or not is_of_objective:
            raise
        raise ObjectiveError(f"{what}: {format_user_error(error)}") from error


def _is_raised_by_torch(error: Exception) -> bool:
    import torch

    innermost = traceback.extract_tb(error.__traceback__)[-1]
    return Path(innermost.filename).is_relative_to(Path(torch.__file__).parent)


def _is_output_error(error: Exception) -> bool:
    """Return whether an error is of a full disk or a closed output, and not of the objective's own files and pipes."""
    if not isinstance(error, OSError) or error.errno not in _OUTPUT_ERRORS:
        return False
    if error.errno in (errno.EPIPE, errno.EIO):
        return bool(find_broken_streams())
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    return not _is_user_file(innermost.filename, None) or bool(find_broken_streams())


@contextmanager
def explain_copy_errors(setting: str) -> Iterator[None]:
    """Convert an error in a copy of the objective's model, which `setting` needs, to an ObjectiveError."""
    try:
        yield
    except Exception as error:  # user-defined modules may raise any error
        if is_out_of_memory(error):
            raise
        detail = f"{type(error).__name__}: {get_first_line(error)}"
        raise ObjectiveError(f"{setting} needs a model that copy.deepcopy can copy: {detail}") from error


@contextmanager
def require_package(package: str, objective: str) -> Iterator[None]:
    """Convert a failed import of an optional package to an ObjectiveError with the install command."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ObjectiveError(f"{objective} needs package {package}; run {format_install_command(package)}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an out-of-memory error of the CPU or an accelerator."""
    import torch  # slow to import, and rarely needed

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # The CPU allocator raises a RuntimeError.
    return isinstance(error, RuntimeError) and "can't allocate memory" in get_message(error)
