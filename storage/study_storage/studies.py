"""Database rows of studies: creation, names, attributes, deletion."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import sqlalchemy as sa
from optuna.exceptions import DuplicatedStudyError
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from sqlalchemy.exc import IntegrityError

from hpsearch.storage.attributes import DamagedValue, decode_attr
from hpsearch.storage.database.statements import Database, Rows, to_sql
from hpsearch.storage.errors import DamagedStudyError, StudyNotFoundError
from hpsearch.storage.study_storage.lost_replies import has_study

AttrKind = Literal["user", "system"]

_CREATE = """
    WITH study AS (INSERT INTO studies (study_name) VALUES (:name) RETURNING study_id),
         directions AS (
            INSERT INTO study_directions (study_id, objective, direction)
            SELECT study_id, d.place - 1, CAST(d.direction AS studydirection)
              FROM study, unnest(CAST(:directions AS text[])) WITH ORDINALITY AS d (direction, place))
    SELECT study_id FROM study
"""

_SELECT_ID = "SELECT study_id FROM studies WHERE study_name = :name"

_SET_ATTR = """
    INSERT INTO study_{kind}_attributes (study_id, key, value_json)
    SELECT study_id, :key, :value FROM studies WHERE study_id = :study_id
    ON CONFLICT (study_id, key) DO UPDATE SET value_json = excluded.value_json
    RETURNING 1
"""

# Optuna's foreign keys do not cascade. The locks prevent that rows are added to the study during its deletion.
_DELETE = """
    SELECT 1 FROM studies WHERE study_id = :study_id FOR UPDATE;
    SELECT 1 FROM trials WHERE study_id = :study_id ORDER BY trial_id FOR UPDATE;
    DELETE FROM trial_params x USING trials t WHERE t.study_id = :study_id AND x.trial_id = t.trial_id;
    DELETE FROM trial_values x USING trials t WHERE t.study_id = :study_id AND x.trial_id = t.trial_id;
    DELETE FROM trial_intermediate_values x USING trials t WHERE t.study_id = :study_id AND x.trial_id = t.trial_id;
    DELETE FROM trial_user_attributes x USING trials t WHERE t.study_id = :study_id AND x.trial_id = t.trial_id;
    DELETE FROM trial_system_attributes x USING trials t WHERE t.study_id = :study_id AND x.trial_id = t.trial_id;
    DELETE FROM trial_heartbeats x USING trials t WHERE t.study_id = :study_id AND x.trial_id = t.trial_id;
    DELETE FROM trials WHERE study_id = :study_id;
    DELETE FROM study_directions WHERE study_id = :study_id;
    DELETE FROM study_user_attributes WHERE study_id = :study_id;
    DELETE FROM study_system_attributes WHERE study_id = :study_id;
    DELETE FROM studies WHERE study_id = :study_id RETURNING 1
"""

_SELECT_ALL = """
    SELECT s.study_id, s.study_name,
           ARRAY(SELECT CAST(d.direction AS text) FROM study_directions d
                  WHERE d.study_id = s.study_id ORDER BY d.objective) AS directions,
           ARRAY(SELECT ARRAY[a.key, a.value_json] FROM study_user_attributes a
                  WHERE a.study_id = s.study_id ORDER BY a.study_user_attribute_id) AS user_attrs,
           ARRAY(SELECT ARRAY[a.key, a.value_json] FROM study_system_attributes a
                  WHERE a.study_id = s.study_id ORDER BY a.study_system_attribute_id) AS system_attrs
      FROM studies s ORDER BY s.study_id
