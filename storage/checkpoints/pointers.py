"""Valid checkpoints of trials: rows of ``hpsearch_checkpoints``, written with the epoch report."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from hpsearch.kill_points import kill_point
from hpsearch.storage.attributes import PENDING, TRACKING
from hpsearch.storage.checkpoints.store import StoredFile

if TYPE_CHECKING:
    import sqlalchemy as sa


def read_pointers(engine: sa.Engine, trial_id: int) -> dict[int, StoredFile]:
    """Return the valid checkpoints of a trial by last finished epoch (from 0), newest first.

    A checkpoint contains the state after this epoch, or a state within the next epoch. The key of a state within the
    first epoch is -1.
    """
    import sqlalchemy as sa

    statement = sa.text("""
        SELECT epoch, path, sha256, size FROM hpsearch_checkpoints WHERE trial_id = :trial
         ORDER BY epoch DESC
    """)
    with engine.connect() as connection:
        rows = connection.execute(statement, {"trial": trial_id}).all()
    return {row.epoch: StoredFile(row.path, row.sha256, row.size) for row in rows}


def has_pointers(engine: sa.Engine, study_id: int) -> bool:
    """Return whether any trial of a study has a valid checkpoint."""
    import sqlalchemy as sa

    statement = sa.text("""
        SELECT EXISTS (SELECT FROM hpsearch_checkpoints JOIN trials USING (trial_id) WHERE study_id = :study)
    """)
    with engine.connect() as connection:
        return bool(connection.execute(statement, {"study": study_id}).scalar_one())


def copy_pointers(connection: sa.Connection, *, child: int, parent: int) -> None:
    """Replace the checkpoints of a waiting trial by those of another waiting trial; both then refer to the same files.

    A file is deleted when no trial refers to it any more (`find_referenced_paths`).

    Args:
        connection: connection in a transaction.
        child: id of the trial that continues from the copied checkpoints.
        parent: id of the trial whose checkpoints are copied.
    """
    import sqlalchemy as sa

    connection.execute(sa.text("DELETE FROM hpsearch_checkpoints WHERE trial_id = :child"), {"child": child})
    statement = sa.text("""
        INSERT INTO hpsearch_checkpoints (trial_id, epoch, attempt, path, sha256, size)
        SELECT :child, epoch, attempt, path, sha256, size FROM hpsearch_checkpoints WHERE trial_id = :parent
    """)
    connection.execute(statement, {"child": child, "parent": parent})


def find_referenced_paths(engine: sa.Engine, study_id: int) -> set[str]:
    """Return the paths of the files to which any trial of a study refers, unless it is COMPLETE or PRUNED.

    A trial only gets a reference from another trial, so a path without a reference never gets one again. Therefore a
    file can be deleted after this query without a lock.
    """
    import sqlalchemy as sa

    statement = sa.text(f"""
        SELECT DISTINCT c.path FROM hpsearch_checkpoints c JOIN trials t USING (trial_id)
         WHERE t.study_id = :study AND (t.state NOT IN ('COMPLETE', 'PRUNED') OR {_IS_UPLOADING})
    """)  # noqa: S608 the part is a constant
    with engine.connect() as connection:
        return set(connection.execute(statement, {"study": study_id, **_PARAMETERS}).scalars())


# A trial whose model MLflow has not received yet. If the machine with the model does not return, another machine
# builds the model again from the checkpoint. CASE guarantees the order of evaluation: other attributes may contain NaN
# or damaged JSON, which Postgres rejects.
_IS_UPLOADING = """
    EXISTS (SELECT FROM trial_user_attributes a WHERE a.trial_id = t.trial_id AND a.key = :tracking
               AND CASE WHEN a.key = :tracking THEN starts_with(a.value_json::jsonb #>> '{}', :pending) END)
"""
_PARAMETERS = {"tracking": TRACKING, "pending": PENDING}


@kill_point("drop checkpoint pointers")
def drop_pointers(engine: sa.Engine, study_id: int, *, number: int | None = None) -> None:
    """Delete the checkpoint rows of the COMPLETE and PRUNED trials of a study.

    Running, waiting and failed trials keep their rows, as they may be resumed. Trials with pending MLflow records keep
    them too, unless `number` names the trial.

    Args:
        engine: engine of the study's database.
        study_id: id of the study.
        number: number of the only trial whose rows are deleted; None for all trials.
    """
    import sqlalchemy as sa

    statement = sa.text(f"""
        DELETE FROM hpsearch_checkpoints c USING trials t
         WHERE t.study_id = :study AND c.trial_id = t.trial_id AND t.state IN ('COMPLETE', 'PRUNED')
           AND (t.number = CAST(:number AS int) OR (CAST(:number AS int) IS NULL AND NOT {_IS_UPLOADING}))
    """)  # noqa: S608 the parts are constants
    with engine.begin() as connection:
        connection.execute(statement, {"study": study_id, "number": number, **_PARAMETERS})


def read_ended_trials(engine: sa.Engine, study_id: int, numbers: Collection[int]) -> dict[int, set[str]]:
    """Return, for each of these trials that is finished, the paths of the checkpoints to keep, by trial number."""
    import sqlalchemy as sa

    statement = sa.text(f"""
        SELECT t.number, array_remove(array_agg(c.path), NULL) AS paths
          FROM trials t
          LEFT JOIN hpsearch_checkpoints c ON c.trial_id = t.trial_id AND (t.state = 'FAIL' OR {_IS_UPLOADING})
         WHERE t.study_id = :study AND t.number = ANY(:numbers) AND t.state NOT IN ('RUNNING', 'WAITING')
         GROUP BY t.number
    """)  # noqa: S608 the parts are constants
    with engine.connect() as connection:
        rows = connection.execute(statement, {"study": study_id, "numbers": list(numbers), **_PARAMETERS}).all()
    return {row.number: set(row.paths) for row in rows}
