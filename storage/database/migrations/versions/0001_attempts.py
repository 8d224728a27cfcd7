"""Tables of attempts (leases) and checkpoints, and an index on the states of a study's trials."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables and the index."""
    # The foreign keys cascade, so that Optuna can delete a study although it does not know these tables.
    op.create_table(
        "hpsearch_attempts",
        sa.Column("trial_id", sa.Integer, sa.ForeignKey("trials.trial_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True),
        sa.Column("claim_id", sa.Uuid, nullable=False, unique=True),
        sa.Column("worker", sa.Text, nullable=False),
        sa.Column("process", sa.Text, nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("lease", sa.Float, nullable=False, server_default="60"),  # lease period in seconds, set by the worker
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.Column("outcome", sa.Text),
        sa.CheckConstraint("(ended_at IS NULL) = (outcome IS NULL)", name="hpsearch_attempts_ended"),
    )
    # Prevents a second live attempt of a trial.
    op.create_index(
        "hpsearch_attempts_live",
        "hpsearch_attempts",
        ["trial_id"],
        unique=True,
        postgresql_where=sa.text("ended_at IS NULL"),
    )
    op.create_table(
        "hpsearch_checkpoints",
        sa.Column("trial_id", sa.Integer, sa.ForeignKey("trials.trial_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("epoch", sa.Integer, primary_key=True),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
    )
    op.create_index("hpsearch_trials_state", "trials", ["study_id", "state"])


def downgrade() -> None:
    """Drop the tables and the index."""
    op.drop_index("hpsearch_trials_state", "trials")
    op.drop_table("hpsearch_checkpoints")
    op.drop_table("hpsearch_attempts")
