"""For which refit a test set was opened: an opening's trial names a configuration, of which there may be two models."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the column. The trigger that keeps an opening as it is compares whole rows, and so this too."""
    op.add_column("hpsearch_test_openings", sa.Column("refit", sa.Text))


def downgrade() -> None:
    """Drop what `upgrade` made."""
    op.drop_column("hpsearch_test_openings", "refit")
