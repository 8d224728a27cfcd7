"""Attempts whose loss counts in full as a failure of the trial, and attempts that were lost while they started."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Add the column; existing attempts count in full, as before."""
    op.add_column(
        "hpsearch_attempts", sa.Column("counts_in_full", sa.Boolean, nullable=False, server_default=sa.true())
    )


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("hpsearch_attempts", "counts_in_full")
