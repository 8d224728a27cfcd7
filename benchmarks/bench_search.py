"""Compare a whole search with the same search as tutorials write it, on the same Postgres and MLflow server.

    python -m benchmarks.bench_search [--quick] [--sampled] [--epochs N] [--kinds KIND ...]

`ours` is `hpsearch run` as a user starts it, with all its logs, plots and reports. `plain` is one script that is
started once per worker (plain_search.py): RDBStorage, `study.optimize`, a nested fluent run per trial, `log_model` with
an input example. `careful` is the same with explicit requirements of the model, so that MLflow need not load the model
in a separate process to infer them.

A search has 24 trials of 12 epochs of digits on 2 workers that share the cores, TPE and the median pruner with the same
options. In a first search by hpsearch, which is not counted, TPE suggests the configurations; all other searches run
these, enqueued beforehand, with the same seeds (with `--sampled`, each search uses its own sampler). All use the same
training loop. The kinds alternate, in changing order; the table shows medians.

Wall time is the duration of the command, including the start of the interpreters and imports. Worker time is the time
of the main threads of the workers, from their first attempt to claim a trial to their end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow
import optuna

from benchmarks.laps import FOLDER
from hpsearch.search.console import PlainConsole
from hpsearch.search.fleet.cores_and_gpus import count_cores, thread_environment
from hpsearch.search.services import DASHBOARD_COMMAND
from hpsearch.search.study.create import begin_search
from hpsearch.storage.embedded import stack

OBJECTIVE = str(Path(__file__).parent / "timed_digits.py")
KINDS = ("ours", "plain", "careful")
REQUIREMENTS = [f"torch=={version('torch').partition('+')[0]}", "numpy"]


@dataclass
class Search:
    """The measurements of one search; times in seconds."""

    wall: float
    before: float  # from the start of the command to that of the first worker
    after: float  # from the end of the last worker to that of the command
    starting: float  # summed over workers: until they claim trials
    worker_time: float
    cpu: float  # of all workers, their children, and the process that they were forked from
    parts: Counter[str]  # worker time by label
    trials: str
    epochs: int
    in_mlflow: str

    @property
    def training_share(self) -> float:
        return self.parts["training"] / self.worker_time


class Bench:
    """The services, and a fresh study for each search."""

    def __init__(self, home: Path, *, trials: int, epochs: int, workers: int, sampled: bool) -> None:
        self.home, self.info = home, stack.up(home, progress=log_progress, dashboard=DASHBOARD_COMMAND)
        self.client = mlflow.MlflowClient(self.info.tracking_uri)
        self.trials, self.epochs, self.workers = trials, epochs, workers
        self.configurations: list[dict[str, Any]] = []
        self.done = 0
        self.search("ours")  # the first search is slower: it reads files from the disk
        if not sampled:
            study = optuna.load_study(study_name="ours-1", storage=self.info.storage_url)
            self.configurations = [trial.params for trial in study.trials]

    def search(self, kind: str) -> Search:
        self.done += 1
        name = f"{kind}-{self.done}"
        commands, experiment = self._ours(name) if kind == "ours" else self._plain(name, careful=kind == "careful")
        with tempfile.TemporaryDirectory() as folder:
            environment = {
                **clean_environment(),
                **thread_environment(self.workers),
                FOLDER: folder,
                "BENCH_STORAGE": self.info.storage_url,
                "HPSEARCH_HOME": str(self.home),
                "MLFLOW_DISABLE_TELEMETRY": "true",
            }
            started = time.time()
            run(commands, environment, self.home / f"{name}.log")
            ended = time.time()
            found = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
        workers = [one for one in found if one["first"] is not None]
        assert len(workers) == self.workers, f"{kind}: {len(workers)} workers left their times"
        study = optuna.load_study(study_name=name, storage=self.info.storage_url)
        states = Counter(trial.state.name for trial in study.trials)
        assert states["COMPLETE"] + states["PRUNED"] == self.trials, f"{kind}: {states}"
        return Search(
            wall=ended - started,
            before=min(one["started"] for one in workers) - started,
            after=ended - max(one["ended"] for one in workers),
            starting=sum(one["first"] - one["started"] for one in workers),
            worker_time=sum(one["ended"] - one["first"] for one in workers),
            cpu=sum(one["cpu"] for one in workers) + max(one["cpu_before"] for one in workers),
            parts=sum((Counter(one["seconds"]) for one in workers), Counter()),
            trials=f"{states['COMPLETE']} done, {states['PRUNED']} pruned",
            epochs=sum(len(trial.intermediate_values) for trial in study.trials),
            in_mlflow=self._in_mlflow(experiment, name),
        )

    def _ours(self, name: str) -> tuple[list[list[str]], str]:
        settings: dict[str, Any] = {
            "objective": OBJECTIVE, "name": name, "n_trials": self.trials, "epochs": self.epochs, "seed": 0,
            "default_first": False,
        }  # fmt: skip
        flags = [f"--{flag}={value}" for flag, value in (("name", name), ("trials", self.trials), ("seed", 0))]
        flags += [f"--epochs={self.epochs}", f"--workers={self.workers}", "--no-default-first"]
        if self.configurations:
            study = begin_search(settings, {"home": str(self.home)}, PlainConsole()).study
            self._enqueue(study.open())
        return [[sys.executable, "-m", "hpsearch", "run", OBJECTIVE, *flags]], "hpsearch"

    def _plain(self, name: str, *, careful: bool) -> tuple[list[list[str]], str]:
        study = optuna.create_study(study_name=name, storage=self.info.storage_url, direction="maximize")
        self._enqueue(study)
        experiment = self.client.create_experiment(name)
        parent = self.client.create_run(experiment, run_name=name).info.run_id
        command = [sys.executable, "-m", "benchmarks.plain_search", self.info.tracking_uri, name, parent]
        command += [f"--epochs={self.epochs}", *(["--requirements", *REQUIREMENTS] if careful else [])]
        share = [self.trials // self.workers + (n < self.trials % self.workers) for n in range(self.workers)]
        return [[*command, f"--trials={trials}", f"--seed={n}"] for n, trials in enumerate(share)], name

    def _enqueue(self, study: optuna.Study) -> None:
        for params in self.configurations:
            study.enqueue_trial(params)

    def _in_mlflow(self, experiment: str, name: str) -> str:
        """Return the content of the MLflow server at the end of the command."""
        found = self.client.get_experiment_by_name(experiment)
        ids = [found.experiment_id]
        parents = self.client.search_runs(ids, f"attributes.run_name = '{name}'")
        children = self.client.search_runs(ids, f"tags.mlflow.parentRunId = '{parents[0].info.run_id}'")
        mine = {run.info.run_id for run in children}
        metrics = sum(len(run.data.metrics) for run in children)
        models = [m for m in self.client.search_logged_models(ids, max_results=1000) if m.source_run_id in mine]
        return f"{len(mine)} runs, {metrics} metrics, {len(models)} models"


def clean_environment() -> dict[str, str]:
    """Return the environment without the user's settings of hpsearch, MLflow, Postgres and Weights & Biases."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HPSEARCH_", "MLFLOW_", "PG", "WANDB_"))
    }


