"""Ranks: the processes that train one trial together, one device each, and the communication between them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.rank_errors import (
    RankLostError,
    RankZeroError,
    format_one_line,
    from_json,
    is_consequence,
    release_references,
    to_json,
)
from hpsearch.objectives.training.rank_heartbeat import RankHeartbeat

T = TypeVar("T")
Rows = TypeVar("Rows", Tensor, range)

TIMEOUT_SECONDS = 30.0  # seconds within which all ranks must reach a collective of the training
BARRIER_TIMEOUT_SECONDS = 1800.0  # seconds within which all ranks must reach any other collective
_SETUP_TIMEOUT_SECONDS = 300.0  # the same before the first step, for connections and compilers; torchtitan's default
_JOB_TIMEOUT = timedelta(days=365)  # the other ranks wait here while rank 0 has no trial
_JOIN_TIMEOUT = timedelta(minutes=30)  # time for all ranks to join; another rank may still load data
_CAUSE_TIMEOUT_SECONDS = 3.0  # time for a failed rank to store its error
_WATCH_INTERVAL_SECONDS = 1.0  # between two checks for an error, because NCCL does not detect closed connections


def _exit_process(reason: str) -> None:
    """Exit at once with code 1. The main thread may wait for the rank that does not respond."""
    with contextlib.suppress(OSError):
        os.write(2, f"{reason}; this rank exits\n".encode())
    os._exit(1)


class Ranks:
    """Communication with the other ranks; this base class is for a single process."""

    rank = 0
    world_size = 1
    cpu_group: Any = None  # gloo process group with the timeout of barriers; None in a single process
    # Set by the code that runs the process: whether this rank has the stop signal, and the action of rank 0 if any has.
    should_stop: Callable[[], bool] = staticmethod(lambda: False)
    on_stop_request: Callable[[], None] = staticmethod(lambda: None)
    on_rank_lost: Callable[[str], None] = staticmethod(_exit_process)  # another rank does not respond; gets the reason

    def __repr__(self) -> str:  # the reference pages print it as a default
        return f"rank {self.rank} of {self.world_size}"

    @property
    def is_single_process(self) -> bool:
        """Whether this process trains without other ranks."""
        return self.world_size == 1

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0, the only rank that uses the study and writes files."""
        return self.rank == 0

    def allow_setup(self) -> None:
        """Give the collectives of the training the longer timeout of a set-up, until `begin_steps`."""

    def begin_steps(self) -> None:
        """Give the collectives of the training the timeout of steps."""

    def select_own_rows(self, rows: Rows) -> Rows:
        """Return this rank's share of the rows [n]; it is empty for some ranks if there are fewer rows than ranks."""
        return rows if self.is_single_process else rows[self.rank :: self.world_size]

    def seed_suffix(self) -> tuple[int | str, ...]:
        """Return the extra seed components of this rank; empty on rank 0, which uses the seed of a single process."""
        return ("rank", self.rank) if self.rank else ()

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place."""
        return values

    def broadcast_object(self, value: T) -> T:
        """Return the value that rank 0 passes."""
        return value

    def wait_for_rank_zero(self, value: T) -> T:
        """Return the value that rank 0 passes, without a timeout."""
        return value

    def all_gather_object(self, value: T) -> list[T]:
        """Return the values that the ranks pass, ordered by rank."""
        return [value]

    def run_on_rank_zero(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 only and return its result on all ranks; an error is raised on all ranks."""
        return work()

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors of rank 0 to all ranks, in place."""

    def all_reduce_mean(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their means over ranks, in place."""

    def make_device_mesh(self, shape: tuple[int, ...]) -> DeviceMesh:
        """Return a mesh of all ranks on their devices. Its groups have the timeouts of the training."""
        raise NotImplementedError("a single process has no mesh")

    def fail_together(self) -> AbstractContextManager[None]:
        """Return a context that all ranks leave together: if one rank fails, all raise its error or a RankLostError."""
        return nullcontext()


SINGLE_PROCESS = Ranks()
_CURRENT: dict[str, Ranks] = {}


def current_ranks() -> Ranks:
    """Return the ranks to which this process belongs."""
    return _CURRENT.get("ranks", SINGLE_PROCESS)


