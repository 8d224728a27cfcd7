"""Table of workers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Create the table."""
    timestamp = sa.DateTime(timezone=True)
    op.create_table(
        "hpsearch_workers",
        sa.Column("worker_id", sa.Uuid, primary_key=True),
        sa.Column("study_id", sa.Integer, sa.ForeignKey("studies.study_id", ondelete="CASCADE"), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("process", sa.Text, nullable=False),
        sa.Column("engine", sa.Text),
        sa.Column("job", sa.Text),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("started_at", timestamp, nullable=False, server_default=sa.func.clock_timestamp()),
        sa.Column("seen_at", timestamp, nullable=False, server_default=sa.func.clock_timestamp()),
        sa.Column("left_at", timestamp),
        sa.Column("left_as", sa.Text),
    )
    op.create_index("hpsearch_workers_study", "hpsearch_workers", ["study_id", "name"])


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("hpsearch_workers")
