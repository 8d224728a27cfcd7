"""Table of the decisions of population-based training."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "hpsearch_generations",
        sa.Column("trial_id", sa.Integer, sa.ForeignKey("trials.trial_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("generation", sa.Integer, primary_key=True),
        sa.Column("study_id", sa.Integer, nullable=False, index=True),
        # Number of the trial whose checkpoint and configuration were copied; NULL if the trial kept its own.
        sa.Column("parent", sa.Integer),
        sa.Column("params_before", JSONB),
        sa.Column("params_after", JSONB),
        sa.Column("decided_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.clock_timestamp()),
    )


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("hpsearch_generations")
