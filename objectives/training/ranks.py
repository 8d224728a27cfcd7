"""The processes that train one trial together, a device each: ranks. This module alone speaks to torch.distributed."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from hpsearch.objectives.errors import ObjectiveError

T = TypeVar("T")

TIMEOUT = 30.0  # seconds in which all ranks have to come to a collective of the training itself
_PATIENT = timedelta(days=7)  # for those that wait for rank 0, which may load data or store a model meanwhile
_MEETING = timedelta(minutes=30)  # for ranks to come together: one may load data yet
_TELLING = 5.0  # seconds that a rank which failed has to say why
_LOOKED = 1.0  # seconds between two looks whether one did, where connections do not break by themselves


class RankLostError(RuntimeError):
    """A rank is gone, or does not answer: the ranks that are left cannot go on, and their processes have to end."""


class RankError(RuntimeError):
    """Another rank failed; the message has its reason."""


class _LedError(RuntimeError):
    """Rank 0 failed in what it does for all."""


class Ranks:
    """The interface of a process to the others that train with it; here, a process that trains alone."""

    rank = 0
    world = 1
    control: Any = None  # torch's group of connections between CPUs, without a time limit; None in one process
    # Whether this rank's process is told to go, and what rank 0 does when another's is: by whoever runs the process.
    told_to_go: Callable[[], bool] = staticmethod(lambda: False)
    on_told_to_go: Callable[[], None] = staticmethod(lambda: None)

    def __repr__(self) -> str:  # stands in the reference pages as a default
        return f"rank {self.rank} of {self.world}"

    @property
    def alone(self) -> bool:
        """Whether there is one process."""
        return self.world == 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which alone speaks to the study and writes files."""
        return self.rank == 0

    def share(self, rows: Tensor) -> Tensor:
        """Which of the rows [n] are this rank's; none where there are fewer rows than ranks."""
        return rows if self.alone else rows[self.rank :: self.world]

    def purpose(self) -> tuple[int | str, ...]:
        """What the purpose of a seed has beside, where ranks draw apart: rank 0 draws as one process does."""
        return ("rank", self.rank) if self.rank else ()

    def total(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        return values

    def told(self, value: T) -> T:
        """Rank 0's value."""
        return value

    def each(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        return [value]

    def led(self, work: Callable[[], T]) -> T:
        """What rank 0's work comes to; the others do none, and what it raises ends them too."""
        return work()

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Gives every rank the tensors of rank 0, in place."""

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Gives every rank the mean over ranks, in place."""

    def together(self) -> AbstractContextManager[None]:
        """Return a context that all ranks leave together: if one fails, all raise its error, or a RankLostError."""
        return nullcontext()


ALONE = Ranks()
_HERE: dict[str, Ranks] = {}


def current() -> Ranks:
    """The ranks that this process is one of."""
    return _HERE.get("ranks", ALONE)


class _Group(Ranks):
    """One of several ranks, which meet in a store that outlives them.

    `backend` is that of the collectives over tensors, "gloo" or "nccl" for GPUs; all ranks have to come to one within
    `timeout` seconds.
    """

    def __init__(self, store: distributed_c10d.Store, rank: int, world: int, *, backend: str, timeout: float) -> None:
        self.rank, self.world = rank, world
        self._store, self._backend, self._timeout = store, backend, timedelta(seconds=timeout)
        self._number = 0
        self._join()

    def _join(self) -> None:
        self._number += 1
        here = [f"here/{self._number}/{rank}" for rank in range(self.world)]
        try:
            # One may be busy with what it did alone: the time for a collective begins when all are there.
            self._store.set(here[self.rank], "")
            self._store.wait(here, max(self._timeout, _MEETING))
            dist.init_process_group(
                self._backend,
                store=distributed_c10d.PrefixStore(f"group/{self._number}", self._store),
                rank=self.rank,
                world_size=self.world,
                timeout=self._timeout,
            )
            # What waits for rank 0 has a group of its own, on the CPU: it may take as long as rank 0 does.
            self.control = dist.new_group(backend="gloo", timeout=_PATIENT)
        except RuntimeError as error:
            raise RankLostError(f"the ranks did not meet: {_line(error)}") from error
        self._watched = threading.Event()
        if self._backend != "gloo":
            threading.Thread(target=self._watch, args=(self._number, self._watched), daemon=True).start()

    def close(self) -> None:
        """Close this rank's connections, which ends the wait of other ranks for it."""
        self._watched.set()
        self.control = None
        if self._backend != "gloo":
            _abort()
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # somebody's loop may have done so
            dist.destroy_process_group()

    def _watch(self, number: int, over: threading.Event) -> None:
        """Ends collectives that do not learn of a closed connection, as those of NCCL."""
        while not over.wait(_LOOKED):
            if self._store.check([_key(number)]):
                if not over.is_set():
                    _abort()
                return

    def total(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def told(self, value: T) -> T:
        held = [value]
        _require_connections()
        dist.broadcast_object_list(held, src=0, group=self.control)
        return held[0]

    def each(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.world
        _require_connections()
        dist.all_gather_object(found, value, group=self.control)
        return found

    def led(self, work: Callable[[], T]) -> T:
        if not self.first:
            answer: tuple[bool, Any] = self.told((False, None))
            done, said = answer
            if not done:
                raise _LedError(said)
            return said  # type: ignore[no-any-return]  # rank 0's value, of T
        try:
            value = work()
        except BaseException as error:  # whatever it is: the others wait for an answer
            self.told((False, _line(error)))
            raise
        self.told((True, value))
        return value

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        with torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def average(self, tensors: Iterable[Tensor]) -> None:
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(self.total(tensor.double()).div_(self.world))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        # After a failure the ranks make new connections, because the old ones may hold parts of messages.
        try:
            yield
            self.each(None)  # no rank continues while another may still fail
        except BaseException as error:  # whatever it is: the others are to leave as well
            cause = self._cause(error)
            _let_go(error)
            self.close()
            if isinstance(cause, RankLostError):
                raise cause from error
            self._join()
            if cause is error:
                raise
            raise cause from error

    def _cause(self, error: BaseException) -> BaseException:
        """What ended the ranks: the error, or that of the rank which failed first."""
        if isinstance(error, RankLostError):
            return error
        try:
            if not _follows(error):
                own = _described(error, self.rank)
                first = self._store.compare_set(_key(self._number), "", own).decode()
                return error if first == own else _told(first, error)
            self._store.wait([_key(self._number)], timedelta(seconds=_TELLING))
            return _told(self._store.get(_key(self._number)).decode(), error)
        except RuntimeError:  # nobody said anything, or there is no store
            seconds = self._timeout.total_seconds()
            return RankLostError(f"another rank is gone, or does not answer ({seconds:g} s at most): {_line(error)}")


def _require_connections() -> None:
    if not dist.is_initialized():
        raise ObjectiveError(
            "the connections of the ranks are closed: leave out destroy_process_group(), the next trial needs them"
        )


def _let_go(error: BaseException) -> None:
    """Forgets what the code that failed held: a connection that something refers to is not closed.

    Gloo's are closed with the last reference alone, and the others wait for that.
    """
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)
    gc.collect()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Iterate over an error and its causes."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _key(number: int) -> str:
    return f"cause/{number}"


def _abort() -> None:
    """Ends the collectives that this process waits in."""
    with contextlib.suppress(RuntimeError, ValueError):  # there may be nothing left to end
        distributed_c10d._abort_process_group()


def _follows(error: BaseException) -> bool:
    """Whether an error is only that another rank has left: also where somebody's code made one of its own of it."""
    return any(
        isinstance(each, (_LedError, dist.DistError)) or (isinstance(each, RuntimeError) and "gloo" in str(each))
        for each in _chain(error)
    )


def _described(error: BaseException, rank: int) -> str:
    """An error as JSON: what is needed to raise it on other ranks."""
    kind = type(error)
    plain = {k: v for k, v in vars(error).items() if isinstance(v, (str, int, float, bool, type(None)))}
    described = {"rank": rank, "module": kind.__module__, "name": kind.__qualname__, "text": str(error), "held": plain}
    return json.dumps(described)


def _told(described: str, own: BaseException) -> BaseException:
    """The error of another rank; this rank's own where it is the same."""
    said = json.loads(described)
    if said["name"] == type(own).__qualname__ and said["text"] == str(own):
        return own
    text = f"{said['text']} (on rank {said['rank']})"
    if not said["module"].startswith("hpsearch.objectives."):
        return RankError(f"{said['name']}: {text}")
    kind = getattr(importlib.import_module(said["module"]), said["name"], RankError)
    error: BaseException = kind.__new__(kind)
    error.args = (text,)
    vars(error).update(said["held"])
    return error


def _line(error: BaseException) -> str:
    """What an error says, in a line, without the place in gloo's source."""
    said = re.sub(r"\[/\S*gloo/\S+\] ", "", str(error))
    return " ".join(f"{type(error).__name__}: {said}".split())[:500]


@contextlib.contextmanager
def joined(*, device: str = "cpu", timeout: float = TIMEOUT, place: Path | None = None) -> Iterator[Ranks]:
    """Join the ranks of torch's launcher, by its environment variables; within the context they are `current`.

    Args:
        device: the training device, "cpu" or "cuda".
        timeout: seconds in which all ranks have to come to a collective of the training.
        place: a file in a folder of the user, by which ranks of one machine meet. None uses `MASTER_ADDR` and
            `MASTER_PORT`, a port that other users may reach.

    Raises:
        RankLostError: another rank does not come.
    """
    store: distributed_c10d.Store
    if place is None:
        store, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=max(timeout, TIMEOUT))))
    else:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(str(place), world)  # type: ignore[attr-defined]  # torch declares no export
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    backend = "nccl" if device.startswith("cuda") else "gloo"
    group = _Group(distributed_c10d.PrefixStore("ranks", store), rank, world, backend=backend, timeout=timeout)
    _HERE["ranks"] = group
    try:
        yield group
    finally:
        _HERE.clear()
        group.close()
