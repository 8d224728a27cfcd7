"""Trigger functions that use only the operators, functions and tables that they name."""

from __future__ import annotations

import runpy
from pathlib import Path

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"

# With the schema in the search path, an operator there that fits the types exactly precedes the one of `pg_catalog`. So
# users who could create one there, which all users could before Postgres 15, could run code as the owner of the tables.
_PATH = "SET search_path = pg_catalog, pg_temp"

# The functions are those of the migrations 0003, 0010 and 0011. The owner of the tables may change everything.
_FUNCTIONS = (
    """
    CREATE OR REPLACE FUNCTION {schema}.hpsearch_keep_opening() RETURNS trigger LANGUAGE plpgsql {path} AS $$
    BEGIN
        IF TG_OP = 'DELETE' THEN
            IF EXISTS (SELECT FROM {schema}.studies WHERE study_id = OLD.study_id) THEN
                RAISE EXCEPTION 'the test set of study % was opened at %', OLD.study_id, OLD.opened_at;
            END IF;
            RETURN OLD;
        END IF;
        IF OLD.scores IS NOT NULL OR to_jsonb(NEW) - 'scores' IS DISTINCT FROM to_jsonb(OLD) - 'scores' THEN
            RAISE EXCEPTION 'the test set of study % was opened at %', OLD.study_id, OLD.opened_at;
        END IF;
        RETURN NEW;
    END $$
    """,
    """
    CREATE OR REPLACE FUNCTION {schema}.hpsearch_fix_attribute() RETURNS trigger LANGUAGE plpgsql {path} AS $$
    DECLARE
        budgets CONSTANT text[] := ARRAY['n_trials', 'budget_epochs', 'budget_seconds'];
        before jsonb;
        after jsonb;
    BEGIN
        IF pg_has_role((SELECT relowner FROM pg_class WHERE oid = TG_RELID), 'USAGE')
           OR NOT EXISTS (SELECT FROM {schema}.studies WHERE study_id = OLD.study_id) THEN
            RETURN NULL;
        END IF;
        before := OLD.value_json::jsonb;
        SELECT value_json::jsonb INTO after FROM {schema}.study_user_attributes
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
    """,
    """
    CREATE OR REPLACE FUNCTION {schema}.hpsearch_record_study_id() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER {path} AS $$
    BEGIN
        IF TG_RELID = {studies}::regclass THEN
            INSERT INTO {schema}.hpsearch_study_ids VALUES (NEW.study_id) ON CONFLICT DO NOTHING;
        END IF;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'an earlier study had the id %', NEW.study_id USING ERRCODE = 'insufficient_privilege';
        END IF;
        RETURN NULL;
    END $$
    """,
)

# A trigger stores the operators of its condition when it is created, so this one may have an operator of another user.
_TRIGGER = (
    "DROP TRIGGER hpsearch_fix_attribute ON {schema}.study_user_attributes",
    """
    CREATE CONSTRAINT TRIGGER hpsearch_fix_attribute AFTER UPDATE OR DELETE ON {schema}.study_user_attributes
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (OLD.key::text OPERATOR(pg_catalog.=) ANY (ARRAY[
        'hpsearch:spec', 'hpsearch:folder', 'hpsearch:checkpoint_url', 'hpsearch:objective_sha256']))
    EXECUTE FUNCTION {schema}.hpsearch_fix_attribute()
    """,
)
_SCHEMA = sa.text("""
    SELECT relnamespace::regnamespace::text, quote_literal(relnamespace::regnamespace::text || '.studies')
      FROM pg_class WHERE oid OPERATOR(pg_catalog.=) 'studies'::regclass::oid
""")


def upgrade() -> None:
    """Replace the functions and the condition of the trigger."""
    schema, studies = op.get_bind().execute(_SCHEMA).one()
    for statement in (*_FUNCTIONS, *_TRIGGER):
        op.execute(statement.format(schema=schema, studies=studies, path=_PATH))


def downgrade() -> None:
    """Restore the search paths; the statements of the functions are valid with these too."""
    fix = runpy.run_path(str(Path(__file__).with_name("0010_fixed_settings.py")))["_FIX_SEARCH_PATH"]
    for name in ("hpsearch_fix_attribute", "hpsearch_keep_opening", "hpsearch_record_study_id"):
        op.execute(fix.format(name=name))
