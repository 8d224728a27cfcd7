"""Compare the study storage with Optuna's RDBStorage and its gRPC proxy, on the same Postgres in the same run.

    python -m benchmarks.bench_storage [--quick] [--only NAME ...]

A trial is ask, four suggestions, ten epochs of report and should_prune, and tell; the default is TPE with the median
pruner. `worker` uses the calls of `hpsearch worker`: a claim with a lease, one write of all suggestions, fenced
reports, and the final write. `ours`, `rdb` and `grpc` (if grpcio is installed) use Optuna's public interface.

"storage" is the time inside the storage, without the arithmetic of the sampler and the pruner. The kinds alternate
after each trial, so that other load on the machine affects all alike; the table shows medians.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import optuna
import sqlalchemy as sa
from optuna.storages import BaseStorage

from benchmarks.storage_ways import (
    GRPC,
    KINDS,
    PUBLIC,
    Runner,
    Watched,
    get_engine,
    make_finished_trial,
    make_running_trial,
    make_study,
    open_kind,
    suggest,
)
from hpsearch.storage.database.migrate import migrate
from hpsearch.storage.database.roles import create_databases
from hpsearch.storage.embedded.postgres import EmbeddedPostgres
from hpsearch.storage.embedded.postgres_account import make_postgres_folder
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage

warnings.simplefilter("ignore")
optuna.logging.set_verbosity(optuna.logging.ERROR)


class Bench:
    """A Postgres server, and a fresh study for each measurement."""

    def __init__(self, server: EmbeddedPostgres, port: int, quick: bool) -> None:
        self.server, self.port, self.quick = server, port, quick
        made = create_databases(server.make_url(port), owner_password="o", worker_password="w", mlflow_password="m")
        migrate(made.owner_url)
        self.url = made.worker_url
        self.loader = open_storage(self.url, application_name="loader")
        self.proxy: subprocess.Popen[bytes] | None = None
        self.grpc_port = self._serve() if GRPC else 0
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
        self.loader.import_trials(study_id, [make_finished_trial(n) for n in range(trials)])
        self.loader.import_trials(study_id, [make_running_trial(n) for n in range(others)])
        with self.loader.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(sa.text("ANALYZE"))
        return name

    def open(self, kind: str) -> BaseStorage:
        return open_kind(kind, self.url, self.grpc_port)

    def runner(self, kind: str, trials: int = 0, others: int = 0) -> Runner:
        made = Runner(kind, self.open(kind), self.study(trials, others))
        made.trial()
        return made

    def in_turns(self, runners: Sequence[Runner], rounds: int) -> dict[str, dict[str, float]]:
        """Run trials of the runners alternately; return the median times of the parts of a trial, by kind."""
        got: dict[str, list[dict[str, float]]] = {runner.kind: [] for runner in runners}
        gc.collect()
        for turn in range(rounds):
            for runner in runners[:: -1 if turn % 2 else 1]:
                got[runner.kind].append(runner.trial())
        return {
            kind: {part: statistics.median(one[part] for one in all_) for part in all_[0]} for kind, all_ in got.items()
        }

    # The measurements

    def commits(self) -> None:
        """Measure a commit, the lower bound of each write."""
        with self.loader.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            statement = sa.text("INSERT INTO studies (study_name) VALUES (:name)")
            times = []
            for turn in range(100):
                started = time.perf_counter()
                connection.execute(statement, {"name": f"commit {turn}"})
                times.append(1000 * (time.perf_counter() - started))
        print(f"a commit takes {statistics.median(times):.2f} ms", flush=True)

    def statements(self) -> None:
        """Count the statements of a trial in a study of 100 trials."""
        for kind in ("worker", "ours", "rdb"):
            runner, count, rounds = self.runner(kind, 100), 0, 5

            def counted(*_: object) -> None:
                nonlocal count
                count += 1

            sa.event.listen(get_engine(runner.inner), "before_cursor_execute", counted)
            for _ in range(rounds):
                runner.trial()
            self.row("statements per trial", kind, count / rounds, "")

    def trials(self) -> None:
        """Measure the parts of a trial in studies of several sizes."""
        for size in (0, 1000) if self.quick else (0, 1000, 10_000):
            got = self.in_turns([self.runner(kind, size) for kind in KINDS], 5 if self.quick else 15)
            for kind, parts in got.items():
                detail = "  ".join(f"{part} {ms:.2f}" for part, ms in parts.items() if part != "storage")
                self.row(f"storage time of a trial, {size} before it, ms", kind, parts["storage"], detail)

    def others(self) -> None:
        """Measure should_prune while other trials run."""
        for size in (0, 200) if self.quick else (0, 50, 200):
            got = self.in_turns([self.runner(kind, 1000, size) for kind in KINDS], 5)
            for kind, parts in got.items():
                detail = f"whole trial {parts['trial']:.1f}"
                self.row(f"should_prune, {size} others running, ms", kind, parts["should_prune"], detail)

    def workers(self) -> None:
        """Measure trials per second of several processes with a random sampler."""
        for workers in (1, 4) if self.quick else (1, 4, 8, 16):
            for kind in KINDS:
                name, seconds = self.study(), 5 if self.quick else 10
                module = "benchmarks.bench_storage"
                command = [sys.executable, "-m", module, "--work", kind, self.url, str(self.grpc_port), name]
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
        """Measure the first suggestions of a new process in a large study."""
        size = 1000 if self.quick else 10_000
        names = {kind: self.study(size) for kind in PUBLIC}
        got: dict[str, list[tuple[float, float]]] = {kind: [] for kind in PUBLIC}
        for _ in range(3):
            for kind in PUBLIC:
                watched = Watched(self.open(kind))
                started = time.perf_counter()
                suggest(make_study(watched, names[kind]).ask())
                got[kind].append((1000 * (time.perf_counter() - started), 1000 * watched.seconds))
        for kind, times in got.items():
            whole, storage = min(times)
            self.row(f"first suggestions of a new process at {size}, ms", kind, whole, f"storage {storage:.0f}")

    def importing(self) -> None:
        """Measure the import of finished trials: import_trials of our storage, add_trials otherwise."""
        for kind in PUBLIC:
            size = 1000 if kind == "ours" else 20 if self.quick else 100
            storage = self.open(kind)
            study = make_study(storage, self.study())
            trials = [make_finished_trial(n) for n in range(size)]
            started = time.perf_counter()
            if isinstance(storage, PostgresStorage):
                storage.import_trials(study._study_id, trials)
            else:
                study.add_trials(trials)
            self.row("import of 1,000 trials, ms", kind, 1e6 / size * (time.perf_counter() - started), f"of {size}")

    base: float = 0.0

    def row(self, what: str, kind: str, number: float, detail: str) -> None:
        if kind in ("worker", "ours") and (kind == "worker" or self.last != what):
            self.base = number
        self.last = what
        print(f"{what:50} {kind:6} {number:10.2f} {f'x{number / self.base:.2f}':8} {detail}", flush=True)

    last: str = ""


def work(kind: str, url: str, port: str, name: str) -> None:
    """Run trials as one of several workers, for the seconds read from stdin; print their number."""
    runner = Runner(kind, open_kind(kind, url, int(port)), name, "random")
    runner.trial()
    print("ready", flush=True)
    until, done = time.perf_counter() + float(input()), 0
    while time.perf_counter() < until:
        runner.trial()
        done += 1
    print(done, flush=True)


@contextlib.contextmanager
def bench(quick: bool) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="hpsearch-bench-") as folder:
        home = Path(folder).resolve()
        home.chmod(0o755)
        server = EmbeddedPostgres(make_postgres_folder(home), home / "postgres.log", has_port=True)
        made = None
        try:
            made = Bench(server, server.start(None), quick)
            yield made
        finally:
            if made is not None and made.proxy is not None:
                made.proxy.kill()
            server.stop()


def main() -> None:
    names = ["commits", "statements", "trials", "others", "workers", "joining", "importing"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and few repetitions")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(*given.work)
        return
    with bench(given.quick) as made:
        print(f"optuna {optuna.__version__}, sqlalchemy {sa.__version__}, grpc {GRPC}")
        for name in given.only:
            getattr(made, name)()


if __name__ == "__main__":
    main()
