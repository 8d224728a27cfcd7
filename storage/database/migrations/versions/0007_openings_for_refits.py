"""Column with the evaluated refit, because a trial may have two models: its own model and the refit's."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the column; the trigger that rejects changes of an evaluation compares whole rows, so it needs no change."""
    op.add_column("hpsearch_test_openings", sa.Column("refit", sa.Text))


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("hpsearch_test_openings", "refit")
