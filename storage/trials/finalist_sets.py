"""Which studies hold the finalists of a study."""

from __future__ import annotations

import sqlalchemy as sa

from storage.attributes import SPEC
from storage.database.statements import Database

# In the order of a CASE: another attribute may hold a NaN, which Postgres takes for no JSON.
_SETS = sa.text("""
    SELECT study_name FROM studies JOIN study_user_attributes USING (study_id)
     WHERE CASE WHEN key = :spec THEN (value_json::jsonb -> 'finalists_of' ->> 'study_id')::int = :study END
     ORDER BY study_id
""")


def finalist_studies(engine: sa.Engine, study_id: int) -> list[str]:
    """Return the names of the studies that hold finalists of a study, the first one made first."""
    return [row.study_name for row in Database(engine).rows(_SETS, {"spec": SPEC, "study": study_id})]
