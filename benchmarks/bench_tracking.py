"""Compare the cost of tracking with that of MLflow's fluent API as tutorials use it, on the same server in one run.

    python -m benchmarks.bench_tracking [--quick] [--workers N ...] [--kinds KIND ...]

Each worker process runs trials of 10 epochs of digits, one after the other, of each of these kinds:

- `ours`: `TrialTracking`, with everything that a trial of hpsearch logs, and its files;
- `fluent`: `start_run`, `log_params`, `log_metrics` after each epoch, `log_artifact` of the best checkpoint, and
  `log_model` with an input example;
- `careful`: the same with explicit requirements of the model, so that MLflow need not load the model in a separate
  process to infer them;
- `none`: no tracking;
- `tensorboard`, `wandb`, only if --kinds names them: `ours`, logging to that system as well as to MLflow (Weights &
  Biases in offline mode).

Everything else is the same: the claim of the trial, the training, the files of its run directory. "Tracking time" is
the time of the training thread in calls of the tracker. The cost of a trial is its excess over one without tracking:
wall time of a worker until everything has arrived at the server, and CPU time of its process and child processes. Each
process runs a trial first to warm up.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import mlflow
import numpy as np
import psutil

from benchmarks.bench_search import REQUIREMENTS, clean_environment, log_progress, services
from hpsearch import EpochRecord, FitResult, LocalSession, TrainConfig, Trainer, Verdict
from hpsearch.objectives.builtin.digits import Digits
from hpsearch.search.console import PlainConsole
from hpsearch.search.fleet.cores_and_gpus import count_cores, thread_environment
from hpsearch.search.samplers.suggest import suggest
from hpsearch.search.services import DASHBOARD_COMMAND
from hpsearch.search.study.checkpoints import open_checkpoints
from hpsearch.search.study.create import begin_search
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.search.tracking.tracker import Tracker
from hpsearch.search.tracking.trial_run import TrialTracking
from hpsearch.storage.embedded import stack
from hpsearch.storage.home import prepare_home
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome

EPOCHS = 10
CONFIG = TrainConfig(lr=3e-3, batch_size=64, model={"kind": "mlp", "layers": 2, "width": 128, "dropout": 0.1})
KINDS = ("ours", "fluent", "careful", "none")
SECOND = {"tensorboard": "{home}/events", "wandb": "bench"}  # setting that adds a tracking system to MLflow


class Way(Protocol):
    """The calls of a tracker by a trial."""

    def start(self, claim: Claim) -> None: ...
    def epoch(self, record: EpochRecord) -> None: ...
    def end(self, result: FitResult, files: list[Path]) -> None: ...
    def drain(self) -> None: ...


class Ours:
    def __init__(self, study: StoredStudy, uri: str) -> None:
        home = prepare_home(None)
        self.handle = study
        self.tracker = Tracker(study, Tracking(uri), open_checkpoints(study, home, None), home)
        self.tracker.sender.start()

    def start(self, claim: Claim) -> None:
        self.trial = TrialTracking(self.tracker, self.handle, claim)
        self.trial.open()
        self.trial.log_params(self.handle.storage.get_trial(claim.trial_id).params)

    def epoch(self, record: EpochRecord) -> None:
        self.trial.log_epoch(record.epoch, record.timestamp, record.metrics)

    def end(self, result: FitResult, files: list[Path]) -> None:
        self.trial.publish(result, files)
        self.trial.finish(Outcome.COMPLETE, "as good as it gets")

    def drain(self) -> None:
        left = self.tracker.sender.flush(600.0)
        assert left == 0, f"{left} trials have not arrived"


class Fluent:
    def __init__(self, study: StoredStudy, uri: str, requirements: list[str] | None) -> None:
        self.storage, self.requirements = study.storage, requirements
        mlflow.set_tracking_uri(uri)
        mlflow.set_experiment("fluent")

    def start(self, claim: Claim) -> None:
        mlflow.start_run(run_name=f"trial-{claim.number}")
        mlflow.log_params(self.storage.get_trial(claim.trial_id).params)

    def epoch(self, record: EpochRecord) -> None:
        mlflow.log_metrics(record.metrics, step=record.epoch)

    def end(self, result: FitResult, files: list[Path]) -> None:
        mlflow.log_artifact(str(result.best_path))
        mlflow.pytorch.log_model(
            result.model, name="model", input_example=result.example.x.numpy(), pip_requirements=self.requirements
        )
        mlflow.end_run()

    def drain(self) -> None:
        """Do nothing: every call has waited for the server."""


class Untracked:
    def start(self, claim: Claim) -> None: ...
    def epoch(self, record: EpochRecord) -> None: ...
    def end(self, result: FitResult, files: list[Path]) -> None: ...
    def drain(self) -> None: ...


def make_tracker(kind: str, study: StoredStudy, uri: str) -> Way:
    match kind:
        case "ours" | "tensorboard" | "wandb":
            return Ours(study, uri)
        case "none":
            return Untracked()
        case _:
            return Fluent(study, uri, REQUIREMENTS if kind == "careful" else None)


@dataclass
class Times:
    """The measurements of a worker, in seconds."""

    epochs: list[float] = field(default_factory=list)  # tracking on the training thread, per epoch
    trials: list[float] = field(default_factory=list)  # the same, per trial
    wall: float = 0.0
    cpu: float = 0.0

    @contextmanager
    def spent(self, of: list[float]) -> Iterator[None]:
        started = time.perf_counter()
        yield
        of.append(time.perf_counter() - started)


class Session(LocalSession):
    """A session that keeps files as a worker's session does, and logs epochs with the tracker."""

    def __init__(self, run_dir: Path, tracker: Way, times: Times) -> None:
        super().__init__(run_dir)
        self.tracker, self.times, self.logged = tracker, times, list[Path]()

    def report(self, record: EpochRecord) -> Verdict:
        with self.times.spent(self.times.epochs):
            self.tracker.epoch(record)
        return super().report(record)

    def log(self, path: Path) -> None:
        self.logged.append(path)


