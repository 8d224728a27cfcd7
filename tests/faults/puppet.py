"""A real worker on strings: between any two steps of its own it can be made to die, freeze or wait.

The product has no hooks for this: functions are wrapped from outside before its command line is run.
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

from hpsearch.search.process import exit_on_signals
from tests.faults import orders

# The steps of a worker, in their order.
POINTS = {
    "rehearse": ("hpsearch.search.study.create", "rehearse"),
    "give up": ("hpsearch.search.study.stop_when", "give_up"),
    "in claim": ("hpsearch.storage.trials.claims", "Claims._take"),
    "claim": ("hpsearch.storage.trials.claims", "Claims.claim"),
    "append": ("hpsearch.storage.journals.journal", "Journal.append"),
    "open run": ("hpsearch.search.tracking.trial_run", "TrialTracking.open"),
    "log params": ("hpsearch.search.tracking.trial_run", "TrialTracking.log_params"),
    "restore": ("hpsearch.search.worker.checkpoints", "TrialCheckpoints.restore"),
    "bring": ("hpsearch.search.worker.checkpoints", "TrialCheckpoints._bring"),
    "epoch": ("hpsearch.objectives.training.trainer", "train_epoch"),
    "shards": ("hpsearch.objectives.training.strategies.shards", "write"),
    "save": ("hpsearch.objectives.training.reproducibility.checkpoint", "RunFiles.save"),
    "write": ("hpsearch.objectives.training.reproducibility.checkpoint", "_save"),
    "put": ("hpsearch.storage.checkpoints.store", "Checkpoints.put"),
    "report": ("hpsearch.storage.trials.claims", "Claims.report"),
    "keep": ("hpsearch.storage.trials.claims", "Claims.keep"),
    "reach": ("hpsearch.storage.trials.claims", "Claims.reach"),
    "retired": ("hpsearch.search.tracking.tracker", "Tracker.retired"),
    "committed": ("hpsearch.search.worker.checkpoints", "TrialCheckpoints.committed"),
    "publish": ("hpsearch.search.tracking.trial_run", "TrialTracking.publish"),
    "model": ("hpsearch.search.tracking.trial_run", "TrialTracking._log_model"),
    "settle": ("hpsearch.storage.trials.claims", "Claims.settle"),
    "finish": ("hpsearch.search.tracking.trial_run", "TrialTracking.finish"),
    "forget": ("hpsearch.search.worker.checkpoints", "TrialCheckpoints.forget"),
    "score test": ("hpsearch.objectives.training.checks.held_out", "Restored.test"),
    "drop pointers": ("hpsearch.search.study.checkpoints", "drop_pointers"),
}

# The steps of its sender, which is at work on a trial of its own choice.
SENDING = {
    "ship": ("hpsearch.storage.mlflow.shipper", "Shipper.tell"),
    "create run": ("hpsearch.storage.mlflow.client", "Tracking.create_trial_run"),
    "note run": ("hpsearch.storage.mlflow.run_links", "TrialLinks.note"),
    "send": ("hpsearch.storage.mlflow.shipper", "Shipper._log"),
    "shipped": ("hpsearch.storage.journals.journal", "Place.moved"),
    "upload": ("mlflow", "MlflowClient.log_artifacts"),
    "create model": ("hpsearch.storage.mlflow.shipper", "create_model"),
    "upload model": ("hpsearch.storage.mlflow.model", "upload_model"),
    "end run": ("hpsearch.storage.mlflow.client", "Tracking.end_trial_run"),
    "delivered": ("hpsearch.storage.mlflow.run_links", "RunLinks.delivered"),
    "write events": ("hpsearch.storage.tensorboard.files", "EventFiles.flush"),
    "tell a run": ("hpsearch.storage.wandb_runs.reader", "WandbRuns._ask"),
}


def main(arguments: list[str]) -> int:
    """Wrap the steps, and run the command line."""
    exit_on_signals()
    spare(models_but_of=json.loads(os.environ.get("MODELS_OF", "null")))
    for name, (module, attribute) in {**POINTS, **SENDING}.items():
        wrap(module, attribute, at(name))
    wrap("hpsearch.storage.trials.claims", "Claims.claim", follow_claims)
    wrap("hpsearch.search.worker.ranks", "_next", follow_jobs)
    wrap("hpsearch.storage.journals.reader", "Reader.ship", follow_sender)
    wrap("hpsearch.objectives.training.trainer", "train_epoch", follow_epochs)
    wrap("hpsearch.objectives.training.loop.epoch", "train_step", follow_steps)
    wrap("hpsearch.storage.trials.claims", "Claims.report", follow_reports)
    if least := os.environ.get("STALL_LEAST"):
        from hpsearch.search.worker import watchdog

        watchdog.LEAST = float(least)
    if offset := float(os.environ.get("CLOCK_OFFSET", "0")):
        shift_clock(offset)
    from hpsearch.search.cli import run_command

    return run_command(arguments)


def wrap(module: str, attribute: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put a wrapper around a function of a module or a method of a class."""
    owner: Any = importlib.import_module(module)
    *path, name = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrapper(original)))


