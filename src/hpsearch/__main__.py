"""``hpsearch``, and ``python -m hpsearch``. It handles SIGINT and SIGTERM before the slow imports."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from hpsearch.standard_streams import open_standard_streams, write_to_stderr

_EXIT_INTERRUPTED = 128 + signal.SIGINT
_MAX_IMPORT_SECONDS = 5.0  # for which an interrupt waits
_HANDLING_SECONDS = 3.0  # after which a signal counts as not handled
_MAX_SIGNALS = 4096  # read at once
_KERNEL_BACKENDS = ("module://matplotlib_inline", "module://ipykernel", "module://ipympl")
_LONGEST_CAUSE = 300  # characters


def main() -> None:
    """Run the command line, which takes seconds to load."""
    is_program = os.path.basename(sys.argv[0]) in {"hpsearch", "__main__.py"}  # noqa: PTH119 a name
    if sys.flags.inspect and is_program and "PYTHONINSPECT" in os.environ:  # it would replace the exit code
        del os.environ["PYTHONINSPECT"]
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 the same program again
    umask = os.umask(0o077)  # if all users could write new files, they could change compiled modules
    os.umask(umask if umask & 0o002 else umask | 0o022)
    is_handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else the caller ignores the signal
    if is_handled:
        signal.signal(signal.SIGINT, _exit_interrupted)
    open_standard_streams()
    _replace_plot_backend()
    interrupt = make_interrupt_handler()
    # ./hpsearch blocks SIGINT. If the caller blocks or ignores SIGCHLD, this process
    # cannot read the exit codes of its children.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGCHLD])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        from hpsearch.cuda_library import load_cuda_library
        from hpsearch.search.process.exits import prepare_exit, report_foreign_exits, take_exit_file
        from hpsearch.search.process.signals import clean_up_on_hangup, exit_on_signals
    except ImportError as error:
        _exit_with_import_error(error)
    take_exit_file(os.environ)
    exit_on_signals()
    clean_up_on_hangup()
    load_cuda_library()
    try:
        try:
            from hpsearch.search.cli import main as run
        except ImportError as error:
            _exit_with_import_error(error)
        if is_handled:
            sys.unraisablehook = _repeat_lost_interrupt
            signal.signal(signal.SIGINT, interrupt)
        _start_signal_watchdog()
        # The fleet checks the exit of its workers.
        with contextlib.nullcontext() if sys.argv[1:2] == ["worker"] else report_foreign_exits():
            run()
    except KeyboardInterrupt:  # before or after the command itself, which handles it
        _exit_interrupted()
    except MemoryError as error:  # a traceback needs memory too
        if str(error):  # an array that is too large
            raise
        write_to_stderr("hpsearch: not enough memory; end other programs, or raise the limit of memory\n")
        os._exit(1)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
        if signal.getsignal(signal.SIGINT) is interrupt:  # it would raise in exit hooks of libraries
            signal.signal(signal.SIGINT, lambda *_: os._exit(code))
        prepare_exit(code)
        raise


def _replace_plot_backend() -> None:
    """Set matplotlib's backend to Agg; set HPSEARCH_NOTEBOOK if a notebook's kernel had set the backend.

    An invalid backend would end commands that load matplotlib.
    """
    if os.environ.get("MPLBACKEND", "").startswith(_KERNEL_BACKENDS):
        os.environ["HPSEARCH_NOTEBOOK"] = "1"
    os.environ["MPLBACKEND"] = "Agg"


def make_interrupt_handler() -> Callable[[int, FrameType | None], None]:
    """Return a handler of SIGINT that raises KeyboardInterrupt, in an import only after the import has ended.

    The C code of torch catches all exceptions while it imports numpy, which would leave half of numpy.
    """
    until: float | None = None

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal until
        _last_handled[number] = time.monotonic()
        until = until or time.monotonic() + _MAX_IMPORT_SECONDS
        if _is_importing(frame) and time.monotonic() < until:
            _repeat_signal(number)
            return
        until = None
        raise KeyboardInterrupt

    return interrupt


_last_handled: dict[int, float] = {}  # time of the last call of a handler


def _start_signal_watchdog() -> None:
    """Start a thread that ends this process if the main thread does not run the current handler of a signal in time.

    Python calls handlers only between instructions of the main thread. libpq, for example, does not return to Python
    while a server is frozen or a table is locked.
    """
    handlers = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def watch() -> None:
        while received := set(os.read(read_end, _MAX_SIGNALS)):
            received_at = time.monotonic() - 1.0  # the thread may have read the signal late
            # A search has handlers of its own, and restores these ones when its workers have ended.
            received = {number for number in received & handlers.keys() if signal.getsignal(number) == handlers[number]}
            time.sleep(_HANDLING_SECONDS)
            for number in received:
                is_handled = _last_handled.get(number, 0.0) > received_at
                if is_handled or signal.getsignal(number) != handlers[number]:
                    continue
                if number != signal.SIGINT and callable(terminate := handlers[number]):
                    terminate(number, None)
                _exit_interrupted()

    with contextlib.suppress(RuntimeError):  # without the thread, a signal waits for the end of the C code
        start_new_thread(watch, ())  # Thread.start waits forever for a thread that gets no memory


def _repeat_lost_interrupt(error: sys.UnraisableHookArgs) -> None:
    """Repeat an interrupt that Python discards because it came in a finalizer or in a callback of C code.

    Other errors there are printed as one line.
    """
    if isinstance(error.exc_value, KeyboardInterrupt):
        _repeat_signal(signal.SIGINT)
        return
    if sys.argv[1:2] == ["worker"]:  # whose log has tracebacks
        sys.__unraisablehook__(error)
        return
    message = f"hpsearch: ignored {error.exc_type.__name__} in {error.object!r}: {error.exc_value}"
    write_to_stderr(f"{' '.join(message.split())}\n")


def _repeat_signal(number: int) -> None:
    # Not os.kill, whose signal another thread may get, so that the main thread does not wake.
    again = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, number))
    again.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread can be started
        again.start()


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _exit_with_import_error(error: ImportError) -> NoReturn:
    """End this process with one line about a package that does not load, such as with an old library on the path."""
    cause: BaseException = error
    while isinstance(cause.__cause__, ImportError):  # numpy explains such errors at length
        cause = cause.__cause__
    text = " ".join(str(cause).split())[:_LONGEST_CAUSE]
    write_to_stderr(
        f"hpsearch: a package cannot be imported ({text}); correct LD_LIBRARY_PATH or PYTHONPATH if they are set, or "
        "install the package again\n"
    )
    os._exit(2)


def _exit_interrupted(*_: object) -> NoReturn:
    write_to_stderr("hpsearch: interrupted\n")
    os._exit(_EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
