"""Invariants of a study under any fault of its workers, checked with plain SQL and on the disk."""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import sqlalchemy as sa

from hpsearch.storage.checkpoints.store import get_checkpoint_path
from tests.faults.scripted import EPOCHS
from tests.web import open_url

OUTCOMES = {
    "COMPLETE": {"complete"},
    "PRUNED": {"pruned", "infeasible", "paused"},
    "FAIL": {"failed", "lost", "cancelled"},
}


@dataclass(frozen=True)
class Attempt:
    number: int
    outcome: str
    started: Any
    ended: Any


@dataclass(frozen=True)
class Trial:
    number: int
    state: str
    value: float | None
    values: dict[int, float]
    attempts: list[Attempt]
    pointers: list[str]

    @property
    def outcomes(self) -> list[str]:
        return [attempt.outcome for attempt in self.attempts]


def read_trials(url: str, study: str) -> list[Trial]:
    """Return all trials of a study, by number."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:

        def rows(query: str, **values: object) -> list[Any]:
            return list(connection.execute(sa.text(query), values))

        trials = []
        for row in rows(_TRIALS, study=study):
            values = rows("SELECT * FROM trial_intermediate_values WHERE trial_id = :id", id=row.trial_id)
            attempts = rows("SELECT * FROM hpsearch_attempts WHERE trial_id = :id ORDER BY attempt", id=row.trial_id)
            pointers = rows("SELECT path FROM hpsearch_checkpoints WHERE trial_id = :id", id=row.trial_id)
            trials.append(
                Trial(
                    row.number,
                    row.state,
                    row.value,
                    {v.step: v.intermediate_value for v in values},
                    [Attempt(a.attempt, a.outcome, a.started_at, a.ended_at) for a in attempts],
                    [p.path for p in pointers],
                )
            )
        return trials


_TRIALS = """
    SELECT trial_id, number, state, value FROM trials JOIN studies USING (study_id)
      LEFT JOIN (SELECT * FROM trial_values WHERE objective = 0) AS first USING (trial_id)
     WHERE study_name = :study ORDER BY number
"""


def assert_equals_undisturbed(
    url: str, study: str, home: Path, undisturbed: list[list[float]], n_trials: int, *, store: Path | None = None
) -> list[Trial]:
    """Assert that a study ended as without faults, and return its trials.

    Args:
        url: URL of its database.
        study: its name.
        home: folder of its checkpoints and run directories.
        undisturbed: the values of each trial per epoch, trained without services and faults.
        n_trials: its budget.
        store: folder of its checkpoints, if not in the home.
    """
    trials = read_trials(url, study)
    assert [t.number for t in trials] == list(range(n_trials)), "exactly the budget, without gap or double"
    for trial in trials:
        assert trial.state in OUTCOMES, f"trial {trial.number} is left {trial.state}"
        assert_attempts(trial)
        if trial.state == "COMPLETE":
            expected = undisturbed[trial.number]
            assert trial.values == dict(enumerate(expected)), f"trial {trial.number} gave other values"
            assert trial.value == min(expected)
            assert len(expected) == EPOCHS
    assert_files(home, store or home / "checkpoints", trials)
    return trials


_RUNGS = """
    SELECT number, rung, loss, promoted_at FROM hpsearch_rungs r JOIN trials USING (trial_id)
      JOIN studies s ON s.study_id = r.study_id WHERE study_name = :study ORDER BY rung, promoted_at, number
