"""Named steps at which a test can stop a process.

A function that implements a step is decorated with `kill_point` and the name of the step. The fault tests install a
callback that runs the step, and kills or suspends the process before or after the step. Without a callback, the
decorator has no effect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar, get_args

P = ParamSpec("P")
R = TypeVar("R")

KillPoint = Literal[
    # a worker, in the order of a trial
    "preflight check",
    "receive job",
    "stop early",
    "claim",
    "write claim",
    "append to journal",
    "log params",
    "restore checkpoint",
    "fetch checkpoint",
    "train epoch",
    "save checkpoint",
    "write shards",
    "write checkpoint file",
    "upload checkpoint",
    "report",
    "record mid-epoch checkpoint",
    "remove superseded checkpoints",
    "reach rung",
    "log retired trial",
    "publish run",
    "log model",
    "record outcome",
    "finish run",
    "remove checkpoints",
    "drop checkpoint pointers",
    "evaluate test set",
    # the sender of its journals
    "send records",
    "create run",
    "record run",
    "log batch",
    "record position",
    "upload files",
    "create model",
    "upload model",
    "end run",
    "record delivery",
    "write events",
]
KILL_POINTS: tuple[KillPoint, ...] = get_args(KillPoint)

Callback = Callable[[KillPoint, "functools.partial[Any]"], Any]
_callback: Callback | None = None


def install(callback: Callback) -> None:
    """Install the callback of this process: each step calls `callback(name, step)`, which returns `step()`."""
    global _callback  # noqa: PLW0603 one test harness per process
    _callback = callback


def kill_point(name: KillPoint) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that marks a function as the kill point `name`, where tests interrupt the process."""

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def step(*args: P.args, **kwargs: P.kwargs) -> R:
            if _callback is None:
                return function(*args, **kwargs)
            result: R = _callback(name, functools.partial(function, *args, **kwargs))
            return result

        return step

    return mark
