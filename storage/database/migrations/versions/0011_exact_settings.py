"""Trigger function that compares the settings of a study exactly, except its budgets."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from alembic import op

revision = "0011"
down_revision = "0010"

# The owner of the tables may change everything, for a restore. The trigger is that of migration 0009.
_FUNCTION = """
    CREATE OR REPLACE FUNCTION hpsearch_fix_attribute() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        budgets CONSTANT text[] := ARRAY['n_trials', 'budget_epochs', 'budget_seconds'];
        before jsonb;
        after jsonb;
    BEGIN
        IF pg_has_role((SELECT relowner FROM pg_class WHERE oid = TG_RELID), 'USAGE')
           OR NOT EXISTS (SELECT FROM studies WHERE study_id = OLD.study_id) THEN
            RETURN NULL;
        END IF;
        before := OLD.value_json::jsonb;
        SELECT value_json::jsonb INTO after FROM study_user_attributes
         WHERE study_id = OLD.study_id AND key = OLD.key;
        IF OLD.key = 'hpsearch:spec' AND jsonb_typeof(before) = 'object' AND jsonb_typeof(after) = 'object' THEN
            before := before - budgets;
            after := after - budgets;
        END IF;
        IF after IS NOT DISTINCT FROM before THEN
            RETURN NULL;
        END IF;
        RAISE EXCEPTION 'the attribute % of study % cannot be changed', OLD.key, OLD.study_id
              USING ERRCODE = 'insufficient_privilege';
    END $$
"""


def upgrade() -> None:
    """Replace the trigger function."""
    _replace_function(_FUNCTION)


def downgrade() -> None:
    """Restore the function of the previous migration."""
    _replace_function(_read_previous()["_FUNCTION"])


def _replace_function(statement: str) -> None:
    op.execute(statement)
    op.execute(_read_previous()["_FIX_SEARCH_PATH"].format(name="hpsearch_fix_attribute"))


def _read_previous() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).with_name("0010_fixed_settings.py")))
