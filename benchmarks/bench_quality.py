"""Measure the wall time until a search is as good as TPE with the median pruner is at its end.

    python -m benchmarks.bench_quality [--objectives NAME ...] [--ways NAME ...] [--seeds 5] [--seconds S]

Each method searches for the given time, which includes the start of the command and all imports, on the same machine,
with the same number of workers, objective, data split and training loop. The services of hpsearch are started
beforehand, like Optuna's database; Optuna and Ray Tune log nothing, hpsearch logs everything that it usually does.
hpsearch and Optuna begin with the default configuration of the objective, Ray Tune does not.

The best so far is the configuration of the best reported value, from the time at which that value is in the database
or in Ray's results: the one that a user would choose then. The best reported value is partly luck, so the true value
of the configuration is measured afterwards: the mean of its best values over fresh seeds, trained to the end. The
target of an objective is the median over seeds of the true values that `hpsearch tpe + median` has at the end; a search
that never reaches it counts as reaching it at the end. `search_quality` measures the same in many simulated searches.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy as sa

from benchmarks.bench_search import clean_environment, log_progress, services
from benchmarks.plain_quality import measure_truth
from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.loading import load_objective
from hpsearch.search.fleet.cores_and_gpus import count_cores, thread_environment
from hpsearch.search.services import DASHBOARD_COMMAND
from hpsearch.search.study.enqueue import default_params
from hpsearch.storage.embedded import stack

OBJECTIVES = {
    "digits": "benchmarks.one_split:OneDigits",
    "breast_cancer": "benchmarks.one_split:OneBreastCancer",
    "denoise": "benchmarks.one_split:OneDenoise",
    "gan": "benchmarks.one_split:OneGan",
    "series": "benchmarks.one_split:OneSeries",
    "shifted_digits": "benchmarks.one_split:OneShiftedDigits",
}
EPOCHS = 27
BASELINE = "hpsearch tpe + median"
NO_END = 100_000  # trials: only the time limit ends a search
POLL = 0.25  # seconds

_BEST = sa.text("""
    SELECT v.intermediate_value AS value, t.number, count(*) OVER () AS epochs
      FROM trial_intermediate_values v JOIN trials t USING (trial_id) JOIN studies USING (study_id)
     WHERE study_name = :name AND intermediate_value_type = 'FINITE'
     ORDER BY :sign * v.intermediate_value LIMIT 1
""")


@dataclass
class Trace:
    """The best so far of a search over time.

    Attributes:
        times: seconds since the command at which the best so far changed.
        best: the reported losses, lower is better.
        params: the configurations; while the study is watched, the numbers of the trials.
        epochs: number of epochs that all trials have reported.
        truth: the true values of the configurations, lower is better.
    """

    times: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    params: list[dict[str, Any]] = field(default_factory=list)
    epochs: int = 0
    truth: list[float] = field(default_factory=list)

    def note(self, seconds: float, loss: float, params: dict[str, Any]) -> None:
        if not self.best or loss < self.best[-1]:
            self.times.append(seconds)
            self.best.append(loss)
            self.params.append(params)

    @property
    def last(self) -> float:
        """The best reported loss."""
        return self.best[-1] if self.best else math.inf

    def at(self, seconds: float) -> float:
        """Return the true value of the best so far at this time."""
        return next((t for at, t in zip(self.times[::-1], self.truth[::-1], strict=True) if at <= seconds), math.inf)

    def reached(self, target: float, end: float) -> float:
        return next((at for at, loss in zip(self.times, self.truth, strict=True) if loss <= target), end)


@dataclass
class SearchCase:
    """The objective, seed, limits and services of one search."""

    objective: BaseObjective
    reference: str
    seed: int
    seconds: float
    workers: int
    home: Path
    storage: str

    @property
    def sign(self) -> float:
        return -1.0 if self.objective.direction == "maximize" else 1.0


def hpsearch(sampler: str, pruner: str, *options: str) -> Callable[[SearchCase, str], Trace]:
    """Return a function that runs `hpsearch run` as a user would."""

    def made(case: SearchCase, name: str) -> Trace:
        flags = {
            "name": name, "trials": NO_END, "epochs": EPOCHS, "timeout": case.seconds, "workers": case.workers,
            "seed": case.seed, "sampler": sampler, "pruner": pruner,
        }  # fmt: skip
        given = [f"--{flag}={value}" for flag, value in flags.items()]
        command = [sys.executable, "-m", "hpsearch", "run", case.reference, *given, *options]
        return watch_study(case, name, [command])

    return made


def plain_optuna(case: SearchCase, name: str) -> Trace:
    """Run Optuna's own loop in one process per worker, on the same Postgres."""
    study = optuna.create_study(study_name=name, storage=case.storage, direction=case.objective.direction)
    study.enqueue_trial(default_params(case.objective) or {})
    script = [sys.executable, "-m", "benchmarks.plain_quality", "optuna", case.reference, name]
    script += [f"--seconds={case.seconds}", f"--epochs={EPOCHS}"]
    return watch_study(case, name, [[*script, f"--seed={100 * case.seed + n}"] for n in range(case.workers)])


