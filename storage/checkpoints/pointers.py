"""Which checkpoints of a trial count: rows of ``hpsearch_checkpoints``, written with the epochs that they are of."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from hpsearch.kill_points import kill_point
from hpsearch.storage.attributes import PENDING, TRACKING
from hpsearch.storage.checkpoints.store import Stored

if TYPE_CHECKING:
    import sqlalchemy as sa


def read_pointers(engine: sa.Engine, trial_id: int) -> dict[int, Stored]:
    """Return the checkpoints of a trial by epoch (0-based), newest first.

    Each has the state after its epoch, or in the middle of the next one. In the middle of the first epoch, the key
    is -1.
    """
    import sqlalchemy as sa

    statement = sa.text("""
        SELECT epoch, path, sha256, size FROM hpsearch_checkpoints WHERE trial_id = :trial
         ORDER BY epoch DESC
    """)
    with engine.connect() as connection:
        rows = connection.execute(statement, {"trial": trial_id}).all()
    return {row.epoch: Stored(row.path, row.sha256, row.size) for row in rows}


# A trial whose model is on its way to MLflow: another machine makes it again if the one that has it never returns.
_ON_ITS_WAY = """
    EXISTS (SELECT FROM trial_user_attributes a WHERE a.trial_id = t.trial_id AND a.key = :tracking
               AND starts_with(a.value_json::jsonb #>> '{}', :pending))
"""
_WORDS = {"tracking": TRACKING, "pending": PENDING}


@kill_point("drop checkpoint pointers")
def drop_pointers(engine: sa.Engine, study_id: int, *, number: int | None = None) -> None:
    """Forget the checkpoints of a study's COMPLETE and PRUNED trials, or of one of them: nobody goes on from them.

    A trial that runs, waits or failed keeps its own, for a failed one may be tried again; so does one that MLflow does
    not have whole yet, unless it is named.
    """
    import sqlalchemy as sa

    statement = sa.text(f"""
        DELETE FROM hpsearch_checkpoints c USING trials t
         WHERE t.study_id = :study AND c.trial_id = t.trial_id AND t.state IN ('COMPLETE', 'PRUNED')
           AND (t.number = CAST(:number AS int) OR (CAST(:number AS int) IS NULL AND NOT {_ON_ITS_WAY}))
    """)  # noqa: S608 the parts are constants
    with engine.begin() as connection:
        connection.execute(statement, {"study": study_id, "number": number, **_WORDS})


def ended(engine: sa.Engine, study_id: int, numbers: Collection[int]) -> dict[int, set[str]]:
    """Return which of these trials of a study have ended: number to the paths that are needed all the same."""
    import sqlalchemy as sa

    statement = sa.text(f"""
        SELECT t.number, array_remove(array_agg(c.path), NULL) AS paths
          FROM trials t
          LEFT JOIN hpsearch_checkpoints c ON c.trial_id = t.trial_id AND (t.state = 'FAIL' OR {_ON_ITS_WAY})
         WHERE t.study_id = :study AND t.number = ANY(:numbers) AND t.state NOT IN ('RUNNING', 'WAITING')
         GROUP BY t.number
    """)  # noqa: S608 the parts are constants
    with engine.connect() as connection:
        rows = connection.execute(statement, {"study": study_id, "numbers": list(numbers), **_WORDS}).all()
    return {row.number: set(row.paths) for row in rows}
