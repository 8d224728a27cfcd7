"""The share of a failure of the trial as which the loss of an attempt counts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Add the column; existing attempts count in full, as before."""
    op.add_column("hpsearch_attempts", sa.Column("loss_weight", sa.Numeric(3, 2), nullable=False, server_default="1"))


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("hpsearch_attempts", "loss_weight")