"""


def read_promotions(url: str, study: str, factor: int) -> list[tuple[int, int]]:
    """Return trial and rung of all promotions of a study that has ended, rung by rung in their order.

    Asserts that the best trials of each rung were promoted, and that all promoted trials reached the next rung.
    """
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        rows = list(connection.execute(sa.text(_RUNGS), {"study": study}))
    rungs = [[row for row in rows if row.rung == rung] for rung in range(1 + max(row.rung for row in rows))]
    for found, after in zip(rungs, [*rungs[1:], None], strict=True):
        promoted = {row.number for row in found if row.promoted_at is not None}
        best = {row.number for row in sorted(found, key=lambda row: row.loss)[: len(found) // factor]}
        assert best <= promoted, "one of the best was left behind"
        assert after is None or {row.number for row in after} == promoted
    return [(row.number, row.rung) for row in rows if row.promoted_at is not None]


def assert_attempts(trial: Trial) -> None:
    """Assert that each attempt ended before the next started, and that the last outcome is that of the trial."""
    attempts = trial.attempts
    assert [a.number for a in attempts] == list(range(1, len(attempts) + 1))
    assert all(a.ended is not None for a in attempts), f"trial {trial.number}: an attempt never ended"
    assert all(a.started <= a.ended for a in attempts)
    assert all(a.ended <= b.started for a, b in pairwise(attempts)), "two attempts at once"
    assert attempts[-1].outcome in OUTCOMES[trial.state]
    assert all(a.outcome in {"lost", "released", "failed", "paused"} for a in attempts[:-1])


def assert_files(home: Path, store: Path, trials: list[Trial]) -> None:
    """Assert that no superfluous checkpoint is left, and no temporary file."""
    kept = {path for trial in trials for path in trial.pointers}
    assert not [t.number for t in trials if t.pointers and t.state != "FAIL"], "pointers of trials that have ended"
    found = {get_checkpoint_path(str(path.relative_to(store))) for path in store.rglob("*") if path.is_file()}
    assert found == kept, "checkpoint files that no pointer names, or pointers to files that are gone"
    failed = {trial.number for trial in trials if trial.state == "FAIL"}
    names = ("last.pt", "previous.pt", "shards", ".*")
    local = [path for name in names for path in (home / "runs").glob(f"*/*/{name}")]
    left = [path for path in local if int(path.parent.name.partition("-")[0]) not in failed]
    assert not left, f"local files that only an unfinished trial would need: {left}"


def assert_tracked(tracking_uri: str, study: str, trials: list[Trial], *, models: Container[int] = ()) -> None:
    """Assert that each trial has one run in MLflow for all its attempts, with each of its epochs once.

    Each complete trial of `models` also has one complete model, linked to the metrics of its best epoch.
    """
    import mlflow

    client = mlflow.MlflowClient(tracking_uri)
    experiment = client.get_experiment_by_name("hpsearch")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id], f"tags.`hpsearch.study` = '{study}'")
    runs = {int(run.data.tags["hpsearch.trial"]): run for run in found if "hpsearch.trial" in run.data.tags}
    assert len(found) == len(runs) + 1 == len(trials) + 1, "the study's run, and one for each trial"
    status = {"COMPLETE": "FINISHED", "PRUNED": "FINISHED", "FAIL": "FAILED"}
    points = points_of(tracking_uri, list(runs.values()))
    for trial in trials:
        run = runs[trial.number]
        assert (run.info.status, run.data.tags["hpsearch.state"]) == (status[trial.state], trial.state.lower())
        known = points[run.info.run_id]
        assert dict(known["val_loss"]) == trial.values
        assert {"train_loss", "lr", "epoch_seconds", "samples_per_second", "grad_norm"} <= set(known)
        several = {key: len(found) for key, found in known.items()}
        assert several["val_loss"] == len(trial.values), f"trial {trial.number} has an epoch twice"
        assert set(several.values()) <= {1, len(trial.values)}, f"trial {trial.number}: {several}"
        if trial.number in models and trial.state == "COMPLETE":
            assert_model(client, run, trial)


def points_of(tracking_uri: str, runs: list[Any]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return step and value of each point of each metric of each run, with the UI's query for all runs at once."""
    points: dict[str, dict[str, list[tuple[int, float]]]] = {run.info.run_id: {} for run in runs}
    for key in sorted({key for run in runs for key in run.data.metrics}):
        query = urlencode({"run_id": list(points), "metric_key": key, "max_results": 25000}, doseq=True)
        with open_url(f"{tracking_uri}/ajax-api/2.0/mlflow/metrics/get-history-bulk?{query}") as reply:
            for point in json.load(reply)["metrics"]:
                points[point["run_id"]].setdefault(key, []).append((int(point["step"]), float(point["value"])))
    return points


def assert_model(client: Any, run: Any, trial: Trial) -> None:
    """Assert that the run has exactly one model, which is ready and has the trial's value as metric."""
    found = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'")
    assert [m.status for m in found] == ["READY"], f"trial {trial.number} has {len(found)} models"
    assert [o.model_id for o in run.outputs.model_outputs] == [found[0].model_id]
    linked = {metric.key: metric.value for metric in found[0].metrics}
    assert linked["val_loss"] == trial.value
    assert "checkpoints" in {f.path for f in client.list_artifacts(run.info.run_id)}
