"""What the study storage costs, beside Optuna's RDBStorage and its gRPC proxy on the same Postgres in the same run.

    python tests/benchmarks/bench_storage.py [--quick] [--only NAME ...]

A trial is ask, four suggestions, ten epochs of report and should_prune, and tell, through Optuna's public interface;
TPE and the median pruner unless said otherwise. "Storage" is the time inside the storage's methods, so that the
sampler's and the pruner's own arithmetic does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import optuna
import sqlalchemy as sa
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage, RDBStorage, get_storage
from optuna.trial import FrozenTrial, TrialState, create_trial

from storage.migrate import migrate
from storage.postgres import Server
from storage.postgres_account import make_folder
from storage.postgres_data import SUPERUSER
from storage.roles import create_databases
from storage.studies import open_storage
from storage.study_storage import PostgresStorage
from storage.urls import build

warnings.simplefilter("ignore")
optuna.logging.set_verbosity(optuna.logging.ERROR)
EPOCHS = 10
KINDS = ("ours", "rdb", *(("grpc",) if importlib.util.find_spec("grpc") else ()))
SPACE = {
    "lr": FloatDistribution(1e-5, 1e-1, log=True),
    "dropout": FloatDistribution(0.0, 0.5),
    "layers": IntDistribution(1, 8),
    "optimizer": CategoricalDistribution(("sgd", "adam", "lamb")),
}


class Watched(BaseStorage):
    """A storage whose calls are timed."""

    def __init__(self, inner: BaseStorage) -> None:
        self.inner = inner
        self.seconds = 0.0


def _timed(name: str) -> Callable[..., object]:
    def call(self: Watched, *args: object, **kwargs: object) -> object:
        started = time.perf_counter()
        try:
            return getattr(self.inner, name)(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - started

    return call


for _name in [name for name in vars(BaseStorage) if not name.startswith("_") and callable(getattr(BaseStorage, name))]:
    setattr(Watched, _name, _timed(_name))
Watched.__abstractmethods__ = frozenset()


def engine_of(storage: BaseStorage) -> sa.Engine | None:
    return getattr(getattr(storage, "_backend", storage), "engine", None)


def opened(kind: str, url: str, port: int = 0) -> BaseStorage:
    match kind:
        case "ours":
            return open_storage(url, application_name="bench")
        case "rdb":
            return get_storage(RDBStorage(url, engine_kwargs={"pool_pre_ping": True}, skip_table_creation=True))
        case _:
            return optuna.storages.GrpcStorageProxy(host="127.0.0.1", port=port)


def study_on(storage: BaseStorage, name: str, sampler: str = "tpe", seed: int | None = None) -> optuna.Study:
    made = optuna.samplers.TPESampler(seed=seed) if sampler == "tpe" else optuna.samplers.RandomSampler(seed=seed)
    return optuna.create_study(
        storage=storage,
        study_name=name,
        sampler=made,
        pruner=optuna.pruners.MedianPruner(),
        direction="maximize",
        load_if_exists=True,
    )


def value_of(lr: float, epoch: int) -> float:
    return 1.0 - abs(lr - 0.01) - 1.0 / (epoch + 2)


def suggest(trial: optuna.Trial) -> float:
    lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    trial.suggest_float("dropout", 0.0, 0.5)
    trial.suggest_int("layers", 1, 8)
    trial.suggest_categorical("optimizer", ("sgd", "adam", "lamb"))
    return lr


def run_trial(study: optuna.Study) -> dict[str, float]:
    """Run one trial and return the milliseconds of its parts."""
    marks = [time.perf_counter()]
    trial = study.ask()
    marks.append(time.perf_counter())
    lr = suggest(trial)
    marks.append(time.perf_counter())
    report = prune = 0.0
    for epoch in range(EPOCHS):
        started = time.perf_counter()
        trial.report(value_of(lr, epoch), epoch)
        between = time.perf_counter()
        trial.should_prune()
        report, prune = report + between - started, prune + time.perf_counter() - between
    before = time.perf_counter()
    study.tell(trial, value_of(lr, EPOCHS))
    ended = time.perf_counter()
    parts = {
        "ask": marks[1] - marks[0],
        "suggest": marks[2] - marks[1],
        "report": report / EPOCHS,
        "should_prune": prune / EPOCHS,
        "tell": ended - before,
        "trial": ended - marks[0],
    }
    return {name: 1000 * seconds for name, seconds in parts.items()}


def finished(number: int) -> FrozenTrial:
    """A COMPLETE trial like those of `run_trial`."""
    rng = random.Random(number)
    lr = 10 ** rng.uniform(-5, -1)
    start = datetime(2026, 1, 1) + timedelta(seconds=number)
    return FrozenTrial(
        number=0,
        trial_id=0,
        state=TrialState.COMPLETE,
        value=value_of(lr, EPOCHS),
        datetime_start=start,
        datetime_complete=start + timedelta(seconds=1),
        params={"lr": lr, "dropout": rng.uniform(0, 0.5), "layers": rng.randint(1, 8), "optimizer": "adam"},
        distributions=dict(SPACE),
        user_attrs={"hpsearch:attempt": 1, "hpsearch:worker": "host:1"},
        system_attrs={},
        intermediate_values={epoch: value_of(lr, epoch) for epoch in range(EPOCHS)},
    )


def running(number: int) -> FrozenTrial:
    trial = finished(number)
    return create_trial(
        state=TrialState.RUNNING,
        params=trial.params,
        distributions=trial.distributions,
        user_attrs=trial.user_attrs,
        intermediate_values=trial.intermediate_values,
    )


class Bench:
    """One Postgres, and a fresh study for each measurement."""

    def __init__(self, server: Server, port: int, quick: bool) -> None:
        self.server, self.port, self.quick = server, port, quick
        admin = build(user=SUPERUSER, password=server.password, host="127.0.0.1", port=port, database="postgres")
        admin += "?sslmode=disable"
        made = create_databases(admin, owner_password="o", worker_password="w", mlflow_password="m")
        migrate(made.owner_url)
        self.url = made.worker_url
        self.loader = open_storage(self.url, application_name="loader")
        self.proxy: subprocess.Popen[bytes] | None = None
        self.grpc_port = self._serve() if "grpc" in KINDS else 0
        self.names = 0

    def _serve(self) -> int:
        with contextlib.closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        code = (
            "import sys, warnings; warnings.simplefilter('ignore'); "
            "from optuna.storages import RDBStorage, get_storage, run_grpc_proxy_server;"
            "s = get_storage(RDBStorage(sys.argv[1], skip_table_creation=True));"
            "run_grpc_proxy_server(s, host='127.0.0.1', port=int(sys.argv[2]))"
        )
        self.proxy = subprocess.Popen([sys.executable, "-c", code, self.url, str(port)])
        optuna.storages.GrpcStorageProxy(host="127.0.0.1", port=port).wait_server_ready(timeout=60)
        return port

    def study(self, trials: int = 0, others: int = 0) -> str:
        self.names += 1
        name = f"bench-{self.names}"
        study_id = self.loader.create_new_study([optuna.study.StudyDirection.MAXIMIZE], name)
        self.loader.import_trials(study_id, [finished(n) for n in range(trials)])
        self.loader.import_trials(study_id, [running(n) for n in range(others)])
        with self.loader.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(sa.text("ANALYZE"))
        return name

    def open(self, kind: str) -> BaseStorage:
        return opened(kind, self.url, self.grpc_port)

    # The measurements

    def statements(self) -> None:
        """Statements of one trial in a study of 100."""
        for kind in ("ours", "rdb"):
            name = self.study(100)
            storage = self.open(kind)
            study = study_on(storage, name)
            run_trial(study)
            count = 0

            def counted(*_: object) -> None:
                nonlocal count
                count += 1

            sa.event.listen(engine_of(storage), "before_cursor_execute", counted)
            rounds = 5
            for _ in range(rounds):
                run_trial(study)
            self.row("statements per trial", kind, count / rounds, "")

    def trials(self) -> None:
        """The parts of a trial in studies of several sizes."""
        for size in (0, 1000) if self.quick else (0, 1000, 10_000):
            for kind in KINDS:
                watched = Watched(self.open(kind))
                study = study_on(watched, self.study(size))
                run_trial(study)
                gc.collect()
                got, spent = [], []
                for _ in range(5 if self.quick else 15):
                    watched.seconds = 0.0
                    got.append(run_trial(study))
                    spent.append(1000 * watched.seconds)
                label = f"trial in a study of {size}, ms"
                medians = {part: statistics.median(one[part] for one in got) for part in got[0]}
                detail = "  ".join(f"{part} {ms:.2f}" for part, ms in medians.items())
                self.row(f"{label}: storage", kind, statistics.median(spent), detail)

    def others(self) -> None:
        """should_prune beside other running trials."""
        for size in (0, 200) if self.quick else (0, 50, 200):
            for kind in KINDS:
                study = study_on(self.open(kind), self.study(1000, size))
                run_trial(study)
                got = [run_trial(study) for _ in range(3 if self.quick else 9)]
                detail = f"whole trial {statistics.median(one['trial'] for one in got):.1f}"
                self.row(
                    f"should_prune, {size} others running, ms", kind, min(one["should_prune"] for one in got), detail
                )

    def workers(self) -> None:
        """Trials per second of several processes with a random sampler."""
        for workers in (1, 4) if self.quick else (1, 4, 8, 16):
            for kind in KINDS:
                name, seconds = self.study(), 5 if self.quick else 15
                command = [sys.executable, __file__, "--work", kind, self.url, str(self.grpc_port), name]
                fleet = [
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                    for _ in range(workers)
                ]
                for one in fleet:
                    one.stdout.readline()
                for one in fleet:
                    one.stdin.write(f"{seconds}\n")
                    one.stdin.flush()
                done = sum(int(one.communicate()[0]) for one in fleet)
                self.row(f"trials per second, {workers} workers, random", kind, done / seconds, "")

    def joining(self) -> None:
        """The first trial of a new process in a big study."""
        size = 1000 if self.quick else 10_000
        for kind in KINDS:
            name, got, spent = self.study(size), [], []
            for _ in range(3):
                watched = Watched(self.open(kind))
                started = time.perf_counter()
                suggest(study_on(watched, name).ask())
                got.append(1000 * (time.perf_counter() - started))
                spent.append(1000 * watched.seconds)
                gc.collect()
            self.row(f"first suggestions of a new process at {size}, ms", kind, min(got), f"storage {min(spent):.0f}")

    def importing(self) -> None:
        """add_trials of finished trials."""
        for kind in KINDS:
            size = 1000 if kind == "ours" else 20 if self.quick else 100
            storage = self.open(kind)
            study = study_on(storage, self.study())
            trials = [finished(n) for n in range(size)]
            started = time.perf_counter()
            if isinstance(storage, PostgresStorage):
                storage.import_trials(study._study_id, trials)
            else:
                study.add_trials(trials)
            self.row("import of 1,000 trials, ms", kind, 1e6 / size * (time.perf_counter() - started), f"of {size}")

    base: float = 0.0

    def row(self, what: str, kind: str, number: float, detail: str) -> None:
        if kind == "ours":
            self.base = number
        ratio = "" if kind == "ours" else f"x{number / self.base:.2f}"
        print(f"{what:48} {kind:5} {number:10.2f} {ratio:8} {detail}", flush=True)


def work(kind: str, url: str, port: str, name: str) -> None:
    """One of several workers: run trials for as many seconds as it is told, and print how many."""
    study = study_on(opened(kind, url, int(port)), name, "random")
    run_trial(study)
    print("ready", flush=True)
    until, done = time.perf_counter() + float(input()), 0
    while time.perf_counter() < until:
        run_trial(study)
        done += 1
    print(done, flush=True)


@contextlib.contextmanager
def bench(quick: bool) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="hpsearch-bench-") as folder:
        home = Path(folder).resolve()
        home.chmod(0o755)
        server = Server(make_folder(home), home / "postgres.log")
        made = None
        try:
            made = Bench(server, server.start(None), quick)
            yield made
        finally:
            if made is not None and made.proxy is not None:
                made.proxy.kill()
            server.stop()


def main() -> None:
    names = ["statements", "trials", "others", "workers", "joining", "importing"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and few repetitions")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(*given.work)
        return
    with bench(given.quick) as made:
        print(f"optuna {optuna.__version__}, sqlalchemy {sa.__version__}, grpc {'grpc' in KINDS}")
        for name in given.only:
            getattr(made, name)()


if __name__ == "__main__":
    main()
