"""Compare a search that loses MLflow for its middle half with the same search without the outage.

    python -m benchmarks.bench_outage [--rounds N] [--epochs N]

A search has 20 trials of digits on 3 workers, the random sampler and no pruner, so that all searches train the same
configurations. The server is killed (SIGKILL) when 5 trials are done, and restarted when 15 are. The two kinds
alternate; each ratio is of two searches of one round. The start of a server takes 6 s of a core, which the search
lacks: the undisturbed search therefore starts an unused server at the same point.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import mlflow
import optuna
import psutil

from benchmarks.bench_search import clean_environment, log_progress, services
from hpsearch.search.services import DASHBOARD_COMMAND
from hpsearch.storage.embedded import stack

TRIALS, WORKERS = 20, 3


def kill_mlflow(home: Path) -> None:
    [service] = [one for one in stack.read_status(home) if one.name == "MLflow"]
    process = psutil.Process(service.pid)
    for victim in [process, *process.children(recursive=True)]:
        victim.send_signal(signal.SIGKILL)
    psutil.wait_procs([process])


@contextmanager
def idle_server(home: Path) -> Iterator[None]:
    """Run an MLflow server that receives no requests."""
    command = [sys.executable, "-P", "-m", "mlflow", "server", "--host=127.0.0.1", "--port=0", "--workers=1"]
    command += [f"--backend-store-uri=sqlite:///{home}/idle.db", f"--artifacts-destination={home}/idle"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def search(home: Path, info: stack.StackInfo, name: str, *, epochs: int, disturbed: bool) -> tuple[float, float]:
    """Run one search; return the seconds until its last trial ended, and until the command ended."""
    command = [sys.executable, "-m", "hpsearch", "run", "digits", f"--name={name}", f"--trials={TRIALS}"]
    command += [f"--workers={WORKERS}", f"--epochs={epochs}", "--sampler=random", "--pruner=none", "--seed=0"]
    # With explicit URLs, `run` does not start the services: otherwise it would restart the server at once.
    command += [f"--storage-url={info.storage_url}", f"--tracking-uri={info.tracking_uri}"]
    environment = {**clean_environment(), "HPSEARCH_HOME": str(home / "worker"), "MLFLOW_DISABLE_TELEMETRY": "true"}
    started = time.time()
    with (home / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_for(info.storage_url, name, 5, process)
        if disturbed:
            kill_mlflow(home)
        wait_for(info.storage_url, name, 15, process)
        with nullcontext() if disturbed else idle_server(home):
            if disturbed:
                stack.up(home, dashboard=DASHBOARD_COMMAND)
            if process.wait():
                raise SystemExit((home / f"{name}.log").read_text())
    ended = time.time()
    trials = optuna.load_study(study_name=name, storage=info.storage_url).trials
    assert_tracked(info.tracking_uri, name, trials)
    return max(t.datetime_complete.timestamp() for t in trials if t.datetime_complete) - started, ended - started


def wait_for(url: str, name: str, done: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            study = optuna.load_study(study_name=name, storage=url)
        except KeyError:
            time.sleep(0.2)
            continue
        if sum(trial.state.is_finished() for trial in study.trials) >= done:
            return
        time.sleep(0.2)
    raise SystemExit(f"{name} ended before {done} of its trials were done")


def assert_tracked(uri: str, name: str, trials: list[optuna.trial.FrozenTrial]) -> None:
    """Assert that MLflow has each metric of each epoch once, equal to the study, and a run and a model per trial."""
    client = mlflow.MlflowClient(uri)
    runs = [trial.user_attrs["hpsearch:mlflow_run_id"] for trial in trials]
    assert len(set(runs)) == len(trials) == TRIALS, name
    for trial, run in zip(trials, runs, strict=True):
        points = sorted((point.step, point.value) for point in client.get_metric_history(run, "val_accuracy"))
        assert points == sorted(trial.intermediate_values.items()), f"{name}, trial {trial.number}"
        outputs = client.get_run(run).outputs
        assert len(outputs.model_outputs if outputs else []) == 1, f"{name}, trial {trial.number}"


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=40)
    given = parser.parse_args()
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with services() as home:
        info = stack.up(home, progress=log_progress, dashboard=DASHBOARD_COMMAND)
        search(home, info, "warm-up", epochs=2, disturbed=False)
        for turn in range(given.rounds):
            for disturbed in (False, True) if turn % 2 == 0 else (True, False):
                name = f"{'disturbed' if disturbed else 'undisturbed'}-{turn}"
                found[disturbed].append(search(home, info, name, epochs=given.epochs, disturbed=disturbed))
                log_progress(
                    f"{name}: trained in {found[disturbed][-1][0]:.1f} s, ended after {found[disturbed][-1][1]:.1f} s"
                )
    for column, what in enumerate(("until the last trial ended", "until the command ended")):
        ratios = [theirs[column] / ours[column] for ours, theirs in zip(found[False], found[True], strict=True)]
        shown = "  ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"{what}: disturbed / undisturbed {statistics.median(ratios):.3f} ({shown}); target: at most 1.10")


if __name__ == "__main__":
    main()
