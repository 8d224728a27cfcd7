"""The submit host of a fleet: a study's database, whose password is in a file, and the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import optuna

from docs.packages import ROOT
from hpsearch.redaction import redact
from hpsearch.storage.web.token import find_token

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
            "MLFLOW_TRACKING_TOKEN_FILE": str(token),
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
             "--workers", "0")  # fmt: skip

    def values(self, name: str) -> dict[int, tuple[dict[str, object], dict[int, float], float | None]]:
        """Return for each trial its parameters, its value of each epoch and its final value."""
        study = optuna.load_study(study_name=name, storage=self.full_url)
        return {t.number: (t.params, t.intermediate_values, t.value) for t in study.get_trials(deepcopy=False)}

    def undisturbed(self, trials: int) -> dict[int, tuple[dict[str, object], dict[int, float], float | None]]:
        """Return the same for a search with one worker, without an engine."""
        self.create("undisturbed", trials)
        self("worker", "--study", "undisturbed", STEP_SECONDS="0")
        return self.values("undisturbed")

    def states(self, name: str) -> list[str]:
        study = optuna.load_study(study_name=name, storage=self.full_url)
        return [trial.state.name for trial in study.get_trials(deepcopy=False)]
