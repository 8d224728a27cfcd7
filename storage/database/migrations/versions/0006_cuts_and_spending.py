"""Tables of rung cutoffs and of spent budgets in epochs and seconds, and an index of waiting trials."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_PLACE = ["study_id", "rung", "loss", "trial_id"]

_RETIRED = """
    UPDATE hpsearch_rungs r SET retired_at = coalesce(t.datetime_complete AT TIME ZONE 'utc', clock_timestamp())
      FROM trials t WHERE t.trial_id = r.trial_id AND t.state = 'PRUNED' AND r.promoted_at IS NULL
"""

# For existing studies with rungs.
_CUTS = """
    INSERT INTO hpsearch_rung_cuts
           (study_id, rung, reached, best_loss, best_trial, last_loss, last_trial)
    SELECT at.study_id, at.rung, at.reached, coalesce(b.loss, '-infinity'), coalesce(b.trial_id, 0),
           coalesce(l.loss, '-infinity'), coalesce(l.trial_id, 0)
      FROM (SELECT study_id, rung, count(*) AS reached FROM hpsearch_rungs GROUP BY study_id, rung) at
      JOIN (SELECT study_id, (value_json::jsonb ->> 'n_trials')::int AS n_trials,
                   (value_json::jsonb #>> '{pruner,reduction_factor}')::int AS factor
              FROM study_user_attributes WHERE key = 'hpsearch:spec') spec USING (study_id)
      LEFT JOIN LATERAL (
        SELECT loss, trial_id FROM hpsearch_rungs o WHERE o.study_id = at.study_id AND o.rung = at.rung
         ORDER BY loss, trial_id OFFSET greatest(at.reached / factor - 1, 0) LIMIT 1) b ON at.reached >= factor
      LEFT JOIN LATERAL (
        SELECT loss, trial_id FROM hpsearch_rungs o WHERE o.study_id = at.study_id AND o.rung = at.rung
         ORDER BY loss, trial_id OFFSET greatest(least(at.reached, n_trials / factor) - 1, 0) LIMIT 1
        ) l ON n_trials >= factor
"""

# From this revision on, only trials that wait at rungs have a start.
_GIVEN_BACK = """
    UPDATE trials t SET datetime_start = NULL
     WHERE state = 'WAITING' AND datetime_start IS NOT NULL
       AND NOT EXISTS (SELECT FROM hpsearch_rungs r WHERE r.trial_id = t.trial_id AND r.promoted_at IS NULL)
"""


def upgrade() -> None:
    """Add the tables, the columns and the indexes."""
    op.add_column("hpsearch_rungs", sa.Column("retired_at", sa.DateTime(timezone=True)))
    op.execute(_RETIRED)
    op.drop_index("hpsearch_rungs_paused", "hpsearch_rungs")
    waits = sa.text("promoted_at IS NULL AND retired_at IS NULL")
    op.create_index("hpsearch_rungs_paused", "hpsearch_rungs", _PLACE, postgresql_where=waits)
    op.create_table(
        "hpsearch_rung_cuts",
        sa.Column("study_id", sa.Integer, sa.ForeignKey("studies.study_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("rung", sa.Integer, primary_key=True),
        sa.Column("reached", sa.Integer, nullable=False, server_default="0"),
        # The worst trial among the best 1 / `reduction_factor` of the trials that have reached the rung.
        sa.Column("best_loss", sa.Double, nullable=False, server_default="-infinity"),
        sa.Column("best_trial", sa.Integer, nullable=False, server_default="0"),
        # The worst trial that can still be promoted within the budget. Minus infinity if no trial can be promoted.
        sa.Column("last_loss", sa.Double, nullable=False, server_default="-infinity"),
        sa.Column("last_trial", sa.Integer, nullable=False, server_default="0"),
    )
    op.execute(_CUTS)
    op.execute(_GIVEN_BACK)
    op.create_index(
        "hpsearch_trials_waiting",
        "trials",
        ["study_id", "number"],
        postgresql_where=sa.text("state = 'WAITING' AND datetime_start IS NULL"),
    )
    op.add_column("hpsearch_attempts", sa.Column("reported_at", sa.DateTime(timezone=True)))
    op.create_table(
        "hpsearch_spending",
        sa.Column("study_id", sa.Integer, sa.ForeignKey("studies.study_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("budget_epochs", sa.Integer),
        sa.Column("budget_seconds", sa.Double),
        sa.Column("epochs", sa.Integer, nullable=False, server_default="0"),
        sa.Column("seconds", sa.Double, nullable=False, server_default="0"),
        # A safeguard: no statement adds an epoch beyond the budget.
        sa.CheckConstraint("epochs <= budget_epochs", name="hpsearch_spending_epochs"),
    )


def downgrade() -> None:
    """Drop the tables, the columns and the indexes."""
    op.drop_table("hpsearch_spending")
    op.drop_column("hpsearch_attempts", "reported_at")
    op.drop_index("hpsearch_trials_waiting", "trials")
    op.drop_table("hpsearch_rung_cuts")
    op.drop_index("hpsearch_rungs_paused", "hpsearch_rungs")
    op.drop_column("hpsearch_rungs", "retired_at")
    op.create_index("hpsearch_rungs_paused", "hpsearch_rungs", _PLACE, postgresql_where=sa.text("promoted_at IS NULL"))
