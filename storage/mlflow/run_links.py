"""What the study's database says of trials' runs in MLflow; written also when a trial has ended, as Optuna refuses to.

All of it is by SQL of our own: Optuna's storages let nobody set an attribute of a finished trial, and a run may become
known, or arrive whole, long after its trial has ended.
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
from hpsearch.storage.journals.reader import TrialEnds


class TrialGoneError(Exception):
    """The trial is no longer in the database: its study was deleted."""


class RunLinks(TrialEnds):
    """The runs and models of trials, as the database of their study notes them."""

    @contextmanager
    def locked(self, trial_id: int) -> Iterator[TrialLinks]:
        """Lock a trial's run, so that no other process makes a run or a model of it, and read and write what is noted.

        Raises:
            TrialGoneError: there is no such trial any more.
            LockHeldError: another process has the lock.
            LockLostError: this one took too long.
        """
        with run_lock(self._engine, trial_id) as connection:
            if connection.execute(_EXISTS, {"trial": trial_id}).scalar() is None:
                raise TrialGoneError
            yield TrialLinks(connection, trial_id)

    def pending(self, study_id: int) -> set[int]:
        """Return the ids of a study's COMPLETE trials of which something is on its way now."""
        arguments = {"study": study_id, "tracking": TRACKING, "pending": PENDING}
        return {row.trial_id for row in self._database.rows(_PENDING, arguments)}

    def mark(self, trial_ids: Iterable[int], key: str, value: str) -> None:
        """Set an attribute of several trials, whatever their states."""
        arguments = {"trials": list(trial_ids), "key": key, "value": json.dumps(value)}
        with self._engine.begin() as connection:
            connection.execute(_MARK, arguments)

    def unmark(self, trial_ids: Iterable[int], key: str) -> None:
        """Remove an attribute of several trials, where they have it."""
        with self._engine.begin() as connection:
            connection.execute(_UNMARK, {"trials": list(trial_ids), "key": key})

    @kill_point("record delivery")
    def delivered(self, trial_id: int, problem: str | None) -> None:
        """Note that all of a trial that can arrive has arrived, but for the `problem`."""

        def note(connection: sa.Connection) -> None:
            if problem is None:
                connection.execute(_FORGET, {"trial": trial_id, "key": TRACKING})
            else:
                TrialLinks(connection, trial_id).note({TRACKING: problem})

        self._database.connected(note)


class TrialLinks:
    """What is noted of one trial."""

    def __init__(self, connection: sa.Connection, trial_id: int) -> None:
        self._connection = connection
        self._trial_id = trial_id

    def read(self, key: str) -> str | None:
        """Return an attribute of the trial."""
        value = self._connection.execute(_READ, {"trial": self._trial_id, "key": key}).scalar()
        return None if value is None else str(json.loads(value))

    @kill_point("record run")
    def note(self, attrs: Mapping[str, Any]) -> None:
        """Set attributes of the trial, whatever its state."""
        self._write(_NOTE, attrs)

    def note_system(self, attrs: Mapping[str, Any]) -> None:
        """Set system attributes of the trial, whatever its state, such as those by which the dashboard lists files."""
        self._write(_NOTE_SYSTEM, attrs)

    def _write(self, statement: sa.TextClause, attrs: Mapping[str, Any]) -> None:
        values = [json.dumps(value) for value in attrs.values()]
        self._connection.execute(statement, {"trial": self._trial_id, "keys": list(attrs), "values": values})


_EXISTS = sa.text("SELECT 1 FROM trials WHERE trial_id = :trial")
_PENDING = sa.text("""
    SELECT t.trial_id FROM trials t JOIN trial_user_attributes a USING (trial_id)
     WHERE t.study_id = :study AND t.state = 'COMPLETE' AND a.key = :tracking
       AND starts_with(a.value_json::jsonb #>> '{}', :pending)
""")
_READ = sa.text("SELECT value_json FROM trial_user_attributes WHERE trial_id = :trial AND key = :key")
_MARK = sa.text("""
    INSERT INTO trial_user_attributes (trial_id, key, value_json)
    SELECT trial_id, :key, :value FROM trials WHERE trial_id = ANY(CAST(:trials AS int[]))
    ON CONFLICT (trial_id, key) DO UPDATE SET value_json = excluded.value_json
""")
_UNMARK = sa.text("DELETE FROM trial_user_attributes WHERE trial_id = ANY(CAST(:trials AS int[])) AND key = :key")
_FORGET = sa.text("DELETE FROM trial_user_attributes WHERE trial_id = :trial AND key = :key")
_SET = """
    INSERT INTO {table} (trial_id, key, value_json)
    SELECT :trial, key, value_json FROM unnest(CAST(:keys AS text[]), CAST(:values AS text[])) AS attr (key, value_json)
     WHERE EXISTS (SELECT FROM trials WHERE trial_id = :trial)
    ON CONFLICT (trial_id, key) DO UPDATE SET value_json = excluded.value_json
"""
_NOTE = sa.text(_SET.format(table="trial_user_attributes"))
_NOTE_SYSTEM = sa.text(_SET.format(table="trial_system_attributes"))
