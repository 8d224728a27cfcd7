"""What this release expects to find in the study database."""

from __future__ import annotations

# The head of Optuna's own migrations, kept here so that a check need not import Optuna.
OPTUNA_REVISION = "v3.2.0.a"

# The version table of Optuna's migrations, and of MLflow's in its own database: Alembic's default.
ALEMBIC_TABLE = "alembic_version"

# The head of our own migrations (storage/migrations), and the table that holds it.
REVISION = "0008"
VERSION_TABLE = "hpsearch_alembic_version"

# True where the tables are of this release.
IS_CURRENT = f"""
    SELECT EXISTS (SELECT FROM {ALEMBIC_TABLE} WHERE version_num = '{OPTUNA_REVISION}')
       AND EXISTS (SELECT FROM {VERSION_TABLE} WHERE version_num = '{REVISION}')
"""  # noqa: S608 the parts are constants

# A schema that is there while a backup is put back: what it leaves behind when it is killed is not whole.
RESTORING = "hpsearch_restoring"
IS_RESTORED_BY_HALF = f"SELECT to_regnamespace('{RESTORING}') IS NOT NULL"

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
    "version_info",
)

OUR_TABLES = (
    "hpsearch_attempts",
    "hpsearch_checkpoints",
    "hpsearch_test_openings",
    "hpsearch_promotions",
    "hpsearch_workers",
    "hpsearch_rungs",
    "hpsearch_rung_cuts",
    "hpsearch_spending",
    "hpsearch_epoch_values",
)
