"""Read the outcomes of a study's attempts."""

from __future__ import annotations

import sqlalchemy as sa

from hpsearch.search.study.study import StoredStudy


def outcomes(study: StoredStudy, name: str) -> list[str]:
    """Return the outcomes of all attempts of a study, in alphabetical order."""
    query = sa.text("""
        SELECT a.outcome FROM trials t JOIN studies s USING (study_id) JOIN hpsearch_attempts a USING (trial_id)
         WHERE s.study_name = :name
    """)
    with study.storage.engine.connect() as connection:
        return sorted(connection.execute(query, {"name": name}).scalars())