class _ProcessGroup(Ranks):
    """One of several ranks. The ranks connect through a store, which outlives the process group.

    Collectives over tensors on `device`, "cpu" or "cuda:N", use gloo or NCCL. All ranks must reach a collective of the
    training within `timeout` seconds, and each other collective within `barrier_timeout` seconds.
    """

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        world_size: int,
        *,
        device: str,
        timeout: float,
        barrier_timeout: float,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._device, self._timeout = store, torch.device(device), timedelta(seconds=timeout)
        self._backend = _choose_backend(self._device.type)
        self._barrier_timeout = timedelta(seconds=barrier_timeout)
        self._setup_timeout = max(self._timeout, min(self._barrier_timeout, timedelta(seconds=_SETUP_TIMEOUT_SECONDS)))
        self._generation = 0
        self._join()
        self._heartbeat = RankHeartbeat(store, rank, world_size, timeout=timeout, on_lost=self._end_process)

    def _join(self) -> None:
        self._generation += 1
        here = [f"here/{self._generation}/{rank}" for rank in range(self.world_size)]
        try:
            # A rank may still be busy, so the timeout of the first collective must start when all ranks have arrived.
            self._store.set(here[self.rank], "")
            self._store.wait(here, max(self._timeout, _JOIN_TIMEOUT))
            dist.init_process_group(
                self._backend,
                store=c10d.PrefixStore(f"group/{self._generation}", self._store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=self._setup_timeout,
            )
            self._current_timeout = self._setup_timeout
            self._meshes: dict[tuple[int, ...], DeviceMesh] = {}
            # Collectives that wait for work of another rank need separate groups with longer timeouts.
            self.cpu_group = dist.new_group(backend="gloo", timeout=self._barrier_timeout)
            self._job_group = dist.new_group(backend="gloo", timeout=_JOB_TIMEOUT)
        except RuntimeError as error:
            raise RankLostError(f"the ranks did not connect: {format_one_line(error)}") from error
        self._watched = threading.Event()
        if self._backend != "gloo":
            threading.Thread(target=self._watch, args=(self._generation, self._watched), daemon=True).start()

    def allow_setup(self) -> None:
        self._set_timeout(self._setup_timeout)

    def begin_steps(self) -> None:
        self._set_timeout(self._timeout)

    def _set_timeout(self, timeout: timedelta) -> None:
        if timeout != self._current_timeout and dist.is_initialized():
            self._current_timeout = timeout
            for group in (None, *(group for mesh in self._meshes.values() for group in mesh.get_all_groups())):
                c10d._set_pg_timeout(timeout, group)

    def make_device_mesh(self, shape: tuple[int, ...]) -> DeviceMesh:
        if shape not in self._meshes:  # later trials use the same groups
            names = [f"{name}-{self._generation}" for name in ("replicate", "shard")]  # DTensor's caches compare names
            self._meshes[shape] = init_device_mesh(self._device.type, shape, mesh_dim_names=tuple(names[-len(shape) :]))
            for group in self._meshes[shape].get_all_groups():
                c10d._set_pg_timeout(self._current_timeout, group)
        return self._meshes[shape]

    def _end_process(self, reason: str) -> None:
        self.on_rank_lost(reason)  # read now, because it is set after the start of the heartbeats

    def stop_heartbeat(self) -> None:
        """Stop the heartbeats of this rank, before its process ends."""
        self._heartbeat.stop()

    def close(self) -> None:
        """Close this rank's connections, so that the other ranks stop waiting for it."""
        self._watched.set()
        self.cpu_group = self._job_group = None
        while self._meshes:  # DTensor's caches keep meshes, which would keep their groups and the connections
            vars(self._meshes.popitem()[1]).get("_pg_registry", {}).clear()
        if self._backend != "gloo":
            _abort_collectives()
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # a custom loop may have closed the group
            dist.destroy_process_group()

    def _watch(self, number: int, over: threading.Event) -> None:
        """Abort collectives after an error of another rank, because NCCL does not detect closed connections."""
        while not over.wait(_WATCH_INTERVAL_SECONDS):
            if self._store.check([_cause_key(number)]):
                if not over.is_set():
                    _abort_collectives()
                return

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def broadcast_object(self, value: T) -> T:
        return _broadcast(value, self.cpu_group)

    def wait_for_rank_zero(self, value: T) -> T:
        return _broadcast(value, self._job_group)

    def all_gather_object(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.world_size
        _require_connections()
        dist.all_gather_object(found, value, group=self.cpu_group)
        return found

    def run_on_rank_zero(self, work: Callable[[], T]) -> T:
        if not self.is_rank_zero:
            answer: tuple[bool, Any] = self.broadcast_object((False, None))
            succeeded, result = answer
            if not succeeded:
                raise RankZeroError(result)
            return result  # type: ignore[no-any-return]  # rank 0's value, of T
        try:
            value = work()
        except BaseException as error:  # of any kind, because the other ranks wait for a result
            self.broadcast_object((False, format_one_line(error)))
            raise
        self.broadcast_object((True, value))
        return value

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        with torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def all_reduce_mean(self, tensors: Iterable[Tensor]) -> None:
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(self.all_reduce_sum(tensor.double()).div_(self.world_size))

    @contextlib.contextmanager
    def fail_together(self) -> Iterator[None]:
        # After a failure the ranks make new connections, because the old ones may hold parts of messages.
        try:
            yield
            self.all_gather_object(None)  # no rank continues while another may still fail
        except BaseException as error:  # of any kind, because the other ranks must leave too
            cause = self._cause(error)
            release_references(error)
            self.close()
            if isinstance(cause, RankLostError):
                raise cause from error
            self._join()
            if cause is error:
                raise
            raise cause from error

    def _cause(self, error: BaseException) -> BaseException:
        """Return the error to raise: the error of the rank that failed first."""
        if isinstance(error, RankLostError):
            return error
        try:
            if not is_consequence(error):
                own = to_json(error, self.rank)
                first = self._store.compare_set(_cause_key(self._generation), "", own).decode()
                return error if first == own else from_json(first, error)
            self._store.wait([_cause_key(self._generation)], timedelta(seconds=_CAUSE_TIMEOUT_SECONDS))
            return from_json(self._store.get(_cause_key(self._generation)).decode(), error)
        except RuntimeError:  # no rank stored an error, or the store is gone
            return RankLostError(f"another rank exited or did not answer in time: {format_one_line(error)}")


def _broadcast(value: T, group: Any) -> T:
    held = [value]
    _require_connections()
    dist.broadcast_object_list(held, src=0, group=group)
    return held[0]


def _require_connections() -> None:
    if not dist.is_initialized():
        raise ObjectiveError("the process group is closed, but the next trial needs it; remove destroy_process_group()")


def _cause_key(number: int) -> str:
    return f"cause/{number}"


def _abort_collectives() -> None:
    """Abort the collectives for which this process waits."""
    with contextlib.suppress(RuntimeError, ValueError):  # no collective may be pending
        c10d._abort_process_group()


def _choose_backend(device: str) -> str:
    """Return the backends for a device. With GPUs, code of the objective may also communicate CPU tensors."""
    return "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"


@contextlib.contextmanager
def init_group_of_one(device: torch.device) -> Iterator[None]:
    """Return a context with a process group of this process, for scripts that use `torch.distributed` on one device.

    If a process group exists, the context uses it.
    """
    if dist.is_initialized():
        yield
        return
    interface = "GLOO_SOCKET_IFNAME" not in os.environ and sys.platform == "linux"
    if interface:  # otherwise gloo looks up the host's name, which may fail
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(_choose_backend(device.type), store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # no export
    finally:
        if interface:
            del os.environ["GLOO_SOCKET_IFNAME"]
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # the loop may have closed the group
            dist.destroy_process_group()


@contextlib.contextmanager
def init_process_group(
    *,
    device: str = "cpu",
    timeout: float = TIMEOUT_SECONDS,
    barrier_timeout: float = BARRIER_TIMEOUT_SECONDS,
    store_path: Path | None = None,
) -> Iterator[Ranks]:
    """Join the ranks that torchrun's environment variables describe; in the context, `current_ranks` returns them.

    Args:
        device: this rank's training device, "cpu" or "cuda:N".
        timeout: seconds within which all ranks must reach a collective of the training, and within which each rank must
            respond. Before the first step, the ranks have up to 300 s for a collective.
        barrier_timeout: seconds within which all ranks must reach any other collective, such as a wait for a rank that
            loads data or saves.
        store_path: file in a private folder, through which the ranks of one machine connect. None uses `MASTER_ADDR`
            and `MASTER_PORT`, a port that other users may reach.

    Raises:
        RankLostError: another rank does not join.
    """
    store: c10d.Store
    if store_path is None:
        store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=max(timeout, TIMEOUT_SECONDS))))
    else:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(str(store_path), world_size)  # type: ignore[attr-defined]  # torch declares no export
        for library in ("GLOO", "NCCL"):  # other machines cannot connect to the loopback interface
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    group = _ProcessGroup(
        c10d.PrefixStore("ranks", store),
        rank,
        world_size,
        device=device,
        timeout=timeout,
        barrier_timeout=barrier_timeout,
    )
    _CURRENT["ranks"] = group
    try:
        yield group
    finally:
        _CURRENT.clear()
        group.stop_heartbeat()
        group.close()
