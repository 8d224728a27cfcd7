"""Values of the metric in each fold of a cross-validation, per epoch."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Add the column; a row of a single-objective study has fold values only."""
    op.add_column("hpsearch_epoch_values", sa.Column("folds", ARRAY(sa.Double)))
    op.alter_column("hpsearch_epoch_values", "metrics", nullable=True)


def downgrade() -> None:
    """Drop the column, and the rows without metrics."""
    op.execute("DELETE FROM hpsearch_epoch_values WHERE metrics IS NULL")
    op.alter_column("hpsearch_epoch_values", "metrics", nullable=False)
    op.drop_column("hpsearch_epoch_values", "folds")
