"""Adaptation of restored databases to their new services."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from hpsearch.storage.attributes import (
    CHECKPOINT_URL,
    FOLDER_NAME,
    MODEL,
    PENDING,
    RESTORED,
    RESTORED_CHECKPOINTS,
    RUN_ID,
    RUN_URL,
    SPEC,
    TRACKING,
    TRACKING_URI,
    DamagedValue,
    decode_attr,
    make_default_folder_name,
)
from hpsearch.storage.database.mlflow_links import RUN_PAGE, replace_run_links
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.locations import is_in_known_store

# Release running trials as a worker does: no retry is counted, and the next worker resumes the trial. Workers of the
# original database are marked as exited.
_RELEASE = """
    WITH ended AS (
        UPDATE hpsearch_attempts SET ended_at = clock_timestamp(), outcome = 'released' WHERE ended_at IS NULL
        RETURNING trial_id
    )
    UPDATE trials SET state = 'WAITING', datetime_start = NULL
     WHERE state = 'RUNNING' AND trial_id IN (SELECT trial_id FROM ended);
    UPDATE hpsearch_workers SET left_at = clock_timestamp(), left_as = 'restored elsewhere' WHERE left_at IS NULL;
"""


def release_trials(cursor: Any) -> None:
    """Release the trials that were running at the backup, because their workers do not use the restored database."""
    cursor.execute(_RELEASE)


def repair_attributes(studies: Any) -> None:
    """Remove damaged attributes that the restore reads; a damaged mark of unsent records becomes a new one.

    Any worker can write them, and text that is not valid JSON would end a statement.
    """
    for table, owner in (("study_user_attributes", "study_id"), ("trial_user_attributes", "trial_id")):
        studies.execute(
            f"SELECT {owner}, key, value_json FROM {table} WHERE key = ANY(%s)",  # noqa: S608 constant names
            ([RUN_ID, RUN_URL, TRACKING, TRACKING_URI, CHECKPOINT_URL],),
        )
        for row, key, value in studies.fetchall():
            if _is_plain_text(decode_attr(value)):
                continue
            if key == TRACKING:
                statement, values = f"UPDATE {table} SET value_json = %s", [json.dumps(PENDING)]  # noqa: S608 constant names
            else:
                statement, values = f"DELETE FROM {table}", []  # noqa: S608 constant names
            studies.execute(f"{statement} WHERE {owner} = %s AND key = %s", (*values, row, key))


def _is_plain_text(value: Any) -> bool:
    """Return whether Postgres can read the JSON text of a value as a string."""
    is_text = isinstance(value, str) and not isinstance(value, DamagedValue)
    return is_text and "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


def mark_restored(cursor: Any) -> None:
    """Mark all studies as restored, so that the user has to confirm their objectives and checkpoints."""
    cursor.execute(
        """
        INSERT INTO study_user_attributes (study_id, key, value_json)
        SELECT study_id, mark, 'true' FROM study_user_attributes, unnest(%s) AS mark WHERE key = %s
        ON CONFLICT (study_id, key) DO UPDATE SET value_json = excluded.value_json
        """,
        ([RESTORED, RESTORED_CHECKPOINTS], SPEC),
    )


def record_study_ids(cursor: Any) -> None:
    """Record the ids of all studies, as a trigger does for new studies, because the dump may lack some of them."""
    cursor.execute("INSERT INTO hpsearch_study_ids SELECT study_id FROM studies ON CONFLICT DO NOTHING")


# Clear the mark of unsent records of trials whose run reached MLflow after the snapshot of the studies.
# CASE guarantees the order of evaluation: other attributes may contain NaN or damaged JSON, which Postgres rejects.
_RECORD_UPLOADED = """
    WITH arrived AS (
        SELECT DISTINCT ON (t.trial_id) t.trial_id, r.run_id, r.model
          FROM jsonb_to_recordset(%(runs)s) AS r (study_id int, number int, run_id text, model text)
          JOIN trials t ON t.study_id = r.study_id AND t.number = r.number
          JOIN trial_user_attributes a ON a.trial_id = t.trial_id AND a.key = %(tracking)s
         WHERE t.state = 'COMPLETE'
           AND CASE WHEN a.key = %(tracking)s THEN starts_with(a.value_json::jsonb #>> '{}', %(pending)s) END
    ), noted AS (
        INSERT INTO trial_user_attributes (trial_id, key, value_json)
        SELECT trial_id, key, to_json(value)::text
          FROM arrived, LATERAL (VALUES (%(run_id)s, run_id), (%(model)s, model)) AS v (key, value)
         WHERE value IS NOT NULL
        ON CONFLICT (trial_id, key) DO UPDATE SET value_json = excluded.value_json
    )
    DELETE FROM trial_user_attributes a USING arrived WHERE a.trial_id = arrived.trial_id AND a.key = %(tracking)s
"""


def reconcile_databases(studies: Any, mlflow: Any) -> None:
    """Reconcile the two databases, because the snapshot of MLflow is slightly newer than that of the studies.

    Runs of trials that started between the two snapshots are marked as deleted, because their trial numbers will be
    used again. Runs that ended between the two snapshots are recorded as uploaded, because no worker will send their
    records again.

    Args:
        studies: cursor on the study database.
        mlflow: cursor on MLflow's database.
    """
    studies.execute(
        """
        SELECT r.value_json::jsonb #>> '{}', s.study_name, s.study_id,
               (SELECT count(*) FROM trials t WHERE t.study_id = s.study_id)
          FROM studies s JOIN study_user_attributes r ON r.study_id = s.study_id AND r.key = %s
        """,
        (RUN_ID,),
    )
    # The key includes the study's name, because runs of finalists have the parent run of the search that they retrain.
    known = {(parent, name): (study_id, trials) for parent, name, study_id, trials in studies}
    mlflow.execute(
        """
        SELECT r.run_uuid, r.status, parent.value, study.value, trial.value, model.value
          FROM runs r
          JOIN tags study ON study.run_uuid = r.run_uuid AND study.key = %s
          JOIN tags parent ON parent.run_uuid = r.run_uuid AND parent.key = 'mlflow.parentRunId'
          JOIN tags trial ON trial.run_uuid = r.run_uuid AND trial.key = %s
          LEFT JOIN tags model ON model.run_uuid = r.run_uuid AND model.key = %s
         WHERE r.lifecycle_stage = 'active' AND trial.value ~ '^[0-9]{1,9}$'
        """,
        (tag_names.STUDY, tag_names.TRIAL, tag_names.MODEL_ID),
    )
    later, finished = [], []
    for run_id, status, parent, name, trial, model in mlflow:
        if (parent, name) not in known:
            continue
        study_id, trials = known[parent, name]
        if int(trial) >= trials:
            later.append(run_id)
        elif status == "FINISHED":
            finished.append({"study_id": study_id, "number": int(trial), "run_id": run_id, "model": model})
    mlflow.execute(
        """
        UPDATE runs
           SET lifecycle_stage = 'deleted', deleted_time = (extract(epoch FROM clock_timestamp()) * 1000)::bigint
         WHERE run_uuid = ANY(%s) AND NOT EXISTS (SELECT FROM model_versions v WHERE v.run_id = run_uuid)
        """,
        (later,),
    )
    keys = {"tracking": TRACKING, "pending": PENDING, "run_id": RUN_ID, "model": MODEL}
    studies.execute(_RECORD_UPLOADED, {"runs": json.dumps(finished), **keys})


# Columns with artifact locations, the rows that have them, and the id that the location must contain ('' for none).
# `mlflow gc` deletes the locations of deleted runs, models and traces, but not the other locations.
_LOCATIONS = (
    ("experiments", "artifact_location", "true", "''"),
    ("runs", "artifact_uri", "true", "run_uuid"),
    ("logged_models", "artifact_location", "true", "model_id"),
    ("model_versions", "source", "true", "''"),
    ("model_versions", "storage_location", "true", "''"),
    ("trace_tags", "value", "key IN ('mlflow.artifactLocation', 'mlflow.trace.archiveLocation')", "request_id"),
    ("workspaces", "trace_archival_location", "true", "''"),
)
_SIZES = """
    SELECT table_name, column_name, character_maximum_length
      FROM information_schema.columns WHERE table_schema = current_schema()
"""
_ID = "(m-|tr-)?[0-9a-f]{32}"  # of a run, model or trace
_PROXY = "mlflow-artifacts:/"
# The path below the folder of all artifacts: EXPERIMENT, or EXPERIMENT/RUN/artifacts/..., also of models and traces.
_PROXIED_PATH = re.compile(rf"(?:^|/)(?P<path>\d+(?:/(?:models/|traces/)?{_ID}/artifacts(?:/(?!\.\.?/)[^/]+)*)?)/?$")
_PLAIN = re.compile(r"[a-z0-9-]+:/(?!.*/\.\.?(/|$))[\w.:@$/-]+", re.ASCII)  # without `..`, `%` and backslashes
_REFERENCE = re.compile(r"(models|runs):/(?!/)(?!.*\.\.).+")


def replace_artifact_locations(mlflow: Any) -> int:
    """Replace locations in local folders and on other servers by the same paths at the server's artifact proxy.

    MLflow reads, writes and deletes files at these locations, and the author of a backup could name any folder.

    Returns:
        Number of replaced locations.
    """
    replaced = 0
    mlflow.execute(_SIZES)  # of text columns; the tables of an older schema lack some of the columns
    sizes = {(table, column): size for table, column, size in mlflow.fetchall()}
    for table, column, condition, owner in _LOCATIONS:
        if (table, column) not in sizes:
            continue
        has_own_id = f"{owner} = '' OR {owner} ~ '^{_ID}$' AND strpos({column} || '/', '/' || {owner} || '/') > 0"
        mlflow.execute(
            f"SELECT DISTINCT {owner}, {column}, {has_own_id} FROM {table} WHERE {condition} "  # noqa: S608 constants
            f"AND ({column} !~ '^{_PROXY}[0-9a-zA-Z_][0-9a-zA-Z_/-]*$' OR NOT ({has_own_id}))"
        )
        for owner_id, location, is_own in mlflow.fetchall():
            if is_own and _is_allowed_location(location):
                continue
            path = _PROXIED_PATH.search(location)
            new = path["path"] if path and is_own else ""
            if not new or len(_PROXY + new) > (sizes[table, column] or math.inf):
                new = "/".join(["unknown", *re.findall(r"[\w-]+", owner_id)])
            mlflow.execute(
                f"UPDATE {table} SET {column} = %s WHERE {condition} "  # noqa: S608 constants
                f"AND {column} = %s AND {owner} = %s",
                (_PROXY + new, location, owner_id),
            )
            replaced += mlflow.rowcount
    return replaced


def _is_allowed_location(location: str) -> bool:
    """Return whether a location is a plain path of the server's proxy, a reference to a model or run, or in a store."""
    if not _PLAIN.fullmatch(location):
        return False
    if location.startswith((_PROXY, "http:", "https:")):
        return location.startswith(_PROXY) and not location.startswith(f"{_PROXY}/")
    return is_in_known_store(location) or _REFERENCE.fullmatch(location) is not None


# Webhooks would send events to addresses that the author of the backup has chosen, and a server that starts continues
# unfinished jobs and scores traces with its keys of language models.
_ACTING_TABLES = ("webhook_events", "webhooks", "jobs", "online_scoring_configs")


def delete_acting_rows(mlflow: Any) -> None:
    """Delete the rows that an MLflow server acts on by itself, and reset the artifact roots of workspaces."""
    mlflow.execute(_SIZES)  # the tables of an older schema
    columns = {(table, column) for table, column, _ in mlflow.fetchall()}
    for table in _ACTING_TABLES:
        if any(table == each for each, _ in columns):
            mlflow.execute(f"DELETE FROM {table}")  # noqa: S608 constant names
    if ("workspaces", "default_artifact_root") in columns:
        mlflow.execute("UPDATE workspaces SET default_artifact_root = NULL")


def find_studies_with_unsent_trials(studies: Any) -> list[str]:
    """Return the names of the studies with COMPLETE trials whose records were not in MLflow at the backup."""
    studies.execute(
        """
        SELECT DISTINCT s.study_name
          FROM trials t JOIN studies s USING (study_id) JOIN trial_user_attributes a USING (trial_id)
         WHERE t.state = 'COMPLETE' AND CASE WHEN a.key = %s THEN starts_with(a.value_json::jsonb #>> '{}', %s) END
         ORDER BY s.study_name
        """,
        (TRACKING, PENDING),
    )
    return [str(name) for (name,) in studies.fetchall()]


def rewrite_mlflow_urls(studies: Any, mlflow: Any | None, *, tracking_uri: str, ui_url: str) -> None:
    """Rewrite the stored links to MLflow for the server that has the restored runs.

    Args:
        studies: cursor on the study database.
        mlflow: cursor on MLflow's database; None if it was not restored.
        tracking_uri: address of the MLflow server.
        ui_url: address of the MLflow server for browsers.
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
        (RUN_PAGE, RUN_URL, RUN_URL),
    )
    new = ui_url.rstrip("/")
    for (base,) in studies.fetchall():
        if base and base != new:
            replace_run_links(studies, mlflow, base, new)


def list_study_folders(studies: Any) -> set[str]:
    """Return the stored and the default names of the folders of all studies."""
    studies.execute("SELECT value_json FROM study_user_attributes WHERE key = %s", (FOLDER_NAME,))
    stored = {str(decode_attr(value)) for (value,) in studies.fetchall()}
    studies.execute("SELECT study_name, study_id FROM studies")
    return stored | {make_default_folder_name(name, study_id) for name, study_id in studies.fetchall()}


def remove_home_checkpoint_urls(studies: Any, home: str) -> list[tuple[str, str]]:
    """Remove checkpoint URLs in the old home folder, so that their studies use the current home folder.

    Returns:
        (name, checkpoint URL) of each study whose checkpoints are elsewhere.
    """
    urls = [f"{scheme}{home}/checkpoints" for scheme in ("", "file://")]
    studies.execute(
        "DELETE FROM study_user_attributes "
        "WHERE CASE WHEN key = %s THEN rtrim(value_json::jsonb #>> '{}', '/') = ANY(%s) END",
        (CHECKPOINT_URL, urls),
    )
    studies.execute(
        "SELECT s.study_name, a.value_json::jsonb #>> '{}' FROM studies s "
        "JOIN study_user_attributes a USING (study_id) WHERE a.key = %s ORDER BY s.study_name",
        (CHECKPOINT_URL,),
    )
    return [(str(name), str(url)) for name, url in studies.fetchall()]
