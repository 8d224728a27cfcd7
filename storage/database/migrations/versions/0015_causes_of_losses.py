"""The cause of the loss of an attempt, if the parent of its process has recorded it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Add the column; the causes of earlier losses are unknown."""
    op.add_column("hpsearch_attempts", sa.Column("loss_cause", sa.Text))


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("hpsearch_attempts", "loss_cause")