class Worker:
    """A worker that runs trials of one kind."""

    def __init__(self, kind: str, url: str, uri: str, study: str, folder: Path) -> None:
        self.handle = load_study(open_storage(url, application_name="bench"), study)
        self.study, self.folder = self.handle.open(), folder
        self.claims = Claims(self.handle.engine, self.handle.study_id, worker=f"bench-{os.getpid()}")
        self.tracker = make_tracker(kind, self.handle, uri)

    def trial(self, times: Times) -> None:
        claim = self.claims.claim()
        assert isinstance(claim, Claim)
        around: list[float] = []
        with self.handle.storage.hold_trial(claim.trial_id, claim.attempt):
            suggest(Digits(), self.study, claim, self.handle.spec)
            with times.spent(around):
                self.tracker.start(claim)
            session = Session(self.folder / f"{claim.number}", self.tracker, times)
            result = Trainer(Digits(), CONFIG, epochs=EPOCHS, seed=claim.number, session=session).fit()
            with times.spent(around):
                self.tracker.end(result, session.logged)
            self.claims.finish_attempt(claim, Outcome.COMPLETE, value=result.best_value)
        times.trials.append(sum(around) + sum(times.epochs[-EPOCHS:]))

    def run(self, trials: int) -> Times:
        times, cpu, started = Times(), cpu_time(), time.perf_counter()
        for _ in range(trials):
            self.trial(times)
        self.tracker.drain()
        times.wall, times.cpu = time.perf_counter() - started, cpu_time() - cpu
        return times


def cpu_time() -> float:
    """Return the CPU seconds of this process and all its descendants."""
    used = sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )
    live = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return used + sum(times.user + times.system for times in live)


def work(kind: str, uri: str, study: str, trials: int) -> None:
    """Run trials as one of several workers: warm up, wait for a line on stdin, run the trials, print the times."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker("careful" if kind == "fluent" else kind, os.environ["BENCH_STORAGE"], uri, study, Path(folder))
        worker.run(1)
        if isinstance(worker.tracker, Fluent) and kind == "fluent":
            worker.tracker.requirements = None  # only now: inferring them takes long and warms nothing up
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(vars(worker.run(trials))), flush=True)


class Bench:
    """The services, and a fresh study for each measurement."""

    def __init__(self, home: Path) -> None:
        self.home, self.info = home, stack.up(home, progress=log_progress, dashboard=DASHBOARD_COMMAND)
        self.server = next(psutil.Process(s.pid) for s in stack.read_status(home) if s.name == "MLflow")
        self.done = 0

    def fleet(self, kind: str, workers: int, trials: int) -> tuple[list[Times], float]:
        """Run a fleet; return the measurements of each worker, and the CPU seconds of the server meanwhile."""
        self.done += 1
        settings: dict[str, Any] = {"objective": "digits", "name": f"tracking-{self.done}", "epochs": EPOCHS}
        settings |= {key: value.format(home=self.home) for key, value in SECOND.items() if key == kind}
        settings |= {"n_trials": workers * (trials + 1)}
        study = begin_search(settings, {"home": str(self.home)}, PlainConsole()).study
        of_study = (self.info.tracking_uri, study.spec.name, str(trials))
        command = [sys.executable, "-m", "benchmarks.bench_tracking", "--work", kind, *of_study]
        environment = {
            **clean_environment(),
            **thread_environment(max(workers, count_cores())),  # one thread each: more would wait for each other
            "BENCH_STORAGE": self.info.storage_url,
            "HPSEARCH_HOME": str(self.home),
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "WANDB_MODE": "offline",
        }
        with (self.home / f"{study.spec.name}.log").open("w") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            fleet = [subprocess.Popen(command, env=environment, text=True, **pipes) for _ in range(workers)]
            try:
                for one in fleet:
                    while one.stdout.readline() != "ready\n":
                        if one.poll() is not None:
                            raise SystemExit(f"{kind}: a worker ended:\n{Path(log.name).read_text()[-3000:]}")
                before = self._server_time()
                for one in fleet:
                    one.stdin.write("go\n")
                    one.stdin.flush()
                found = [_read_times(one.communicate()[0]) for one in fleet]
            finally:
                for one in fleet:
                    one.kill()
        return found, self._server_time() - before

    def _server_time(self) -> float:
        times = [one.cpu_times() for one in (self.server, *self.server.children(recursive=True))]
        return sum(one.user + one.system for one in times)


def _read_times(printed: str) -> Times:
    """Return the measurements in the output of a worker, to which MLflow's fluent API adds the addresses of runs."""
    [line] = [line for line in printed.splitlines() if line.startswith("{")]
    return Times(**json.loads(line))


