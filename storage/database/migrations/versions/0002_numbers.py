"""Index on the numbers of a study's trials, which finds the next number without counting the trials."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create the index."""
    op.create_index("hpsearch_trials_number", "trials", ["study_id", "number"])


def downgrade() -> None:
    """Drop the index."""
    op.drop_index("hpsearch_trials_number", "trials")
