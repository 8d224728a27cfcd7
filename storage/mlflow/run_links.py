"""The links from trials to MLflow runs and models, which are trial attributes in the study's database.

They are written with SQL, because a run may be created or completed long after its trial has ended, and Optuna's
storages reject attributes of finished trials.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from hpsearch.kill_points import kill_point
from hpsearch.storage.attributes import PENDING, TRACKING
from hpsearch.storage.database.locks import run_lock
from hpsearch.storage.journals.consumer import TrialOutcomes


class TrialDeletedError(Exception):
    """A trial that is no longer in the database, because its study was deleted."""


class RunLinks(TrialOutcomes):
    """The links from trials to runs and models in the database of a study."""

    @contextmanager
    def lock_run(self, trial_id: int) -> Iterator[TrialLinks]:
        """Lock a trial's run, so that no other process creates a run or a model for it; yield the trial's links.

        Raises:
            TrialDeletedError: the trial is no longer in the database.
            LockHeldError: another process holds the lock.
            LockLostError: this process held the lock for too long.
        """
        with run_lock(self._engine, trial_id) as connection:
            if connection.execute(_EXISTS, {"trial": trial_id}).scalar() is None:
                raise TrialDeletedError
            yield TrialLinks(connection, trial_id)

    def list_pending_trials(self, study_id: int) -> set[int]:
        """Return the ids of a study's COMPLETE trials whose records MLflow has not received completely."""
        arguments = {"study": study_id, "tracking": TRACKING, "pending": PENDING}
        return {row.trial_id for row in self._database.fetch_rows(_PENDING, arguments)}

    def set_attr_of_trials(self, trial_ids: Iterable[int], key: str, value: str) -> None:
        """Set a user attribute of several trials, which may be in any state."""
        arguments = {"trials": list(trial_ids), "key": key, "value": json.dumps(value)}
        with self._engine.begin() as connection:
            connection.execute(_SET_ATTR, arguments)

    def remove_attr_of_trials(self, trial_ids: Iterable[int], key: str) -> None:
        """Remove a user attribute of several trials, which may be in any state."""
        with self._engine.begin() as connection:
            connection.execute(_REMOVE_ATTR, {"trials": list(trial_ids), "key": key})

    @kill_point("record delivery")
    def record_delivery(self, trial_id: int, problem: str | None) -> None:
        """Record that MLflow has received all records of a trial.

        Args:
            trial_id: the id of the trial in the database.
            problem: a description of the data that are missing in MLflow; None if nothing is missing.
        """

        def write(connection: sa.Connection) -> None:
            if problem is None:
                connection.execute(_REMOVE_ATTR, {"trials": [trial_id], "key": TRACKING})
            else:
                TrialLinks(connection, trial_id).set_attrs({TRACKING: problem})

        self._database.run_autocommit(write)


class TrialLinks:
    """The links of one trial; the process holds the lock of the trial's run."""

    def __init__(self, connection: sa.Connection, trial_id: int) -> None:
        self._connection = connection
        self._trial_id = trial_id

    def read_attr(self, key: str) -> str | None:
        """Return a user attribute of the trial as text; None if the trial does not have the attribute."""
        value = self._connection.execute(_READ, {"trial": self._trial_id, "key": key}).scalar()
        return None if value is None else str(json.loads(value))

    @kill_point("record run")
    def set_attrs(self, attrs: Mapping[str, Any]) -> None:
        """Set user attributes of the trial, which may be in any state."""
        self._write(_SET_USER_ATTRS, attrs)

    def set_system_attrs(self, attrs: Mapping[str, Any]) -> None:
        """Set system attributes of the trial, which may be in any state, such as the dashboard's list of artifacts."""
        self._write(_SET_SYSTEM_ATTRS, attrs)

    def _write(self, statement: sa.TextClause, attrs: Mapping[str, Any]) -> None:
        values = [json.dumps(value) for value in attrs.values()]
        self._connection.execute(statement, {"trial": self._trial_id, "keys": list(attrs), "values": values})


_EXISTS = sa.text("SELECT 1 FROM trials WHERE trial_id = :trial")
# CASE guarantees the order of evaluation: other attributes may contain NaN or damaged JSON, which Postgres rejects.
_PENDING = sa.text("""
    SELECT t.trial_id FROM trials t JOIN trial_user_attributes a USING (trial_id)
     WHERE t.study_id = :study AND t.state = 'COMPLETE' AND a.key = :tracking
       AND CASE WHEN a.key = :tracking THEN starts_with(a.value_json::jsonb #>> '{}', :pending) END
""")
_READ = sa.text("SELECT value_json FROM trial_user_attributes WHERE trial_id = :trial AND key = :key")
_SET_ATTR = sa.text("""
    INSERT INTO trial_user_attributes (trial_id, key, value_json)
    SELECT trial_id, :key, :value FROM trials WHERE trial_id = ANY(CAST(:trials AS int[]))
    ON CONFLICT (trial_id, key) DO UPDATE SET value_json = excluded.value_json
""")
_REMOVE_ATTR = sa.text("DELETE FROM trial_user_attributes WHERE trial_id = ANY(CAST(:trials AS int[])) AND key = :key")
_SET_ATTRS = """
    INSERT INTO {table} (trial_id, key, value_json)
    SELECT :trial, key, value_json FROM unnest(CAST(:keys AS text[]), CAST(:values AS text[])) AS attr (key, value_json)
     WHERE EXISTS (SELECT FROM trials WHERE trial_id = :trial)
    ON CONFLICT (trial_id, key) DO UPDATE SET value_json = excluded.value_json
"""
_SET_USER_ATTRS = sa.text(_SET_ATTRS.format(table="trial_user_attributes"))
_SET_SYSTEM_ATTRS = sa.text(_SET_ATTRS.format(table="trial_system_attributes"))