@dataclass
class Cost:
    """The cost of a trial in milliseconds, or that of its tracking, if the cost of an untracked trial is subtracted."""

    wall: float
    cpu: float
    server: float

    def less(self, other: Cost) -> Cost:
        return Cost(self.wall - other.wall, self.cpu - other.cpu, self.server - other.server)


class Measurement:
    """The measurements of a kind with a number of workers, over the rounds."""

    def __init__(self) -> None:
        self.epochs: list[float] = []
        self.trials: list[float] = []
        self.costs: list[Cost] = []

    def add(self, found: list[Times], server: float) -> None:
        trials = sum(len(one.trials) for one in found)
        self.epochs += [1000 * seconds for one in found for seconds in one.epochs]
        self.trials += [1000 * seconds for one in found for seconds in one.trials]
        wall = max(one.wall for one in found) / len(found[0].trials)
        self.costs.append(Cost(1000 * wall, 1000 * sum(one.cpu for one in found) / trials, 1000 * server / trials))

    def cost(self) -> Cost:
        return Cost(
            *(statistics.median(getattr(one, name) for one in self.costs) for name in ("wall", "cpu", "server"))
        )


def show(workers: int, measured: dict[str, Measurement]) -> None:
    """Print a line per measurement and kind, with its ratio to the first kind."""
    tracked = {kind: one for kind, one in measured.items() if kind != "none"}

    def rows(what: str, numbers: dict[str, float], details: dict[str, str]) -> None:
        base = next(iter(numbers.values()))
        for kind, number in numbers.items():
            times = f"x{number / base:.2f}"
            print(
                f"{f'{what}, {workers} workers, ms':54} {kind:11} {number:10.2f} {times:8} {details[kind]}", flush=True
            )

    for share in (50, 95):
        numbers = {kind: float(np.percentile(one.epochs, share)) for kind, one in tracked.items()}
        details = {kind: f"of {len(one.epochs)}, longest {max(one.epochs):.1f}" for kind, one in tracked.items()}
        rows(f"tracking time of an epoch, p{share}", numbers, details)
    numbers = {kind: statistics.median(one.trials) for kind, one in tracked.items()}
    details = {kind: f"of {len(one.trials)}, longest {max(one.trials):.0f}" for kind, one in tracked.items()}
    rows("tracking time of a trial on its thread", numbers, details)
    if "none" not in measured:
        return
    bare = measured["none"].cost()
    costs = {kind: one.cost().less(bare) for kind, one in tracked.items()}
    rows(
        "cost of a trial, wall",
        {kind: one.wall for kind, one in costs.items()},
        {kind: f"a trial {one.cost().wall:.0f}, without tracking {bare.wall:.0f}" for kind, one in tracked.items()},
    )
    rows(
        "cost of a trial, CPU of the worker",
        {kind: one.cpu for kind, one in costs.items()},
        {kind: f"of the server {one.server:.0f}" for kind, one in costs.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of few trials")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--kinds", nargs="+", choices=(*KINDS, *SECOND), default=KINDS)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        kind, uri, study, trials = given.work
        work(kind, uri, study, int(trials))
        return
    with services() as home:
        bench = Bench(home)
        print(f"trials of {EPOCHS} epochs on {count_cores()} cores, mlflow {mlflow.__version__}", flush=True)
        for workers in given.workers:
            measured = {kind: Measurement() for kind in given.kinds}
            rounds, trials = (1, 2) if given.quick else (3, 6) if workers == 1 else (2, 3)
            for turn in range(rounds):
                for kind in given.kinds[:: -1 if turn % 2 else 1]:
                    measured[kind].add(*bench.fleet(kind, workers, trials))
                    log_progress(f"{workers} workers, round {turn + 1} of {rounds}, {kind}")
            show(workers, measured)


if __name__ == "__main__":
    main()