def run(commands: list[list[str]], environment: dict[str, str], log: Path) -> None:
    """Run commands in parallel and wait for all; all must succeed."""
    with log.open("w") as output:
        processes = [
            subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            for command in commands
        ]
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(codes):
        raise SystemExit(f"{commands[0]} ended with {codes}:\n{log.read_text()[-3000:]}")


class Table:
    """A line per measurement and kind: the median over the rounds, and its ratio to `ours`."""

    def __init__(self, searches: dict[str, list[Search]]) -> None:
        self.searches = searches

    def row(self, what: str, of: Callable[[Search], float], *, ratio: bool = True, digits: int = 1) -> None:
        base = statistics.median(map(of, next(iter(self.searches.values()))))
        for kind, searches in self.searches.items():
            numbers = [of(search) for search in searches]
            middle = statistics.median(numbers)
            times = f"x{middle / base:.2f}" if ratio and base else ""
            rounds = "  ".join(f"{number:.{digits}f}" for number in numbers) if len(numbers) > 1 else ""
            print(f"{what:46} {kind:8} {middle:10.{digits}f} {times:8} {rounds}", flush=True)

    def show(self) -> None:
        self.row("wall time, s", lambda one: one.wall)
        self.row("  before the first worker, s", lambda one: one.before, ratio=False)
        self.row("  after the last worker, s", lambda one: one.after, ratio=False)
        self.row("workers starting, s", lambda one: one.starting, ratio=False)
        self.row("worker time, s", lambda one: one.worker_time)
        self.row("training in worker time, %", lambda one: 100 * one.training_share, ratio=False)
        self.row("CPU time of the workers, s", lambda one: one.cpu)
        self.row("epochs trained", lambda one: one.epochs, digits=0)
        self.row("training, ms an epoch", lambda one: 1000 * one.parts["training"] / one.epochs)
        parts = sum((one.parts for searches in self.searches.values() for one in searches), Counter())
        for part, _ in parts.most_common():
            self.row(f"  {part}, s", lambda one, part=part: one.parts[part], ratio=False, digits=2)
        for kind, searches in self.searches.items():
            print(f"{kind}: {searches[-1].trials}; in MLflow at its end: {searches[-1].in_mlflow}")


