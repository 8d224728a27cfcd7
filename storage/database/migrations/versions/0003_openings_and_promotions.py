"""Tables of evaluations on the test set, and of promotions to the model registry."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003"
down_revision = "0002"

# Rejects changes of an evaluation, except for filling in its scores once. Deleting the study deletes its row.
_SEAL = """
    CREATE FUNCTION hpsearch_keep_opening() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF TG_OP = 'DELETE' THEN
            IF EXISTS (SELECT FROM studies WHERE study_id = OLD.study_id) THEN
                RAISE EXCEPTION 'the test set of study % was opened at %', OLD.study_id, OLD.opened_at;
            END IF;
            RETURN OLD;
        END IF;
        IF OLD.scores IS NOT NULL OR to_jsonb(NEW) - 'scores' IS DISTINCT FROM to_jsonb(OLD) - 'scores' THEN
            RAISE EXCEPTION 'the test set of study % was opened at %', OLD.study_id, OLD.opened_at;
        END IF;
        RETURN NEW;
    END $$
"""


def upgrade() -> None:
    """Create the tables, and the trigger that rejects changes of an evaluation."""
    op.create_table(
        "hpsearch_test_openings",
        sa.Column("study_id", sa.Integer, sa.ForeignKey("studies.study_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("trial_number", sa.Integer, nullable=False),
        sa.Column("model_sha256", sa.String(64), nullable=False),
        sa.Column("finalists", sa.Text),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.Column("opened_by", sa.Text, nullable=False),
        sa.Column("scores", JSONB),
    )
    op.execute(_SEAL)
    op.execute("""
        CREATE TRIGGER hpsearch_keep_opening BEFORE UPDATE OR DELETE ON hpsearch_test_openings
        FOR EACH ROW EXECUTE FUNCTION hpsearch_keep_opening()
    """)
    op.create_table(
        "hpsearch_promotions",
        sa.Column("promotion_id", sa.Integer, sa.Identity(), primary_key=True),
        sa.Column("study_id", sa.Integer, sa.ForeignKey("studies.study_id", ondelete="CASCADE"), nullable=False),
        sa.Column("trial_number", sa.Integer, nullable=False),
        sa.Column("model_name", sa.Text, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("alias", sa.Text, nullable=False),
        sa.Column("promoted_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.Column("promoted_by", sa.Text, nullable=False),
        sa.Column("evidence", JSONB, nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
    )
    # An alias has one current version: a promotion that is detected twice is recorded once.
    op.create_index(
        "hpsearch_promotions_current",
        "hpsearch_promotions",
        ["model_name", "alias"],
        unique=True,
        postgresql_where=sa.text("ended_at IS NULL"),
    )
    op.create_index("hpsearch_promotions_study", "hpsearch_promotions", ["study_id"])


def downgrade() -> None:
    """Drop the tables and the trigger."""
    op.drop_table("hpsearch_promotions")
    op.drop_table("hpsearch_test_openings")
    op.execute("DROP FUNCTION hpsearch_keep_opening()")
