"""Orders in a file: the points of trials at which a worker dies, freezes, raises or waits.

ORDERS names a folder with `orders.json`. What was obeyed leaves a file `obeyed-N` there, and what the worker does is
written to `log.jsonl`, a line an event, by CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from hpsearch.kill_points import KILL_POINTS

# The places in the objectives of the tests follow the steps of the product.
PLACES = {
    *KILL_POINTS,
    *("prepare", "suggest", "data", "model", "before the first step", "loading", "training", "evaluation"),
    "before report",
}
OUTSIDE = -1  # no trial: for points of a command outside of trials


@dataclass(frozen=True)
class Order:
    """An action at a point.

    Attributes:
        point: a name in `hpsearch.kill_points`, or a place in the objective's own code.
        action: a key of `ACTIONS`.
        trial, attempt: the attempt of the trial, or `OUTSIDE` of trials; attempt 0 is any.
        epoch: the epoch; None is any.
        when: `before` or `after` the point.
        nth: the number of the passing of the point, counted from 1 in each attempt.
        rank: the process among those that train a trial together.
    """

    point: str
    action: str
    trial: int
    attempt: int = 1
    epoch: int | None = None
    when: str = "before"
    nth: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        assert self.point in PLACES, self.point


class _Sending(threading.local):
    """The attempt whose journal the sender's thread sends now."""

    trial: int | None = None
    attempt: int | None = None


Sending = _Sending()


class Here:
    """The trial, attempt and epoch of this process."""

    trial: int | None = None
    attempt: int | None = None
    epoch: int | None = None
    passed: ClassVar[dict[int, int]] = {}


def rank() -> int:
    """Return the rank of this process among those that train a trial together."""
    return int(os.environ.get("RANK", "0"))


def folder() -> Path | None:
    return Path(os.environ["ORDERS"]) if "ORDERS" in os.environ else None


@functools.cache
def read() -> list[Order]:
    where = folder()
    return [] if where is None else [Order(**line) for line in json.loads((where / "orders.json").read_text())]


def write(where: Path, orders: list[Order]) -> None:
    where.mkdir(parents=True, exist_ok=True)
    (where / "orders.json").write_text(json.dumps([asdict(order) for order in orders]))


def arrive(trial: int | None, attempt: int | None) -> None:
    """Start an attempt, or end it if `trial` is None."""
    if (trial, attempt) != (Here.trial, Here.attempt):
        Here.trial, Here.attempt, Here.epoch, Here.passed = trial, attempt, None, {}


def in_epoch() -> bool:
    """Return whether an attempt trains."""
    return Here.trial is not None and Here.epoch is not None


def obey(point: str, when: str = "before") -> None:
    """Execute the orders for this point."""
    at = Sending if Sending.trial is not None else Here
    for index, order in enumerate(read()):
        number, attempt = (at.trial, at.attempt) if at.trial is not None else (OUTSIDE, at.attempt)
        if (order.point, order.when, order.rank) != (point, when, rank()):
            continue
        if order.trial != number or order.attempt not in {0, attempt}:
            continue
        if at is Here and order.epoch not in {None, Here.epoch}:
            continue
        Here.passed[index] = Here.passed.get(index, 0) + 1
        if Here.passed[index] == order.nth:
            where = folder()
            assert where is not None
            if (order.attempt or at is Sending) and (where / f"obeyed-{index}").exists():
                continue  # a claim that was not committed is repeated
            written = where / f"obeyed-{index}-{os.getpid()}"
            written.write_text(str(os.getpid()))
            written.rename(where / f"obeyed-{index}")  # atomic: a reader of this file finds the process id in it
            ACTIONS[order.action](where)


def note(event: str, **values: Any) -> None:
    """Write an event to the log."""
    if (where := folder()) is None:
        return
    line = {"event": event, "pid": os.getpid(), "at": time.monotonic(), "trial": Here.trial, "attempt": Here.attempt}
    line["rank"] = rank()
    with (where / "log.jsonl").open("a") as file:
        file.write(json.dumps({**line, **values}) + "\n")


DISK = 12_000  # bytes in a file: checkpoints of the scripted network have twice as many, other files fewer


def _raise(_: Path) -> None:
    logging.getLogger("layers").info("reaching for a layer")
    raise KeyError("no such layer")


def _freeze(_: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.1)  # the signal may reach another thread first; this one must not continue meanwhile


def _allocate(_: Path) -> None:
    import torch

    torch.empty(1 << 60)


def _await(name: str, where: Path) -> None:
    while not (where / name).exists():
        time.sleep(0.01)


def _fill_disk(_: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (DISK, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _fill_outbox(_: Path) -> None:
    """Leave no disk space for any file. Other files need space too, so this is for a moment only."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _free_disk(_: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)


def _no_space(_: Path) -> None:
    try:
        raise OSError(errno.ENOSPC, "No space left on device", "cache.npy")
    except OSError as error:
        raise RuntimeError("the cache cannot be written") from error


def _away(_: Path) -> None:
    raise OSError(errno.EIO, "Input/output error")


ACTIONS: dict[str, Callable[[Path], Any]] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": _freeze,
    "terminate": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "raise": _raise,
    "exit": lambda _: sys.exit(3),
    "allocate": _allocate,
    "sleep": lambda _: time.sleep(1.5 * float(os.environ["HPSEARCH_LEASE"])),
    "hang": functools.partial(_await, "open"),
    "hang until mended": functools.partial(_await, "mended"),
    "fill the disk": _fill_disk,
    "fill the outbox": _fill_outbox,
    "free the disk": _free_disk,
    "no space": _no_space,
    "input/output error": _away,
}