def ray_tune(searcher: str) -> Callable[[SearchCase, str], Trace]:
    """Return a function that runs Ray Tune's ASHA with the same number of concurrent trials."""

    def made(case: SearchCase, name: str) -> Trace:
        script = [
            sys.executable,
            "-m",
            "benchmarks.plain_quality",
            "ray",
            case.reference,
            name,
            f"--searcher={searcher}",
        ]
        script += [f"--seconds={case.seconds}", f"--epochs={EPOCHS}", f"--workers={case.workers}"]
        results = case.home / f"{name}.jsonl"
        started = time.time()
        run([[*script, f"--seed={case.seed}", f"--results={results}"]], case, name)
        trace = Trace()
        for line in results.read_text().splitlines():
            at, value, params = json.loads(line)
            trace.note(at - started, case.sign * value, params)
            trace.epochs += 1
        return trace

    return made


WAYS: dict[str, Callable[[SearchCase, str], Trace]] = {
    BASELINE: hpsearch("tpe", "median"),
    "hpsearch freeze_thaw + asha": hpsearch("freeze_thaw", "asha"),
    "hpsearch freeze_thaw + asha, near_default_fraction = 0": hpsearch(
        "freeze_thaw", "asha", "--sampler-option", "near_default_fraction=0"
    ),
    "hpsearch freeze_thaw + median": hpsearch("freeze_thaw", "median"),
    "hpsearch random + asha": hpsearch("random", "asha"),
    "hpsearch tpe + asha": hpsearch("tpe", "asha"),
    "Optuna TPE + median": plain_optuna,
    "Ray Tune ASHA, random": ray_tune("random"),
    "Ray Tune ASHA, HyperOpt": ray_tune("hyperopt"),
}


def watch_study(case: SearchCase, name: str, commands: list[list[str]]) -> Trace:
    """Run commands and read the best so far from their study meanwhile."""
    trace, over = Trace(), threading.Event()
    engine = sa.create_engine(case.storage)
    started = time.time()

    def look() -> None:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            while not over.wait(POLL):
                row = connection.execute(_BEST, {"name": name, "sign": case.sign}).one_or_none()
                if row is not None:
                    trace.epochs = row.epochs
                    trace.note(time.time() - started, case.sign * row.value, {"number": row.number})

    thread = threading.Thread(target=look)
    thread.start()
    try:
        run(commands, case, name)
    finally:
        over.set()
        thread.join()
        engine.dispose()
    trials = optuna.load_study(study_name=name, storage=case.storage).get_trials(deepcopy=False)
    trace.params = [trials[best["number"]].params for best in trace.params]
    return trace


