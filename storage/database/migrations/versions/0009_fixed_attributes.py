"""Trigger that rejects changes of the attributes that commands use as paths and code."""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"

# Studies without a folder name use NAME-ID, as StoredStudy.folder does. The trigger protects stored names only.
_STORE_FOLDERS = """
    INSERT INTO study_user_attributes (study_id, key, value_json)
    SELECT study_id, 'hpsearch:folder', to_json((value_json::jsonb ->> 'name') || '-' || study_id)::text
      FROM study_user_attributes WHERE key = 'hpsearch:spec' AND value_json::jsonb ? 'name'
    ON CONFLICT (study_id, key) DO NOTHING
"""

# The owner of the tables may change everything, for a restore. Of a spec, only name and objective are fixed. An
# objective may become a built-in name, because earlier versions stored other references for built-in objectives. A
# deferred trigger compares a deleted attribute with its successor, so that it cannot be replaced in one transaction.
_FUNCTION = """
    CREATE FUNCTION hpsearch_fix_attribute() RETURNS trigger LANGUAGE plpgsql AS $$
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
        IF OLD.key = 'hpsearch:spec' AND after ->> 'name' IS NOT DISTINCT FROM before ->> 'name'
           AND (after ->> 'objective' IS NOT DISTINCT FROM before ->> 'objective'
                OR after ->> 'objective' ~ '^[a-z_]+$') THEN
            RETURN NULL;
        END IF;
        IF OLD.key <> 'hpsearch:spec' AND after IS NOT DISTINCT FROM before THEN
            RETURN NULL;
        END IF;
        RAISE EXCEPTION 'the attribute % of study % cannot be changed', OLD.key, OLD.study_id
              USING ERRCODE = 'insufficient_privilege';
    END $$
"""
_TRIGGER = """
    CREATE CONSTRAINT TRIGGER hpsearch_fix_attribute AFTER UPDATE OR DELETE ON study_user_attributes
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (OLD.key IN ('hpsearch:spec', 'hpsearch:folder', 'hpsearch:checkpoint_url', 'hpsearch:objective_sha256'))
    EXECUTE FUNCTION hpsearch_fix_attribute()
"""


def upgrade() -> None:
    """Store missing folder names, and create the trigger."""
    op.execute(_STORE_FOLDERS)
    op.execute(_FUNCTION)
    op.execute(_TRIGGER)


def downgrade() -> None:
    """Drop the trigger."""
    op.execute("DROP TRIGGER hpsearch_fix_attribute ON study_user_attributes")
    op.execute("DROP FUNCTION hpsearch_fix_attribute()")
