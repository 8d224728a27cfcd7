"""Which studies hold the finalists of a study, and which the refits of its winners."""

from __future__ import annotations

import sqlalchemy as sa

from hpsearch.storage.attributes import SPEC
from hpsearch.storage.database.statements import Database

# In the order of a CASE: another attribute may hold a NaN, which Postgres takes for no JSON.
_SETS = sa.text("""
    SELECT study_name, value_json::jsonb -> 'finalists_of' ->> 'refit' IS NOT NULL AS is_refit
      FROM studies JOIN study_user_attributes USING (study_id)
     WHERE CASE WHEN key = :spec THEN (value_json::jsonb -> 'finalists_of' ->> 'study_id')::int = :study END
     ORDER BY study_id
""")


def finalist_studies(engine: sa.Engine, study_id: int) -> list[str]:
    """Return the names of the studies that hold finalists of a study, the first one made first."""
    return _names(engine, study_id, refits=False)


def refit_studies(engine: sa.Engine, study_id: int) -> list[str]:
    """Return the names of the studies that hold refits of a study's winners, the first one made first."""
    return _names(engine, study_id, refits=True)


def _names(engine: sa.Engine, study_id: int, *, refits: bool) -> list[str]:
    rows = Database(engine).rows(_SETS, {"spec": SPEC, "study": study_id})
    return [row.study_name for row in rows if row.is_refit == refits]