def run(commands: list[list[str]], case: SearchCase, name: str) -> None:
    """Run commands in parallel and wait for all; all must succeed."""
    environment = {
        **clean_environment(),
        **thread_environment(case.workers),
        "HPSEARCH_HOME": str(case.home),
        "BENCH_STORAGE": case.storage,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    log = case.home / f"{name}.log"
    with log.open("w") as output:
        began = [
            subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            for command in commands
        ]
        codes = [process.wait() for process in began]
    if any(codes):
        raise SystemExit(f"{commands[0]} ended with {codes}:\n{log.read_text()[-3000:]}")


def judge(reference: str, sign: float, traces: list[Trace], fresh: int) -> None:
    """Measure the true value of each configuration that was the best so far."""
    known: dict[str, float] = {}
    wanted = list({json.dumps(params, sort_keys=True): params for trace in traces for params in trace.params}.items())
    with ProcessPoolExecutor(count_cores()) as pool:
        found = pool.map(
            partial(measure_truth, reference, epochs=EPOCHS, fresh=fresh), [params for _, params in wanted]
        )
        for done, ((key, _), value) in enumerate(zip(wanted, found, strict=True), 1):
            known[key] = sign * value
            if done % 50 == 0:
                log_progress(f"{done} of {len(wanted)} configurations measured")
    for trace in traces:
        trace.truth = [known[json.dumps(params, sort_keys=True)] for params in trace.params]


def table(objective: str, traces: dict[str, list[Trace]], seconds: float) -> None:
    """Print a line per method: its ratio to the baseline, its times, and its true values after each quarter."""
    ends = [trace.at(seconds) for trace in traces[BASELINE]]
    target = statistics.median(ends)
    print(f"\n{objective}: target {target:.5g} (the baseline's ends: {' '.join(f'{end:.5g}' for end in sorted(ends))})")
    times = {way: [trace.reached(target, seconds) for trace in found] for way, found in traces.items()}
    base = statistics.geometric_mean(times[BASELINE])
    for way, found in traces.items():
        ratio = statistics.geometric_mean(times[way]) / base
        spread = " ".join(f"{at:.0f}" for at in sorted(times[way]))
        after = [statistics.median(trace.at(seconds * part / 4) for trace in found) for part in (1, 2, 3, 4)]
        worths = " ".join(f"{value:.4g}" for value in after)
        epochs = statistics.median(trace.epochs for trace in found)
        print(
            f"{way:28} {ratio:5.2f}  seconds {spread:30} after each quarter {worths:40} epochs {epochs:.0f}", flush=True
        )


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", nargs="+", choices=list(OBJECTIVES), default=list(OBJECTIVES))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--fresh", type=int, default=3, help="number of fresh seeds for the true values")
    given = parser.parse_args()
    ways = list(dict.fromkeys([BASELINE, *given.ways]))
    with services() as home:
        info = stack.up(home, progress=log_progress, dashboard=DASHBOARD_COMMAND)
        print(f"{given.seconds:g} s, {given.workers} workers on {count_cores()} cores, load {os.getloadavg()[0]:.1f}")
        for objective in given.objectives:
            loaded = load_objective(OBJECTIVES[objective])
            traces: dict[str, list[Trace]] = {way: [] for way in ways}
            for seed in range(given.seeds):
                where = (given.seconds, given.workers, home, info.storage_url)
                # The order alternates, so that other load on the machine affects all methods alike.
                for place, way in enumerate(ways[:: -1 if seed % 2 else 1]):
                    case = SearchCase(loaded, OBJECTIVES[objective], seed, *where)
                    traces[way].append(WAYS[way](case, f"{objective}-{seed}-{place}"))
                    log_progress(f"{objective}, seed {seed}, {way}: reported {traces[way][-1].last:.5g}")
            sign = -1.0 if loaded.direction == "maximize" else 1.0
            judge(OBJECTIVES[objective], sign, [trace for found in traces.values() for trace in found], given.fresh)
            table(objective, traces, given.seconds)


if __name__ == "__main__":
    main()
