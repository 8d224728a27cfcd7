"""What a restored database says of where it came from, made true of where it is now."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hpsearch.storage.attributes import CHECKPOINT_URL, MODEL, PENDING, RUN_ID, RUN_URL, TRACKING, TRACKING_URI
from hpsearch.storage.mlflow.client import MODEL_ID, STUDY, TRIAL

_RUN_PAGE = "/#/experiments/"  # what follows a server's address in that of a run's page

# As a worker does that gives its trial back: it costs no retry, and who claims next goes on with it. The workers of
# the old place are told of as gone: nothing here is theirs.
_RELEASE = """
    WITH ended AS (
        UPDATE hpsearch_attempts SET ended_at = clock_timestamp(), outcome = 'released' WHERE ended_at IS NULL
        RETURNING trial_id
    )
    UPDATE trials SET state = 'WAITING'
     WHERE state = 'RUNNING' AND trial_id IN (SELECT trial_id FROM ended);
    UPDATE hpsearch_workers SET left_at = clock_timestamp(), left_as = 'restored elsewhere' WHERE left_at IS NULL;
"""


def release_trials(cursor: Any) -> None:
    """Give back the trials that were running: their workers are elsewhere."""
    cursor.execute(_RELEASE)


@dataclass(frozen=True)
class _Run:
    run_id: str
    finished: bool
    study: str
    number: int
    parent: str | None
    model: str | None


def reconcile(studies: Any, mlflow: Any) -> None:
    """Bring the two databases in line: MLflow's was read a moment after that of the studies.

    Runs of trials that began in between are marked as deleted, for the trials of these numbers are still to come. What
    MLflow got whole in between is noted so: its checkpoint may be gone, and nobody will send it again.

    Args:
        studies: a cursor on the database of the studies.
        mlflow: one on MLflow's.
    """
    runs = _trial_runs(mlflow)
    studies.execute(
        """
        SELECT s.study_name, r.value_json::jsonb #>> '{}', (SELECT count(*) FROM trials t WHERE t.study_id = s.study_id)
          FROM studies s JOIN study_user_attributes r ON r.study_id = s.study_id AND r.key = %s
        """,
        (RUN_ID,),
    )
    known = {name: (parent, trials) for name, parent, trials in studies.fetchall()}
    later = [
        r.run_id for r in runs if r.study in known and r.parent == known[r.study][0] and r.number >= known[r.study][1]
    ]
    mlflow.execute(
        """
        UPDATE runs
           SET lifecycle_stage = 'deleted', deleted_time = (extract(epoch FROM clock_timestamp()) * 1000)::bigint
         WHERE run_uuid = ANY(%s) AND NOT EXISTS (SELECT FROM model_versions v WHERE v.run_id = run_uuid)
        """,
        (later,),
    )
    studies.execute(
        """
        SELECT s.study_name, t.number, t.trial_id
          FROM trials t JOIN studies s USING (study_id)
          JOIN trial_user_attributes a ON a.trial_id = t.trial_id AND a.key = %s
         WHERE t.state = 'COMPLETE' AND starts_with(a.value_json::jsonb #>> '{}', %s)
        """,
        (TRACKING, PENDING),
    )
    pending = {(name, number): trial for name, number, trial in studies.fetchall()}
    for run in runs:
        mine = run.study in known and run.parent == known[run.study][0]
        if mine and run.finished and (trial := pending.get((run.study, run.number))) is not None:
            _note_arrived(studies, trial, run)


def _trial_runs(mlflow: Any) -> list[_Run]:
    mlflow.execute(
        """
        SELECT r.run_uuid, r.status = 'FINISHED', study.value, trial.value, parent.value, model.value
          FROM runs r
          JOIN tags study ON study.run_uuid = r.run_uuid AND study.key = %s
          JOIN tags trial ON trial.run_uuid = r.run_uuid AND trial.key = %s
          LEFT JOIN tags parent ON parent.run_uuid = r.run_uuid AND parent.key = 'mlflow.parentRunId'
          LEFT JOIN tags model ON model.run_uuid = r.run_uuid AND model.key = %s
         WHERE r.lifecycle_stage = 'active' AND trial.value ~ '^[0-9]{1,9}$'
        """,
        (STUDY, TRIAL, MODEL_ID),
    )
    return [_Run(run, ended, study, int(trial), parent, model) for run, ended, study, trial, parent, model in mlflow]


def _note_arrived(studies: Any, trial: int, run: _Run) -> None:
    for key, value in ((RUN_ID, run.run_id), (MODEL, run.model)):
        if value is not None:
            studies.execute(
                "INSERT INTO trial_user_attributes (trial_id, key, value_json) VALUES (%s, %s, %s) "
                "ON CONFLICT (trial_id, key) DO UPDATE SET value_json = excluded.value_json",
                (trial, key, json.dumps(value)),
            )
    studies.execute("DELETE FROM trial_user_attributes WHERE trial_id = %s AND key = %s", (trial, TRACKING))


def readdress(studies: Any, mlflow: Any | None, *, tracking_uri: str, ui_url: str) -> None:
    """Let links lead to the MLflow server that has the runs now, wherever they are shown.

    Args:
        studies: a cursor on the database of the studies.
        mlflow: one on MLflow's, where that was restored.
        tracking_uri: the server's address.
        ui_url: where browsers reach it.
    """
    studies.execute(
        "UPDATE study_user_attributes SET value_json = %s WHERE key = %s",
        (json.dumps(tracking_uri.rstrip("/")), TRACKING_URI),
    )
    studies.execute(
        """
        SELECT DISTINCT split_part(value_json::jsonb #>> '{}', %s, 1) FROM (
            SELECT value_json FROM study_user_attributes WHERE key = %s
            UNION ALL SELECT value_json FROM trial_user_attributes WHERE key = %s) AS shown
        """,
        (_RUN_PAGE, RUN_URL, RUN_URL),
    )
    new = ui_url.rstrip("/") + _RUN_PAGE
    for (base,) in studies.fetchall():
        old = f"{base}{_RUN_PAGE}"
        if not base or old == new:
            continue
        for table in ("study_user_attributes", "trial_user_attributes", "study_system_attributes"):
            studies.execute(
                f"UPDATE {table} SET value_json = replace(value_json, %s, %s) WHERE strpos(value_json, %s) > 0",  # noqa: S608 names of ours
                (old, new, old),
            )
        studies.execute(
            "UPDATE hpsearch_promotions SET evidence = replace(evidence::text, %s, %s)::jsonb "
            "WHERE strpos(evidence::text, %s) > 0",
            (old, new, old),
        )
        if mlflow is not None:  # the pages of promoted versions
            mlflow.execute(
                "UPDATE model_versions SET description = left(replace(description, %s, %s), 5000) "
                "WHERE strpos(description, %s) > 0",
                (old, new, old),
            )


def forget_home(studies: Any, home: str) -> list[tuple[str, str]]:
    """Let studies whose checkpoints lay in the old home have them in this one, where they were put.

    Returns:
        The other studies that name a place for their checkpoints: name and URL.
    """
    places = [f"{head}{home}/checkpoints" for head in ("", "file://")]
    studies.execute(
        "DELETE FROM study_user_attributes WHERE key = %s AND rtrim(value_json::jsonb #>> '{}', '/') = ANY(%s)",
        (CHECKPOINT_URL, places),
    )
    studies.execute(
        "SELECT s.study_name, a.value_json::jsonb #>> '{}' FROM studies s "
        "JOIN study_user_attributes a USING (study_id) WHERE a.key = %s ORDER BY s.study_name",
        (CHECKPOINT_URL,),
    )
    return [(str(name), str(url)) for name, url in studies.fetchall()]
