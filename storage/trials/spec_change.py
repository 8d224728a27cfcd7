"""A study's budget, changed under the lock that every claim takes: none is made with the old one afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from hpsearch.storage.attributes import SPEC
from hpsearch.storage.database.locks import UNLESS_FROZEN
from hpsearch.storage.errors import StorageError

_LOCKED = sa.text(f"""
    {UNLESS_FROZEN}
    SELECT a.value_json AS spec FROM studies s JOIN study_user_attributes a ON a.study_id = s.study_id AND a.key = :spec
     WHERE s.study_id = :study FOR UPDATE OF s, a
""")  # noqa: S608 the parts are constants

# After the lock, in a statement of its own: the one that waits for a lock sees the trials of before it waited.
_STARTED = sa.text("""
    SELECT count(*) FROM trials t
     WHERE study_id = :study
       AND (state <> 'WAITING' OR EXISTS (SELECT FROM hpsearch_attempts a WHERE a.trial_id = t.trial_id))
""")

_WRITE = sa.text("UPDATE study_user_attributes SET value_json = :value WHERE study_id = :study AND key = :spec")


def change_spec(
    engine: sa.Engine,
    study_id: int,
    change: Callable[[dict[str, Any], int], dict[str, Any]],
    *,
    then: Callable[[sa.Connection, dict[str, Any]], object] = lambda *_: None,
) -> dict[str, Any]:
    """Replace a study's stored spec while no trial is handed out, and return the new one.

    Args:
        engine: of the study's database.
        study_id: the study.
        change: is given the spec and how many trials were started, and returns the spec to store; what it raises
            leaves everything as it was.
        then: is called with the new spec in the same transaction.

    Raises:
        StorageError: there is no such study any more.
    """
    with engine.begin() as connection:
        row = connection.execute(_LOCKED, {"study": study_id, "spec": SPEC}).one_or_none()
        if row is None:
            raise StorageError("the study was deleted")
        started = int(connection.execute(_STARTED, {"study": study_id}).scalar_one())
        spec = change(json.loads(row.spec), started)
        connection.execute(_WRITE, {"study": study_id, "spec": SPEC, "value": json.dumps(spec)})
        then(connection, spec)
    return spec
