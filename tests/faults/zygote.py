"""A process that has imported everything and forks workers: a worker costs milliseconds, not seconds, to start.

Told by lines of JSON on its input: `{"start": [arguments], "environment": {}, "log": PATH}` is answered by the process
id, `{"reap": true}` by the exit statuses of those that ended meanwhile. When its input closes, it kills what is left.
With `"puppet": false` the command is the product's as it is, in the folder `"cwd"` and on the input `"input"`; it may
also be `-c` with a program, as of Python. With `"alone"` the environment that is given is all of it.
The server that a fleet forks its workers from is another 7 s of imports: all commands of a zygote share one.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import json
import os
import signal
import sys
import threading
import traceback
from itertools import pairwise
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from search.fleet.cores import cores
from search.fleet.forking import load_ahead


def leave(code: int) -> None:
    """End a forked child as an interpreter ends, but for taking every imported module apart: that costs seconds."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve() -> None:
    """Answer until the input closes."""
    children: set[int] = set()
    for line in sys.stdin:
        told = json.loads(line)
        answer: Any
        if "start" in told:
            if has_fleet(told["start"]):
                load_ahead(cores())
            if (pid := os.fork()) == 0:
                try:
                    code = become(told)
                except BaseException:  # a forked child must not go on as its parent
                    traceback.print_exc()
                    code = 70
                leave(code)
            children.add(pid)
            answer = pid
        else:
            answer = {}
            while children:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                children.discard(pid)
                answer[pid] = os.waitstatus_to_exitcode(status)
        print(json.dumps(answer), flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def become(told: dict[str, Any]) -> int:
    os.setsid()
    if told.get("alone"):
        os.environ.clear()
    os.environ.update(told["environment"])
    log = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(told.get("input", os.devnull), os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    if told["start"][0] == "undisturbed":
        return undisturbed(int(told["start"][1]), Path(told["start"][2]))
    if has_fleet(told["start"]):
        use_parents_server()
    if told["start"][0] == "-c":
        return program(told["start"])
    if not told["puppet"]:
        return command_line(told["start"], told["cwd"])
    from tests.faults import puppet

    return puppet.main(told["start"])


def command_line(arguments: list[str], cwd: str) -> int:
    """Run the product's command line as it is."""
    from search.cli import main

    os.chdir(cwd)
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    raise AssertionError("it ends by exiting")


def program(arguments: list[str]) -> int:
    """Run a program as `python -c` does."""
    _, code, *rest = arguments
    sys.argv[:] = ["-c", *rest]
    exec(code, {"__name__": "__main__"})
    return 0


def has_fleet(arguments: list[str]) -> bool:
    """Whether a command is going to start workers of its own."""
    return arguments[0] in {"run", "finalists"} and ("--workers", "0") not in pairwise(arguments)


def use_parents_server() -> None:
    """Fork workers from the zygote's server; to look whether it runs, as is done, takes the one who started it."""
    forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]


def undisturbed(n_trials: int, path: Path) -> int:
    """Train the trials of a study one after another, without any service, and write their values."""
    import optuna

    from objectives.training import Trainer
    from search.samplers.random import Random
    from search.sampling.seeds import derive_seed, make_sampler
    from tests.faults.scripted import EPOCHS, Scripted

    values = []
    study = optuna.create_study()
    for number in range(n_trials):
        study.sampler = make_sampler(Random(), study_seed=0, trial_number=number)
        objective = Scripted()
        config = objective.configure(study.ask())
        seed = derive_seed(0, "trial", number)
        result = Trainer(objective, config, epochs=EPOCHS, seed=seed, split_seed=0, device="cpu").fit()
        values.append([record.metrics["val_loss"].hex() for record in result.history])
    path.write_text(json.dumps(values))
    return 0


# What workers import, some of it late: the deterministic switch alone takes torch's compiler, 2.7 s of imports.
MODULES = (
    *("mlflow.pytorch", "optuna_dashboard", "sklearn.datasets", "torch._inductor", "torchmetrics", "psycopg2"),
    *("fsspec.implementations.local", "search.publish.study", "search.worker.join", "search.run.search", "search.cli"),
    *("torch.export._trace", "torch.export.pt2_archive._package", "sklearn.model_selection", "yaml"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "sqlalchemy.dialects.postgresql.psycopg2"),
)


def warm_up() -> None:
    """Do once what each command would do again: build the command line, find the fonts of a plot."""
    import typer
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from search.cli import app

    typer.main.get_command(app)
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.semilogy([1.0, 1000.0], label="a")
    axes.legend(fontsize="small")
    figure.savefig(io.BytesIO())


if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(name)
    warm_up()
    assert threading.active_count() == 1, "a fork of a process with threads is not to be trusted"
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    serve()
