"""Schema of the study database that this version of hpsearch needs."""

from __future__ import annotations

# Head of Optuna's migrations; a constant, so that a check does not import Optuna.
OPTUNA_REVISION = "v3.2.0.a"

# Version table of Optuna's migrations, and of MLflow's in its own database: the default of Alembic.
ALEMBIC_TABLE = "alembic_version"

# Head of the migrations in storage/database/migrations, and the table with the current revision.
REVISION = "0017"
VERSION_TABLE = "hpsearch_alembic_version"
REVISION_TABLES = (ALEMBIC_TABLE, VERSION_TABLE)
OPTUNA_VERSION_TABLE = "version_info"  # the version of Optuna that created the tables

# Returns true if the tables have the revisions of this version.
CURRENT_SCHEMA_QUERY = f"""
    SELECT EXISTS (SELECT FROM {ALEMBIC_TABLE} WHERE version_num = '{OPTUNA_REVISION}')
       AND EXISTS (SELECT FROM {VERSION_TABLE} WHERE version_num = '{REVISION}')
"""  # noqa: S608 the parts are constants

# Postgres schema that exists during a restore: if it remains, the restore was interrupted.
RESTORE_SCHEMA = "hpsearch_restoring"
PARTIAL_RESTORE_QUERY = f"SELECT to_regnamespace('{RESTORE_SCHEMA}') IS NOT NULL"

OPTUNA_TABLES = (
    "studies",
    "study_directions",
    "study_user_attributes",
    "study_system_attributes",
    "trials",
    "trial_user_attributes",
    "trial_system_attributes",
    "trial_params",
    "trial_values",
    "trial_intermediate_values",
    "trial_heartbeats",
    OPTUNA_VERSION_TABLE,
)

OPTUNA_TYPES = ("studydirection", "trialstate", "trialvaluetype", "trialintermediatevaluetype")

OWN_TABLES = (
    "hpsearch_attempts",
    "hpsearch_checkpoints",
    "hpsearch_test_openings",
    "hpsearch_promotions",
    "hpsearch_workers",
    "hpsearch_rungs",
    "hpsearch_rung_cuts",
    "hpsearch_spending",
    "hpsearch_epoch_values",
    "hpsearch_generations",
)

# Ids of all studies, also of deleted ones; workers cannot use it.
STUDY_IDS_TABLE = "hpsearch_study_ids"
