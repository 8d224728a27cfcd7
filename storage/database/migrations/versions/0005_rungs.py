"""Table of the trials at rungs, where they wait until they are promoted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "hpsearch_rungs",
        sa.Column("trial_id", sa.Integer, sa.ForeignKey("trials.trial_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("rung", sa.Integer, primary_key=True),
        sa.Column("study_id", sa.Integer, nullable=False),
        # The trial's best value up to the rung as a loss: negated if higher values are better.
        sa.Column("loss", sa.Double, nullable=False),
        sa.Column("reached_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.clock_timestamp()),
        sa.Column("promoted_at", sa.DateTime(timezone=True)),
    )
    place = ["study_id", "rung", "loss", "trial_id"]
    op.create_index("hpsearch_rungs_place", "hpsearch_rungs", place, unique=True)
    op.create_index("hpsearch_rungs_paused", "hpsearch_rungs", place, postgresql_where=sa.text("promoted_at IS NULL"))


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("hpsearch_rungs")
