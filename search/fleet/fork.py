"""Start worker processes: fork server, and each worker's share of cores and GPUs."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType

from hpsearch.search.errors import SearchError
from hpsearch.search.process import add_working_folder_to_path, report_errors

_MINE = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")


def cores() -> int:
    """Return how many processors this process may use: of the machine, by its affinity, by its cgroup's limit."""
    given = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cgroup_limit()
    return given if limit is None else max(1, min(given, int(limit)))


def cgroup_limit(mine: Path = _MINE, mounted: Path = _MOUNTED) -> float | None:
    """Return how many processors' time the cgroup grants, which Slurm, Kubernetes and systemd set; None for any.

    Args:
        mine: the file that names this process's cgroups.
        mounted: where they are mounted; in a container often those of its own alone, below another name.
    """
    limits = []
    for line in _read(mine).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = mounted, ["cpu.max"]
        elif "cpu" in controllers.split(","):
            root, names = mounted / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        folder = root / path.lstrip("/")
        for above in (folder, *folder.parents):  # the least of all levels holds
            if above.is_relative_to(root) and (limit := _ratio(" ".join(_read(above / name) for name in names))):
                limits.append(limit)
    return min(limits, default=None)


def _ratio(text: str) -> float | None:
    """Return quota / period of a text ``QUOTA PERIOD``, in processors; None without a limit (``max``, -1, no file)."""
    try:
        quota, period = map(int, text.split())
        return quota / period if quota > 0 else None
    except (ValueError, ZeroDivisionError):
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def thread_settings(workers: int) -> dict[str, str]:
    """Return the environment that divides the cores: more threads than cores make every worker several times slower."""
    threads = str(max(1, cores() // max(1, workers)))
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)


# Where there may be an accelerator nothing is forked: its driver may not be asked anything before a fork, and it is not
# in our hands what a library asks while it loads.
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/accel")

_context = multiprocessing.get_context("forkserver")


def can_fork() -> bool:
    """Whether workers are forked on this machine; else each is a fresh interpreter."""
    return sys.platform == "linux" and not any(Path(device).exists() for device in _ACCELERATORS)


def load_ahead(workers: int) -> None:
    """Begin to load what workers need, in the background; how they share the cores is settled by this too."""
    if not workers or not can_fork():
        return
    _context.set_forkserver_preload(["hpsearch.search.fleet.preload"])
    # Without it, a module in the current folder would hide an installed package of the same name.
    environment = {**thread_settings(workers), "PYTHONSAFEPATH": "1"}
    with contextlib.suppress(OSError), _environment(environment), _silence():
        forkserver.ensure_running()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Let what is started have no output: it lives as long as a worker, and who reads the fleet's must not wait for it.

    A killed fleet's workers end later than it.
    """
    kept = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    try:
        _redirect(os.devnull, os.O_WRONLY, list(kept))
        yield
    finally:
        for descriptor, copy in kept.items():
            os.dup2(copy, descriptor)
            os.close(copy)


class ForkedProcess:
    """A function of ours in a forked process: a session of its own, no input, and all output in a file.

    What it has of :class:`subprocess.Popen` has the same meaning.

    Args:
        work: of a module, with arguments that can be pickled; it returns the exit code.
        command: the arguments of the command line that it stands for, which runs note as theirs.
        environment: all of it.
        log: appended to.

    Raises:
        OSError: nothing could be forked.
    """

    def __init__(self, work: Callable[[], int], command: list[str], environment: dict[str, str], log: Path) -> None:
        self._process = _context.Process(target=_run, args=(work, command, environment, str(log)))
        with _no_main():
            self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """Hide the program: `multiprocessing` would run a user's script again, from its first line, in each worker."""
    program, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def _run(work: Callable[[], int], command: list[str], environment: dict[str, str], log: str) -> None:
    os.setsid()
    _redirect(os.devnull, os.O_RDONLY, [0])
    _redirect(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, [1, 2])
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = command
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # else all workers draw the same
    # What a worker starts itself, such as the processes of a data loader, is started as in any other program.
    multiprocessing.set_start_method(None, force=True)
    add_working_folder_to_path()
    code = report_errors(work)
    gc.freeze()  # the interpreter's end looks through all there is for cycles
    sys.exit(code)


def _redirect(path: str, flags: int, descriptors: list[int]) -> None:
    opened = os.open(path, flags, 0o666)
    for descriptor in descriptors:
        os.dup2(opened, descriptor)
    if opened not in descriptors:
        os.close(opened)


def visible_gpus() -> list[str]:
    """Return the CUDA devices this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    import torch

    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [part.strip() for part in given.split(",") if part.strip()]
    return [str(i) for i in range(torch.cuda.device_count())]


def gpus_of(index: int, gpus: list[str], each: int) -> list[str]:
    """Return the GPUs of the worker at `index`; where workers are more than sets of `each`, some share one."""
    sets = max(1, len(gpus) // each)
    first = index % sets * each
    return gpus[first : first + each]


def workers_on(gpus: list[str], *, sharing: int, each: int) -> int:
    """Return how many workers there are where so many share a set of `each` GPUs.

    Raises:
        SearchError: there is no such set.
    """
    if len(gpus) < each:
        raise SearchError(
            f"--workers-per-gpu {sharing}: there are {len(gpus)} GPUs here, and a trial needs {each}: use --workers"
        )
    return sharing * (len(gpus) // each)