"""


def require_study(rows: Rows, study: int | str) -> Rows:
    """Return `rows`, the result of a query on a study, if there are any.

    Args:
        rows: rows of the query, which returns at least one row if the study exists.
        study: id or name of the study, for the message.

    Raises:
        StudyNotFoundError: there are no rows.
    """
    if not rows:
        named = repr(study) if isinstance(study, str) else f"with id {study}"
        raise StudyNotFoundError(f"there is no study {named}")
    return rows


def create_study(
    database: Database,
    name: str,
    directions: Sequence[StudyDirection],
    *,
    fill: Callable[[sa.Connection, int], None] = lambda *_: None,
) -> int:
    """Create a study and return its id.

    Args:
        database: database of the study.
        name: name of the study.
        directions: one direction per objective.
        fill: function that writes further rows in the same transaction, given the connection and the study's id.

    Raises:
        DuplicatedStudyError: a study with this name exists.
    """
    created: list[int] = []

    def insert_rows(connection: sa.Connection, repeated: bool) -> int:
        # If the connection broke during the commit, the study may exist.
        if repeated and created and has_study(connection, created[0], name):
            return created[0]
        arguments = {"name": name, "directions": [direction.name for direction in directions]}
        created[:] = [connection.execute(to_sql(_CREATE), arguments).scalar_one()]
        fill(connection, created[0])
        return created[0]

    try:
        return database.run_transaction(insert_rows)
    except IntegrityError:
        raise DuplicatedStudyError(f"there is a study named {name!r} already") from None


def delete_study(database: Database, study_id: int) -> None:
    """Delete a study with all its rows; raises KeyError if the study does not exist."""
    rows, repeated = database.fetch_with_retry_flag(_DELETE, {"study_id": study_id})
    if not repeated:
        require_study(rows, study_id)


def get_study_id(database: Database, name: str) -> int:
    """Return the id of a study; raises KeyError if the study does not exist."""
    return int(require_study(database.fetch_rows(_SELECT_ID, {"name": name}), name)[0].study_id)


def get_study_name(database: Database, study_id: int) -> str:
    """Return the name of a study; raises KeyError if the study does not exist."""
    rows = database.fetch_rows("SELECT study_name FROM studies WHERE study_id = :study_id", {"study_id": study_id})
    return str(require_study(rows, study_id)[0].study_name)


def get_directions(database: Database, study_id: int) -> list[StudyDirection]:
    """Return the directions of a study; raises KeyError if the study does not exist."""
    statement = "SELECT direction FROM study_directions WHERE study_id = :study_id ORDER BY objective"
    rows = database.fetch_rows(statement, {"study_id": study_id})
    return [StudyDirection[row.direction] for row in require_study(rows, study_id)]


def set_attr(database: Database, kind: AttrKind, study_id: int, key: str, value: Any) -> None:
    """Set an attribute of a study; raises KeyError if the study does not exist."""
    parameters = {"study_id": study_id, "key": key, "value": json.dumps(value)}
    require_study(database.fetch_rows(_SET_ATTR.format(kind=kind), parameters), study_id)


def set_attrs_in(connection: sa.Connection, study_id: int, attrs: Mapping[str, Any], kind: AttrKind = "user") -> None:
    """Set attributes of a study in the transaction of the connection."""
    for key, value in attrs.items():
        parameters = {"study_id": study_id, "key": key, "value": json.dumps(value)}
        connection.execute(to_sql(_SET_ATTR.format(kind=kind)), parameters)


def get_attrs(database: Database, kind: AttrKind, study_id: int) -> dict[str, Any]:
    """Return the attributes of a study.

    Raises:
        KeyError: the study does not exist.
        DamagedStudyError: an attribute is not valid JSON.
    """
    statement = f"""
        SELECT s.study_name, a.key, a.value_json
          FROM studies s LEFT JOIN study_{kind}_attributes a ON a.study_id = s.study_id
         WHERE s.study_id = :study_id ORDER BY a.study_{kind}_attribute_id
    """  # noqa: S608 `kind` is one of two literals
    rows = require_study(database.fetch_rows(statement, {"study_id": study_id}), study_id)
    attrs = {row.key: decode_attr(row.value_json) for row in rows if row.key is not None}
    for key, value in attrs.items():
        if isinstance(value, DamagedValue):
            raise DamagedStudyError(rows[0].study_name, key)
    return attrs


def read_studies(database: Database) -> list[FrozenStudy]:
    """Return all studies in the order of ids. Attributes that are not valid JSON are `DamagedValue` objects."""
    return [
        FrozenStudy(
            study_name=row.study_name,
            direction=None,
            directions=[StudyDirection[name] for name in row.directions],
            user_attrs={key: decode_attr(value) for key, value in row.user_attrs},
            system_attrs={key: decode_attr(value) for key, value in row.system_attrs},
            study_id=row.study_id,
        )
        for row in database.fetch_rows(_SELECT_ALL, {})
    ]