def verdict(searches: dict[str, list[Search]]) -> None:
    """Print the two figures that hpsearch has targets for; each ratio is of two searches of one round."""
    for other in [kind for kind in searches if kind != "ours"]:
        ratios = [mine.wall / theirs.wall for mine, theirs in zip(searches["ours"], searches[other], strict=True)]
        aim = " (target: at most 0.45)" if other == "plain" else ""
        print(f"wall time, ours / {other}: {statistics.median(ratios):.2f}{aim}")
    share = statistics.median(one.training_share for one in searches["ours"])
    print(f"share of training in the worker time of ours: {share:.0%} (target: at least 80%)")


def log_progress(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


@contextmanager
def services() -> Iterator[Path]:
    """Provide a home folder for services; stop them and delete the folder at the end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    with tempfile.TemporaryDirectory(prefix="hpsearch-bench-") as folder:
        parent = Path(folder).resolve()
        parent.chmod(0o755)  # if run as root, Postgres runs as another user, which needs access
        try:
            yield parent / "home"
        finally:
            stack.down(parent / "home")


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of 6 trials of 4 epochs")
    parser.add_argument("--sampled", action="store_true", help="each search uses its own sampler")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    given = parser.parse_args()
    trials, epochs, rounds = (6, 4, 1) if given.quick else (24, given.epochs, given.rounds)
    searches: dict[str, list[Search]] = {kind: [] for kind in given.kinds}
    with services() as home:
        bench = Bench(home, trials=trials, epochs=epochs, workers=given.workers, sampled=given.sampled)
        for turn in range(rounds):
            for kind in given.kinds[:: -1 if turn % 2 else 1]:
                searches[kind].append(bench.search(kind))
                log_progress(f"round {turn + 1} of {rounds}, {kind}: {searches[kind][-1].wall:.1f} s")
    print(f"{trials} trials of {epochs} epochs, {given.workers} workers on {count_cores()} cores")
    print(f"optuna {optuna.__version__}, mlflow {mlflow.__version__}, torch {version('torch')}")
    Table(searches).show()
    if "ours" in searches:
        verdict(searches)


if __name__ == "__main__":
    main()