def at(point: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if point == "give up":  # between two trials
                orders.arrive(None, None)
            orders.obey(point, "before")
            result = original(*args, **kwargs)
            if point in {"claim", "in claim"}:
                orders.arrive(getattr(result, "number", None), getattr(result, "attempt", None))
            orders.obey(point, "after")
            return result

        return call

    return wrapper


def follow_claims(original: Callable[..., Any]) -> Callable[..., Any]:
    def claim(*args: Any, **kwargs: Any) -> Any:
        orders.arrive(None, None)
        result = original(*args, **kwargs)
        orders.note("claimed")
        return result

    return claim


def follow_jobs(original: Callable[..., Any]) -> Callable[..., Any]:
    def next_job(*args: Any, **kwargs: Any) -> Any:
        job = original(*args, **kwargs)
        orders.arrive(getattr(job, "trial", None), getattr(job, "attempt", None))
        return job

    return next_job


def follow_sender(original: Callable[..., Any]) -> Callable[..., Any]:
    def ship(self: Any, place: Any) -> Any:
        head = place.journal.head
        orders.Sending.trial, orders.Sending.attempt = head.number, head.attempt
        try:
            return original(self, place)
        finally:
            orders.Sending.trial = None

    return ship


def follow_epochs(original: Callable[..., Any]) -> Callable[..., Any]:
    def train_epoch(run: Any, epoch: int, *within: Any) -> Any:
        orders.Here.epoch = epoch
        orders.note("training", epoch=epoch)
        time.sleep(float(os.environ.get("PACE", "0")))
        return original(run, epoch, *within)

    return train_epoch


def follow_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """With STEP_PACE a step takes so many seconds, and is written down."""
    if "STEP_PACE" not in os.environ:
        return original

    def train_step(run: Any, *arguments: Any) -> Any:
        if not orders.in_epoch():  # the objective is tried out
            return original(run, *arguments)
        time.sleep(float(os.environ["STEP_PACE"]))
        result = original(run, *arguments)
        orders.note("step", step=run.step)
        return result

    return train_step


def follow_reports(original: Callable[..., Any]) -> Callable[..., Any]:
    def report(self: Any, claim: Any, step: int, value: float, *args: Any, **named: Any) -> Any:
        result = original(self, claim, step, value, *args, **named)
        orders.note("reported", epoch=step, value=value.hex())
        return result

    return report


def shift_clock(offset: float) -> None:
    """Let this process's clock go wrong by so many seconds."""
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


def spare(*, models_but_of: list[int] | None) -> None:
    """Leave out what costs most and is nothing that a fault could harm: plots, the smoke test, and exported models."""
    from hpsearch.objectives.training.reports import run_dir
    from hpsearch.search.run import search
    from hpsearch.search.tracking.trial_run import TrialTracking

    run_dir.curves = run_dir.gradient_flow = lambda *_args, **_kwargs: None  # type: ignore[assignment]
    search.smoke_test = lambda *_: None
    log_model = TrialTracking._log_model

    def of_some(self: TrialTracking, result: Any) -> None:
        if models_but_of is None or self._claim.number in models_but_of:
            log_model(self, result)

    TrialTracking._log_model = of_some  # type: ignore[method-assign]
