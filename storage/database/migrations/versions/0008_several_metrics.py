"""Multi-objective studies: values of all metrics per epoch and per rung."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the table and the column."""
    op.create_table(
        "hpsearch_epoch_values",
        sa.Column("trial_id", sa.Integer, sa.ForeignKey("trials.trial_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("step", sa.Integer, primary_key=True),
        sa.Column("metrics", ARRAY(sa.Double), nullable=False),
    )
    op.add_column("hpsearch_rungs", sa.Column("losses", ARRAY(sa.Double)))


def downgrade() -> None:
    """Drop the table and the column."""
    op.drop_column("hpsearch_rungs", "losses")
    op.drop_table("hpsearch_epoch_values")
