"""The submit host of a fleet: a study's database, whose password is in a file, and the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import optuna
import psutil

from docs.packages import ROOT
from hpsearch.redaction import redact
from hpsearch.storage.web.token import find_token
from tests.search.launch.memory import memory_limit
from tests.waiting import PATIENCE, wait_for

PACED = f"{ROOT}/tests/search/launch/paced.py:Paced"


class Site:
    """A study's database, the submitting user's settings, and the command line."""

    def __init__(self, folder: Path, url: str, tracking_uri: str) -> None:
        parts = urlsplit(url.replace("+psycopg2", ""))
        passwords = folder / "pgpass"
        passwords.write_text(f"*:*:*:{parts.username}:{parts.password}\n")
        passwords.chmod(0o600)
        self.url = parts._replace(netloc=f"{parts.username}@{parts.hostname}:{parts.port}").geturl()
        assert redact(self.url) == self.url
        token = folder / "mlflow-token"  # the workers have another home than the MLflow server
        token.write_text(find_token(tracking_uri) or "")
        token.chmod(0o600)
        self.full_url, self.folder = url, folder
        self.environment = {
            "HPSEARCH_STORAGE_URL": self.url, "HPSEARCH_TRACKING_URI": tracking_uri,
            "HPSEARCH_HOME": str(folder / "home"), "PGPASSFILE": str(passwords), "PYTHONPATH": str(ROOT),
            "MLFLOW_TRACKING_TOKEN_FILE": str(token), "EXHAUST": str(folder / "exhaust"),
        }  # fmt: skip

    def __call__(self, *arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "hpsearch", *arguments], env={**os.environ, **self.environment, **environment},
            cwd=self.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def create(self, name: str, trials: int) -> None:
        """Create a study whose steps take STEP_SECONDS."""
        self("run", PACED, "--name", name, "--trials", str(trials), "--sampler", "random", "--pruner", "none",
             "--workers", "0", START_SECONDS="0", STEP_SECONDS="0")  # fmt: skip

    def values(self, name: str) -> dict[int, tuple[dict[str, object], dict[int, float], float | None]]:
        """Return for each trial its parameters, its value of each epoch and its final value."""
        study = optuna.load_study(study_name=name, storage=self.full_url)
        return {t.number: (t.params, t.intermediate_values, t.value) for t in study.get_trials(deepcopy=False)}

    def undisturbed(self, trials: int) -> dict[int, tuple[dict[str, object], dict[int, float], float | None]]:
        """Return the same for a search with one worker, without an engine."""
        self.create("undisturbed", trials)
        self("worker", "--study", "undisturbed", START_SECONDS="0", STEP_SECONDS="0")
        return self.values("undisturbed")

    def states(self, name: str) -> list[str]:
        study = optuna.load_study(study_name=name, storage=self.full_url)
        return [trial.state.name for trial in study.get_trials(deepcopy=False)]

    def list_active_workers(self, name: str) -> dict[str, dict[str, Any]]:
        """Return the identity of each worker that `top` shows as active, by the name of the worker."""
        rows = json.loads(self("top", name, "--json"))["workers"]
        return {row["identity"]["name"]: row["identity"] for row in rows if row["state"] in {"running", "idle"}}

    def kill_worker(self, name: str) -> list[str]:
        """Kill a worker with SIGKILL; return its name."""
        worker, identity = next(iter(self.list_active_workers(name).items()))
        os.kill(identity["pid"], signal.SIGKILL)
        return [worker]

    def exhaust_memory(self, name: str, *, limit: int | None = None) -> list[str]:
        """Let a worker allocate memory in its next step until the kernel kills it; return its name.

        Args:
            name: name of the study.
            limit: bytes that the worker can allocate until then; None if its engine limits it.
        """
        worker, identity = next(iter(self.list_active_workers(name).items()))
        with memory_limit(identity["pid"], limit) if limit else nullcontext():
            Path(f"{self.environment['EXHAUST']}-{identity['pid']}").touch()
            wait_for(lambda: not psutil.pid_exists(identity["pid"]), f"the end of {worker}")
        return [worker]

    def wait_for_fleet(
        self, name: str, size: int, *, without: Collection[str] = (), after: str = "the start", seconds: float = 60.0
    ) -> None:
        """Wait until a study has `size` active workers and none of `without`, which the engine started in `seconds`.

        A new process needs most of its time to load libraries on a busy machine, so this time does not count.
        """
        began, end = time.time(), time.monotonic() + PATIENCE
        while len(active := self.list_active_workers(name)) != size or active.keys() & set(without):
            assert time.monotonic() < end, f"{len(active)} of {size} workers {PATIENCE:.0f} s after {after}"
            time.sleep(0.5)  # until a condition holds
        last = max(psutil.Process(each["pid"]).create_time() for each in active.values()) - began
        print(
            f"after {after}: last process started after {last:.0f} s, {size} workers after {time.time() - began:.0f} s"
        )
        assert last < seconds, after
