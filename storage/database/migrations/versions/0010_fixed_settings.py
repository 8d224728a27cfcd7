"""Triggers that reject changes of all settings of a study except its budgets, and ids of deleted studies."""

from __future__ import annotations

import runpy
from pathlib import Path

from alembic import op

revision = "0010"
down_revision = "0009"

# The owner of the tables may change everything, for a restore. Of a spec, `extend` may change the budgets. It also adds
# settings of later versions with their defaults, and replaces the references by which earlier versions stored built-in
# objectives. The trigger is that of the previous migration.
_FUNCTION = """
    CREATE OR REPLACE FUNCTION hpsearch_fix_attribute() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
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
        IF OLD.key = 'hpsearch:spec' AND before ? 'stop_when' AND NOT after ? 'stop_when' THEN  -- its former name
            before := before - 'stop_when' || jsonb_build_object('min_expected_gain', before -> 'stop_when');
        END IF;
        IF OLD.key = 'hpsearch:spec' AND before -> 'sampler' ->> 'name' = 'curves'
           AND after -> 'sampler' ->> 'name' = 'freeze_thaw' THEN  -- its former name
            before := jsonb_set(before, '{sampler,name}', '"freeze_thaw"');
        END IF;
        IF OLD.key = 'hpsearch:spec' AND jsonb_typeof(before) = 'object' AND jsonb_typeof(after) = 'object'
           AND NOT EXISTS (
               SELECT FROM jsonb_each(before) AS b (key, value)
                WHERE b.key NOT IN ('n_trials', 'budget_epochs', 'budget_seconds')
                  AND CASE WHEN b.key = 'objective' AND starts_with(
                                before ->> 'objective', 'objectives.' || (after ->> 'objective') || ':') THEN false
                           WHEN b.key IN ('sampler', 'pruner') AND jsonb_typeof(b.value) = 'object'
                                THEN (after -> b.key @> b.value) IS NOT TRUE
                           ELSE after -> b.key IS DISTINCT FROM b.value END)
           AND NOT EXISTS (
               SELECT FROM jsonb_each(after - ARRAY(SELECT jsonb_object_keys(before))) AS a (key, value)
                WHERE a.key IN ('name', 'objective', 'tensorboard', 'wandb', 'finalists_of') AND a.value <> 'null') THEN
            RETURN NULL;
        END IF;
        IF OLD.key <> 'hpsearch:spec' AND after IS NOT DISTINCT FROM before THEN
            RETURN NULL;
        END IF;
        RAISE EXCEPTION 'the attribute % of study % cannot be changed', OLD.key, OLD.study_id
              USING ERRCODE = 'insufficient_privilege';
    END $$
"""

# Workers and caches refer to a study by its id, so a worker's role must not delete a study and insert another one with
# its id. The ids are a primary key, because a query would not see ids of concurrent transactions. Row level security
# without a policy rejects all roles but the owner, even after GRANT ... ON ALL TABLES. The function runs as the owner;
# the comparison keeps other roles from using it in a trigger of their own tables.
_STUDY_IDS = (
    "CREATE TABLE hpsearch_study_ids (study_id integer PRIMARY KEY)",
    "ALTER TABLE hpsearch_study_ids ENABLE ROW LEVEL SECURITY",
    """
    CREATE FUNCTION hpsearch_record_study_id() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
    BEGIN
        IF TG_RELID = 'studies'::regclass THEN
            INSERT INTO hpsearch_study_ids VALUES (NEW.study_id) ON CONFLICT DO NOTHING;
        END IF;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'an earlier study had the id %', NEW.study_id USING ERRCODE = 'insufficient_privilege';
        END IF;
        RETURN NULL;
    END $$
    """,
    """
    CREATE TRIGGER hpsearch_record_study_id AFTER INSERT OR UPDATE OF study_id ON studies
    FOR EACH ROW EXECUTE FUNCTION hpsearch_record_study_id()
    """,
    "INSERT INTO hpsearch_study_ids SELECT study_id FROM studies",
)

# Without this, the role that runs the statement chooses the tables and operators that a trigger uses. Postgres searches
# temporary tables first, unless the path names them.
_FIX_SEARCH_PATH = """
    DO $$ BEGIN
        EXECUTE format('ALTER FUNCTION {name}() SET search_path = pg_catalog, %I, pg_temp', current_schema());
    END $$
"""


def upgrade() -> None:
    """Replace the trigger function for fixed attributes, record ids, and fix the search path of trigger functions."""
    op.execute(_FUNCTION)
    for statement in _STUDY_IDS:
        op.execute(statement)
    for name in ("hpsearch_fix_attribute", "hpsearch_keep_opening", "hpsearch_record_study_id"):
        op.execute(_FIX_SEARCH_PATH.format(name=name))


def downgrade() -> None:
    """Drop the recorded ids, restore the function of the previous migration, and reset the search paths."""
    op.execute("DROP TRIGGER hpsearch_record_study_id ON studies")
    op.execute("DROP FUNCTION hpsearch_record_study_id()")
    op.execute("DROP TABLE hpsearch_study_ids")
    op.execute("ALTER FUNCTION hpsearch_keep_opening() RESET search_path")
    previous = runpy.run_path(str(Path(__file__).with_name("0009_fixed_attributes.py")))["_FUNCTION"]
    op.execute(previous.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION"))
