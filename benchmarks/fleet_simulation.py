"""Measure the load of many workers on one Postgres server: real storage calls at the pace of epochs, no training.

    python -m benchmarks.fleet_simulation [--workers N ...] [--epoch SECONDS] [--ramp SECONDS] [--seconds S]
                                                [--kinds ours rdb] [--url URL]

A simulated worker claims a trial, suggests its parameters, reports and calls the pruner in each epoch, ends the trial,
and claims the next; its lease is renewed meanwhile, as by the thread of a real worker. `rdb` is the same with Optuna's
RDBStorage: ask, report, should_prune, tell. Each worker has a separate connection, like a separate process. A few
processes drive all workers and share the cores with the server, so the times include any lack of cores. The starts of
the workers are spread over the ramp; measurements begin half an epoch after the last start.

"behind" is the delay of the start of a call: the server is overloaded if it grows. `--url` is another address of the
same server, such as that of PgBouncer, with the user and the database of the first.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import os
import queue
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import psutil
import sqlalchemy as sa
from optuna.trial import FrozenTrial

from benchmarks.storage_ways import SPACE, get_value
from hpsearch.search.pruners.study_pruner import StudyPruner
from hpsearch.search.spec.spec import StudySpec, parse_spec
from hpsearch.storage.attributes import SPEC
from hpsearch.storage.database.connect import make_engine
from hpsearch.storage.database.migrate import migrate
from hpsearch.storage.database.roles import create_databases
from hpsearch.storage.embedded import postgres
from hpsearch.storage.embedded.postgres_account import make_postgres_folder
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from hpsearch.storage.trials import LEASE
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome

EPOCHS = 20  # of a trial
THREADS = 24  # per driving process: more than cores, since most wait for the server
BEATS = 4  # renewals per lease duration

warnings.simplefilter("ignore")
optuna.logging.set_verbosity(optuna.logging.ERROR)

Call = tuple[str, Any]  # name, function


def make_spec(name: str) -> StudySpec:
    pruner = {"name": "median", "n_warmup_steps": 0}
    settings = {"objective": "bench", "metric": "score", "direction": "maximize", "epochs": EPOCHS, "n_trials": 10**6}
    return parse_spec({"name": name, **settings, "pruner": pruner, "sampler": {"name": "random"}})


class Ours:
    """A worker of hpsearch."""

    def __init__(self, url: str, name: str, number: int) -> None:
        engine = make_engine(url, application_name=f"worker {number}", pool_size=1, max_overflow=1, pre_ping=False)
        self.storage = PostgresStorage(engine, retry_seconds=60.0)
        study_id = self.storage.get_study_id_from_name(name)
        self.claims = Claims(engine, study_id, worker=f"simulated:{number}")
        self.claims._process = f"simulated/pid:[1]/time:[1]/{number}/1"  # on another machine, like most of a fleet
        self.pruner = StudyPruner(make_spec(name), self.storage, study_id, max_age=1.0)
        self.random = random.Random(number)
        self.claim: Claim | None = None

    def run(self, first: int) -> Iterator[tuple[Call, bool]]:
        """Yield the calls, and whether an epoch is trained before each; the first trial has `first` epochs."""
        for epochs in itertools.chain([first], itertools.repeat(EPOCHS)):
            yield ("claim", self._claim), False
            claim = self.claim
            assert claim is not None
            with ExitStack() as stack:
                stack.enter_context(self.storage.hold_trial(claim.trial_id, claim.attempt))
                yield ("suggest", self._suggest), False
                frozen = self.storage.get_trial(claim.trial_id)
                for epoch in range(epochs):
                    yield ("report+prune", partial(self._report, claim, frozen, epoch)), True
                settle = partial(self.claims.finish_attempt, claim, Outcome.COMPLETE, value=get_value(self.lr, epochs))
                yield ("settle", settle), False

    def _report(self, claim: Claim, frozen: FrozenTrial, epoch: int) -> None:
        value = get_value(self.lr, epoch)
        self.claims.report(claim, epoch, value)
        frozen.intermediate_values[epoch] = value
        self.pruner(frozen, frozen.intermediate_values)

    def _claim(self) -> None:
        found = self.claims.claim()
        assert isinstance(found, Claim), found
        self.claim = found

    def _suggest(self) -> None:
        assert self.claim is not None
        self.lr = 10 ** self.random.uniform(-5, -1)
        values = {"lr": self.lr, "dropout": 0.1, "layers": 2, "optimizer": "adam"}
        with self.storage.batch_writes(self.claim.trial_id):
            for name, distribution in SPACE.items():
                internal = distribution.to_internal_repr(values[name])
                self.storage.set_trial_param(self.claim.trial_id, name, internal, distribution)

    def renew(self) -> None:
        if self.claim is not None:
            self.claims.renew(self.claim)


class Rdb:
    """A worker that uses Optuna's own storage."""

    def __init__(self, url: str, name: str, number: int) -> None:
        settings = {"pool_pre_ping": True, "pool_size": 1, "max_overflow": 1}
        storage = optuna.storages.RDBStorage(url, engine_kwargs=settings, skip_table_creation=True)
        sampler, pruner = optuna.samplers.RandomSampler(seed=number), optuna.pruners.MedianPruner()
        self.study = optuna.load_study(
            study_name=name, storage=optuna.storages.get_storage(storage), sampler=sampler, pruner=pruner
        )

    def run(self, first: int) -> Iterator[tuple[Call, bool]]:
        """Yield the calls as `Ours.run` does."""
        for epochs in itertools.chain([first], itertools.repeat(EPOCHS)):
            yield ("claim", self._ask), False
            yield ("suggest", self._suggest), False
            for epoch in range(epochs):
                yield ("report+prune", partial(self._report, epoch)), True
            yield ("settle", partial(self.study.tell, self.trial, get_value(self.lr, epochs))), False

    def _report(self, epoch: int) -> None:
        self.trial.report(get_value(self.lr, epoch), epoch)
        self.trial.should_prune()

    def _ask(self) -> None:
        self.trial = self.study.ask()

    def _suggest(self) -> None:
        self.lr = self.trial.suggest_float("lr", 1e-5, 1e-1, log=True)
        for name in ("dropout", "layers", "optimizer"):
            self.trial._suggest(name, SPACE[name])

    def renew(self) -> None:
        """Do nothing: a trial of RDBStorage has no lease."""


