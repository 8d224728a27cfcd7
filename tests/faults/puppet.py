"""A real worker that can die, freeze or wait before or after any of its steps.

The product names its steps in `hpsearch.kill_points`; a callback runs them here.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from hpsearch import kill_points
from hpsearch.kill_points import KillPoint
from hpsearch.search.process.signals import exit_on_signals
from tests.faults import orders


def main(arguments: list[str]) -> int:
    """Install the callback, and run the command line."""
    exit_on_signals()
    spare()
    kill_points.install(run_step)
    wrap("hpsearch.storage.journals.consumer", "Consumer.consume", follow_sender)
    wrap("hpsearch.objectives.training.loop.epoch", "train_step", follow_steps)
    if least := os.environ.get("STALL_LEAST"):
        from hpsearch.search.worker import watchdog

        watchdog.MIN_PAUSE_SECONDS = float(least)
    if offset := float(os.environ.get("CLOCK_OFFSET", "0")):
        shift_clock(offset)
    from hpsearch.search.cli import run_command

    return run_command(arguments)


def wrap(module: str, attribute: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap a function of a module or a method of a class."""
    owner: Any = importlib.import_module(module)
    *path, name = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrapper(original)))


def run_step(point: KillPoint, step: functools.partial[Any]) -> Any:
    """Run a step of the worker; obey the orders for the time before and after it."""
    if point in {"stop early", "claim"}:  # between two trials
        orders.arrive(None, None)
    elif point == "train epoch":
        orders.Here.epoch = step.args[1]
        orders.note("training", epoch=orders.Here.epoch)
        time.sleep(float(os.environ.get("PACE", "0")))
    orders.obey(point, "before")
    result = None if point == "log model" and not wants_model() else step()
    if point in {"claim", "write claim"}:
        orders.arrive(getattr(result, "number", None), getattr(result, "attempt", None))
    elif point == "receive job":
        orders.arrive(getattr(result, "trial", None), getattr(result, "attempt", None))
    orders.obey(point, "after")
    if point == "claim":
        orders.note("claimed")
    elif point == "report":
        epoch, value = step.args[2:4]
        orders.note("reported", epoch=epoch, value=value.hex())
    return result


def wants_model() -> bool:
    """Return whether the trial's model is exported. The export is slow, and few tests need it."""
    numbers = json.loads(os.environ.get("MODELS_OF", "null"))
    return numbers is None or orders.Here.trial in numbers


def follow_sender(original: Callable[..., Any]) -> Callable[..., Any]:
    def consume(self: Any, cursor: Any) -> Any:
        header = cursor.journal.header
        orders.Sending.trial, orders.Sending.attempt = header.number, header.attempt
        try:
            return original(self, cursor)
        finally:
            orders.Sending.trial = None

    return consume


def follow_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let each step take STEP_PACE seconds, if this is set, and log it."""
    if "STEP_PACE" not in os.environ:
        return original

    def train_step(run: Any, *arguments: Any) -> Any:
        if not orders.in_epoch():  # the check of the objective before the first trial
            return original(run, *arguments)
        time.sleep(float(os.environ["STEP_PACE"]))
        result = original(run, *arguments)
        orders.note("step", step=run.step)
        return result

    return train_step


def shift_clock(offset: float) -> None:
    """Shift this process's clock by `offset` seconds."""
    real_time, real = time.time, datetime.datetime

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, real)

    class Shifted(real, metaclass=Kind):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return real.fromtimestamp(time.time(), tz)

        @classmethod
        def utcnow(cls) -> Any:
            return real.fromtimestamp(time.time(), datetime.UTC).replace(tzinfo=None)

    time.time = lambda: real_time() + offset
    time.time_ns = lambda: int(time.time() * 1e9)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").split(".")[0] in {"optuna", "hpsearch", "datetime"}:
            for name, value in list(vars(module).items()):
                if value is real:
                    setattr(module, name, Shifted)


def spare() -> None:
    """Skip plots and the smoke test, which are slow and not affected by faults."""
    from hpsearch.objectives.training.reports import run_dir
    from hpsearch.search.run import search

    run_dir.plot_curves = run_dir.plot_gradient_norms = lambda *_args, **_kwargs: None  # type: ignore[assignment]
    search.smoke_test = lambda *_, **__: None
