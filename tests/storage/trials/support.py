"""Helpers to claim trials and to inspect claims."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from optuna.storages import BaseStorage

from hpsearch.storage.attributes import SPEC
from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.process_identity import make_process_name


def budget(storage: BaseStorage, study_id: int, **spec: Any) -> None:
    storage.set_study_user_attr(study_id, SPEC, {"retries": 1, **spec})


def set_retries(owner_url: str, study_id: int, retries: int, *, n_trials: int) -> None:
    """Change the retries of a study, which only the owner of the database can do."""
    budget(open_storage(owner_url, application_name="test owner"), study_id, n_trials=n_trials, retries=retries)


Join = Callable[..., Claims]


def take(claims: Claims) -> Claim:
    got = claims.claim()
    assert isinstance(got, Claim)
    return got


def states(storage: BaseStorage, study_id: int) -> list[str]:
    return [t.state.name for t in storage.get_all_trials(study_id)]


def rows(engine: sa.Engine, query: str, **parameters: object) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(sa.text(query), parameters))


def outcomes(engine: sa.Engine) -> list[tuple[int, str | None]]:
    query = "SELECT attempt, outcome FROM hpsearch_attempts ORDER BY trial_id, attempt"
    return [tuple(row) for row in rows(engine, query)]


def kill(engine: sa.Engine, claim: Claim) -> str:
    """Make the claim look like that of a dead worker on this machine, and return the name of its process."""
    with subprocess.Popen(["sleep", "600"]) as child:
        ended = make_process_name(child.pid)
        child.kill()
    with engine.begin() as connection:
        statement = "UPDATE hpsearch_attempts SET process = :process WHERE trial_id = :trial AND ended_at IS NULL"
        connection.execute(sa.text(statement), {"process": ended, "trial": claim.trial_id})
    return ended


def begin_at_once(workers: Sequence[subprocess.Popen[str]]) -> None:
    """Wait until all processes print that they are ready, then start them together."""
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