KINDS = {"ours": Ours, "rdb": Rdb}


class Drive:
    """Some workers of a fleet, whose calls a few threads make when they are due."""

    def __init__(self, kind: str, url: str, name: str, numbers: range, epoch: float, ramp: float) -> None:
        self.epoch, self.ramp, self.kind = epoch, ramp, kind
        self.workers = [KINDS[kind](url, name, number) for number in numbers]
        self.due: list[tuple[float, int, int, Any]] = []  # time, serial number, worker, its remaining calls
        self.ready: queue.Queue[tuple[float, int, Any] | None] = queue.Queue()
        self.lock = threading.Condition()
        self.times: dict[str, list[float]] = defaultdict(list)
        self.behind: list[float] = []
        self.order, self.cpu = 0, 0.0
        self.counts_from = self.until = 0.0

    def at(self, when: float, worker: int, life: Any) -> None:
        with self.lock:
            self.order += 1
            heapq.heappush(self.due, (when, self.order, worker, life))
            self.lock.notify()

    def work(self) -> None:
        """Make the calls that are due, in a thread, and schedule the next call of each worker."""
        while (task := self.ready.get()) is not None:
            when, worker, life = task
            if life is None:
                self.call("renew", self.workers[worker].renew, when)
                self.at(when + LEASE / BEATS, worker, None)
                continue
            (name, call), trained = next(life)
            if trained:  # the call is due at the end of the epoch
                self.at(time.monotonic() + self.epoch, worker, _Rest((name, call), life))
            else:
                self.call(name, call, when)
                self.at(time.monotonic(), worker, life)

    def call(self, name: str, call: Any, when: float) -> None:
        began = time.monotonic()
        call()
        if self.counts_from <= began < self.until:
            self.times[name].append(time.monotonic() - began)
            self.behind.append(began - when)

    def run(self, begin: float, seconds: float) -> None:
        self.counts_from = begin + self.ramp + self.epoch / 2
        self.until = self.counts_from + seconds
        threads = [threading.Thread(target=self.work, daemon=True) for _ in range(THREADS)]
        rng = random.Random(0)
        for index, worker in enumerate(self.workers):
            start = begin + rng.uniform(0, self.ramp)
            self.at(start, index, worker.run(rng.randint(1, EPOCHS)))
            if self.kind == "ours":
                self.at(start + rng.uniform(0, LEASE / BEATS), index, None)
        for thread in threads:
            thread.start()
        before: float | None = None
        while (now := time.monotonic()) < self.until:
            if before is None and now >= self.counts_from:
                before = cpu_seconds()
            with self.lock:
                while self.due and self.due[0][0] <= now:
                    when, _, worker, life = heapq.heappop(self.due)
                    self.ready.put((when, worker, life))
                pause = min(self.due[0][0] - now if self.due else 0.1, self.until - now, 0.1)
                self.lock.wait(max(pause, 0.0005))
        self.cpu = cpu_seconds() - (before or 0.0)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class _Rest:
    """The remaining calls of a worker, with the next one already taken from the iterator."""

    def __init__(self, first: Call, life: Any) -> None:
        self.first: Call | None = first
        self.life = life

    def __next__(self) -> tuple[Call, bool]:
        if self.first is not None:
            first, self.first = self.first, None
            return first, False
        return next(self.life)  # type: ignore[no-any-return]  # a generator of any kind of worker


def drive(kind: str, url: str, name: str, first: int, count: int, epoch: float, ramp: float, seconds: float) -> None:
    """Drive workers `first` to `first + count - 1` from the time read from stdin; print the times of their calls."""
    driven = Drive(kind, url, name, range(first, first + count), epoch, ramp)
    print("ready", flush=True)
    driven.run(float(sys.stdin.readline()), seconds)
    print(json.dumps({"times": driven.times, "behind": driven.behind, "cpu": driven.cpu}), flush=True)
    os._exit(0)  # threads may wait for the server


class Simulation:
    """A Postgres server, and a study for each fleet."""

    def __init__(self, folder: Path, connections: int, via: str | None) -> None:
        postgres._SETTINGS["max_connections"] = str(connections)
        self.server = postgres.EmbeddedPostgres(make_postgres_folder(folder), folder / "postgres.log", has_port=True)
        port = self.server.start(None)
        made = create_databases(
            self.server.make_url(port), owner_password="o", worker_password="w", mlflow_password="m"
        )
        migrate(made.owner_url)
        self.direct = made.worker_url
        self.url = via or made.worker_url
        self.admin = sa.create_engine(sa.make_url(made.owner_url), poolclass=sa.NullPool)
        self.names = 0

    def server_seconds(self) -> float:
        """Return the CPU seconds of the running processes of the server."""
        running = self.server.find_process()
        assert running is not None
        total = 0.0
        for process in (running, *running.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # a background worker of Postgres that has just ended
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def fleet(self, kind: str, workers: int, epoch: float, ramp: float, seconds: float, processes: int) -> None:
        """Run a fleet and print the times of its calls."""
        self.names += 1
        name = f"fleet-{self.names}"
        loader = open_storage(self.direct, application_name="loader")
        study_id = loader.create_new_study([optuna.study.StudyDirection.MAXIMIZE], name)
        loader.set_study_user_attr(study_id, SPEC, make_spec(name).model_dump())
        each = -(-workers // processes)
        drivers = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.fleet_simulation", "--drive", kind, self.url, name]
                + [str(part) for part in (first, min(each, workers - first), epoch, ramp, seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for first in range(0, workers, each)
        ]
        for driver in drivers:
            assert driver.stdout is not None
            driver.stdout.readline()
        begin = time.monotonic() + 1.0
        for driver in drivers:
            assert driver.stdin is not None
            driver.stdin.write(f"{begin}\n")
            driver.stdin.flush()
        time.sleep(1.0 + ramp + epoch / 2)  # until the measurements begin
        before = self.server_seconds()
        time.sleep(seconds / 2)  # connections are counted in the middle of the measurements
        with self.admin.connect() as connection:
            in_use = connection.execute(
                sa.text("SELECT count(*) FROM pg_stat_activity WHERE datname = 'optuna'")
            ).scalar()
        time.sleep(seconds / 2 - 2.0)  # before any driver ends
        used = (self.server_seconds() - before) / (seconds - 2.0)
        found = [json.loads(driver.communicate()[0].splitlines()[-1]) for driver in drivers]
        times: dict[str, list[float]] = defaultdict(list)
        for one in found:
            for call, several in one["times"].items():
                times[call] += several
        behind = [late for one in found for late in one["behind"]]
        calls = sum(map(len, times.values()))
        print(
            f"{kind}, {workers} workers, epochs of {epoch:g} s: {calls / seconds:.0f} calls/s, {in_use} connections, "
            f"behind p95 {1000 * quantile(behind, 0.95):.0f} ms; cores: server {used:.2f}, "
            f"drivers {sum(one['cpu'] for one in found) / seconds:.2f}"
        )
        for call, several in sorted(times.items()):
            middle, high = 1000 * statistics.median(several), 1000 * quantile(several, 0.95)
            print(
                f"    {call:14} {len(several) / seconds:7.1f}/s   p50 {middle:8.1f} ms   p95 {high:8.1f} ms", flush=True
            )


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--epoch", type=float, default=10.0, help="seconds")
    parser.add_argument("--ramp", type=float, help="seconds over which the workers start (default: an epoch)")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--processes", type=int, default=4, help="number of processes that drive the workers")
    parser.add_argument("--kinds", nargs="+", default=["ours"], choices=list(KINDS))
    parser.add_argument("--url", help="another address of the server")
    parser.add_argument("--drive", nargs=8, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.drive:
        kind, url, name, first, count, *times = given.drive
        drive(kind, url, name, int(first), int(count), *map(float, times))
        return
    with tempfile.TemporaryDirectory(prefix="hpsearch-fleet-", ignore_cleanup_errors=True) as folder:
        simulation = Simulation(Path(folder), 2 * max(given.workers) + 50, given.url)
        try:
            for workers in given.workers:
                for kind in given.kinds:
                    ramp = given.ramp or given.epoch
                    simulation.fleet(kind, workers, given.epoch, ramp, given.seconds, given.processes)
        finally:
            simulation.server.stop()


if __name__ == "__main__":
    main()
