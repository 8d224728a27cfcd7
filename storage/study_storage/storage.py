"""`PostgresStorage`: Optuna's storage interface on Postgres."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from optuna.distributions import BaseDistribution, check_distribution_compatibility
from optuna.storages import BaseStorage
from optuna.storages._base import DEFAULT_STUDY_NAME_PREFIX
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from hpsearch.storage.database.connect import make_engine
from hpsearch.storage.database.retry import RETRY_SECONDS
from hpsearch.storage.database.statements import Database
from hpsearch.storage.database.trial_rows import decode_param
from hpsearch.storage.study_storage import creating, studies, writing
from hpsearch.storage.study_storage.cache import StudyCache
from hpsearch.storage.study_storage.reading import (
    FINISHED_STATES,
    copy_trial,
    read_in_states,
    read_trial,
    utc_now,
)
from hpsearch.storage.study_storage.writing import Batch, raise_if_not_writable


@dataclass
class OwnedTrial:
    """Trial that only this process writes.

    Attributes:
        trial: current content of the trial.
        attempt: number of the attempt that owns the trial.
    """

    trial: FrozenTrial
    attempt: int


def with_pending_writes(trial: FrozenTrial, batch: Batch | None) -> FrozenTrial:
    """Return a copy of the trial that includes the writes of the batch; an exact copy if `batch` is None."""
    copied = copy_trial(trial)
    if batch is not None:
        apply_pending_writes(copied, batch)
    return copied


def apply_pending_writes(trial: FrozenTrial, batch: Batch) -> None:
    """Apply the writes of the batch to the trial object, which is modified."""
    for name, (value, kind) in batch.params.items():
        if name not in trial.params:  # the first value of a parameter stays
            trial.params[name] = kind.to_external_repr(value)
            trial.distributions[name] = kind
    trial.user_attrs.update(batch.user_attrs)
    trial.system_attrs.update(batch.system_attrs)


def open_storage(
    url: str, *, application_name: str, pool_size: int = 2, retry_seconds: float = RETRY_SECONDS
) -> PostgresStorage:
    """Return the storage of the studies at `url`.

    Call :func:`storage.database.connect.check_database` first: its errors describe an unusable database in one line.

    Args:
        url: Postgres URL in any form.
        application_name: name of the connections in `pg_stat_activity`.
        pool_size: number of connections that stay open.
        retry_seconds: longest time in seconds to retry while the database is unavailable.
    """
    # No pre-ping, which costs a round trip per use: statements are retried after a dropped connection.
    engine = make_engine(url, application_name=application_name, pool_size=pool_size, pre_ping=False)
    return PostgresStorage(engine, retry_seconds=retry_seconds)


_FIRST_DISTRIBUTION = """
    SELECT p.param_value, p.distribution_json FROM trial_params p JOIN trials t ON t.trial_id = p.trial_id
     WHERE t.study_id = :study_id AND p.param_name = :name LIMIT 1
"""


class PostgresStorage(BaseStorage):
    """Optuna storage on Postgres; RDBStorage, the dashboard and the `optuna` CLI can use the same tables.

    Every write is one statement in one round trip, and is durable when the call returns. Lists of trials read a
    finished trial once per process, and again if it was reopened. Of an unfinished trial, only the changes since the
    last read are read. While the database is unavailable, calls wait.

    Safe to share between threads.

    Args:
        engine: engine of a database whose tables `hpsearch.storage.database.migrate` created. The engine's pool needs
            no pre-ping, because statements are retried.
        retry_seconds: longest time in seconds to retry while the database is unavailable.
    """

    def __init__(self, engine: sa.Engine, *, retry_seconds: float = RETRY_SECONDS) -> None:
        self._initialize(engine, retry_seconds)

    def _initialize(self, engine: sa.Engine, retry_seconds: float) -> None:
        self._database = Database(engine, retry_seconds)
        self._lock = threading.RLock()
        self._caches: dict[int, StudyCache] = {}
        self._names: dict[int, str] = {}
        self._directions: dict[int, list[StudyDirection]] = {}
        self._study_ids: dict[int, int] = {}  # by trial id
        self._owned: dict[int, OwnedTrial] = {}
        self._deferred: dict[int, Batch] = {}

    def __getstate__(self) -> dict[str, Any]:
        url = self.engine.url.render_as_string(hide_password=False)
        return {"url": url, "retry_seconds": self._database.retry_seconds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._initialize(make_engine(state["url"], application_name="hpsearch"), state["retry_seconds"])

    @property
    def engine(self) -> sa.Engine:
        """Engine of the database, for further statements."""
        return self._database.engine

    # Studies

    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        name = DEFAULT_STUDY_NAME_PREFIX + str(uuid.uuid4()) if study_name is None else study_name
        study_id = studies.create_study(self._database, name, directions)
        self._names[study_id], self._directions[study_id] = name, list(directions)
        return study_id

    def create_filled_study(
        self,
        directions: Sequence[StudyDirection],
        study_name: str,
        *,
        user_attrs: Mapping[str, Any],
        trials: Sequence[FrozenTrial],
        also: Callable[[sa.Connection, int], None] | None = None,
    ) -> int:
        """Create a study with attributes and trials in one transaction, so that no process sees an incomplete study.

        Args:
            directions: one direction per objective.
            study_name: name of the study.
            user_attrs: user attributes of the study.
            trials: trials to insert, which are numbered from 0; whether their distributions are compatible is not
                checked.
            also: function that writes further rows of the study in the same transaction, given the connection and the
                study's id; None for no further rows.

        Raises:
            DuplicatedStudyError: a study with this name exists.
        """

        def write_attrs_and_trials(connection: sa.Connection, study_id: int) -> None:
            studies.set_attrs_in(connection, study_id, user_attrs)
            creating.insert_trials_in(connection, study_id, trials)
            if also is not None:
                also(connection, study_id)

        return studies.create_study(self._database, study_name, directions, fill=write_attrs_and_trials)

    def delete_study(self, study_id: int) -> None:
        self.drop_caches(study_id)
        studies.delete_study(self._database, study_id)

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        studies.set_attr(self._database, "user", study_id, key, value)

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        studies.set_attr(self._database, "system", study_id, key, value)

    def get_study_id_from_name(self, study_name: str) -> int:
        return studies.get_study_id(self._database, study_name)

    def get_study_name_from_id(self, study_id: int) -> str:
        if study_id not in self._names:
            self._names[study_id] = studies.get_study_name(self._database, study_id)
        return self._names[study_id]

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        if study_id not in self._directions:
            self._directions[study_id] = studies.get_directions(self._database, study_id)
        return list(self._directions[study_id])

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        return studies.get_attrs(self._database, "user", study_id)

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        return studies.get_attrs(self._database, "system", study_id)

    def get_all_studies(self) -> list[FrozenStudy]:
        return studies.read_studies(self._database)

    # New trials

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        if template_trial is not None:
            return self.import_trials(study_id, [template_trial])[0]
        floor = self._cache(study_id).last_trial_id
        trial_id, _ = creating.create_trial(self._database, study_id, utc_now(), floor)
        self._study_ids[trial_id] = study_id
        return trial_id

    def import_trials(self, study_id: int, trials: Sequence[FrozenTrial]) -> list[int]:
        """Insert trials with new numbers; if an exception is raised, no trial is inserted.

        Args:
            study_id: id of the study.
            trials: trials in any states, in the order of their new numbers.

        Returns:
            The ids of the trials.

        Raises:
            KeyError: the study does not exist.
            ValueError: a parameter's distribution is incompatible with its distribution in the study.
        """
        found: dict[str, BaseDistribution] = {}
        for trial in trials:
            for name, distribution in trial.distributions.items():
                previous = found.get(name) or self._get_distribution(study_id, name)
                if previous is not None and previous is not distribution:
                    check_distribution_compatibility(previous, distribution)
                found.setdefault(name, distribution)
        created = creating.insert_trials(self._database, study_id, trials)
        self._study_ids.update((trial_id, study_id) for trial_id, _ in created)
        return [trial_id for trial_id, _ in created]

    # Writes of a trial

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        self._check_distribution(trial_id, param_name, distribution)
        self._set(trial_id, Batch(params={param_name: (param_value_internal, distribution)}))

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._set(trial_id, Batch(user_attrs={key: value}))

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._set(trial_id, Batch(system_attrs={key: value}))

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        writing.write_intermediate_value(self._database, trial_id, self._attempt(trial_id), step, intermediate_value)
        self._read_owned(trial_id)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        now, attempt = utc_now(), self._attempt(trial_id)
        moved = writing.write_state(self._database, trial_id, attempt, state, values=values, now=now)
        self._read_owned(trial_id)
        return moved

    def _read_owned(self, trial_id: int) -> None:
        """Read an owned trial again, after a write that the cached content of owned trials does not include."""
        if (owned := self._owned.get(trial_id)) is not None:
            owned.trial = self.read_trial(trial_id)

    def _set(self, trial_id: int, batch: Batch) -> None:
        if (deferred := self._deferred.get(trial_id)) is not None:
            deferred.add(batch)
        else:
            self._write(trial_id, batch)

    def _write(self, trial_id: int, batch: Batch) -> None:
        writing.write_batch(self._database, trial_id, self._attempt(trial_id), batch)
        with self._lock:
            if (owned := self._owned.get(trial_id)) is not None:
                apply_pending_writes(owned.trial, batch)
            for name, (_, distribution) in batch.params.items():
                self._cache(self._study_ids[trial_id]).distributions.setdefault(name, distribution)

    # Owned trials

    def acquire_trial(self, trial: FrozenTrial, attempt: int) -> None:
        """Mark a trial as owned by this process; `attempt` must be the trial's live attempt in `hpsearch_attempts`.

        Until `release_trial` is called, reads return the content that this storage has written. If the attempt has
        ended, or the trial is not RUNNING, a write raises `ClaimLostError` and changes nothing.

        Args:
            trial: current content of the trial in the database.
            attempt: number of the attempt that writes.
        """
        with self._lock:
            self._owned[trial._trial_id] = OwnedTrial(with_pending_writes(trial, None), attempt)

    def release_trial(self, trial_id: int) -> None:
        """End the ownership that `acquire_trial` started; do nothing if this process does not own the trial."""
        with self._lock:
            if self._owned.pop(trial_id, None) is not None and trial_id in self._study_ids:
                # The trial may be finished, and the worker's next trial must be compared with all trials that it ran.
                self._cache(self._study_ids[trial_id]).invalidate()

    @contextmanager
    def hold_trial(self, trial_id: int, attempt: int) -> Iterator[None]:
        """Read a trial, and own it within the context; raises KeyError if the trial does not exist."""
        self.acquire_trial(self.read_trial(trial_id), attempt)
        try:
            yield
        finally:
            self.release_trial(trial_id)

    @contextmanager
    def batch_writes(self, trial_id: int) -> Iterator[Batch]:
        """Defer writes of a trial's parameters and attributes within the context, and send them in one statement.

        Reads of the trial through this storage include the deferred writes. The statement is sent at the end of the
        context. If the context raises an exception, nothing is written. `discard()` of the yielded batch drops the
        writes that were deferred so far.
        """
        with self._lock:
            if trial_id in self._deferred:
                raise RuntimeError(f"batch_writes cannot be nested; it is active for trial id {trial_id}")
            deferred = self._deferred[trial_id] = Batch()
        try:
            yield deferred
        finally:
            del self._deferred[trial_id]
        if deferred:
            self._write(trial_id, deferred)

    def _attempt(self, trial_id: int) -> int | None:
        owned = self._owned.get(trial_id)
        return None if owned is None else owned.attempt

    # Reads

    def get_trial(self, trial_id: int) -> FrozenTrial:
        with self._lock:
            deferred = self._deferred.get(trial_id)
            if (owned := self._owned.get(trial_id)) is not None:
                return with_pending_writes(owned.trial, deferred)
        study_id = self._study_ids.get(trial_id)
        if study_id is not None and (known := self._cache(study_id).get_complete(trial_id)) is not None:
            return known
        trial = self.read_trial(trial_id)
        return trial if deferred is None else with_pending_writes(trial, deferred)

    def read_trial(self, trial_id: int) -> FrozenTrial:
        """Read a trial from the database, without the cache; raises KeyError if the trial does not exist.

        Use it for attributes that were written after the trial had finished.
        """
        if (found := read_trial(self._database, trial_id)) is None:
            raise KeyError(f"there is no trial with id {trial_id}")
        trial, self._study_ids[trial_id] = found
        return trial

    def refresh_trial(self, study_id: int, trial_id: int) -> None:
        """Read a finished trial in the cache again, after a write that did not use Optuna's storage interface."""
        self._cache(study_id).refresh(self._database, trial_id)

    def get_trial_user_attrs(self, trial_id: int) -> dict[str, Any]:
        return self.get_trial(trial_id).user_attrs

    def get_trial_system_attrs(self, trial_id: int) -> dict[str, Any]:
        return self.get_trial(trial_id).system_attrs

    def get_trial_id_from_study_id_trial_number(self, study_id: int, trial_number: int) -> int:
        if (known := self._cache(study_id).get_trial_id(trial_number)) is not None:
            return known
        statement = "SELECT trial_id FROM trials WHERE study_id = :study_id AND number = :number"
        rows = self._database.fetch_rows(statement, {"study_id": study_id, "number": trial_number})
        if not rows:
            raise KeyError(f"there is no trial {trial_number} in the study with id {study_id}")
        return int(rows[0].trial_id)

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        wanted = frozenset(TrialState if states is None else (state for state in TrialState if state in states))
        try:
            if wanted and not wanted & FINISHED_STATES:
                trials = read_in_states(self._database, study_id, [state.name for state in wanted])
            else:
                trials = self._cache(study_id).select(self._database, wanted)
        except KeyError:
            self.drop_caches(study_id)
            raise
        if not wanted <= FINISHED_STATES:
            trials = [self._with_deferred(trial) for trial in trials] if self._deferred else trials
        return [copy_trial(trial) for trial in trials] if deepcopy else trials

    def get_finished_trials(
        self, study_id: int, states: Container[TrialState], *, max_age: float = 0.0
    ) -> list[FrozenTrial]:
        """Return the finished trials in these states, by number. The caller must not modify the returned objects.

        Args:
            study_id: id of the study.
            states: states of the returned trials; states of unfinished trials are ignored.
            max_age: age in seconds up to which the result of the last query is used instead of a new query; trials
                that have finished since the last query are then missing.

        Raises:
            KeyError: the study does not exist.
        """
        wanted = frozenset(state for state in FINISHED_STATES if state in states)
        return self._cache(study_id).select(self._database, wanted, max_age=max_age)

    def _with_deferred(self, trial: FrozenTrial) -> FrozenTrial:
        deferred = self._deferred.get(trial._trial_id)
        return trial if deferred is None or trial.state.is_finished() else with_pending_writes(trial, deferred)

    # Helpers

    def _cache(self, study_id: int) -> StudyCache:
        with self._lock:
            return self._caches.setdefault(study_id, StudyCache(study_id))

    def drop_caches(self, study_id: int) -> None:
        """Read a study from the database again. The cache has finished trials with the attributes of the first read."""
        with self._lock:
            for known in (self._caches, self._names, self._directions):
                known.pop(study_id, None)

    def _check_distribution(self, trial_id: int, name: str, distribution: BaseDistribution) -> None:
        if trial_id not in self._study_ids:
            self.read_trial(trial_id)
        previous = self._get_distribution(self._study_ids[trial_id], name)
        if previous is None or previous is distribution:
            return
        try:
            check_distribution_compatibility(previous, distribution)
        except ValueError as error:
            if self._attempt(trial_id) is None:  # if the trial is finished, raise the error about this instead
                statement = "SELECT number, state FROM trials WHERE trial_id = :trial_id"
                raise_if_not_writable(self._database.fetch_rows(statement, {"trial_id": trial_id}), trial_id)
            raise ValueError(
                f"the search space of parameter {name!r} differs from that of earlier trials ({error}); restore the "
                "earlier one, or start a new study; do not make choices from a Python set, whose order changes"
            ) from error

    def _get_distribution(self, study_id: int, name: str) -> BaseDistribution | None:
        """Return the distribution of a parameter in the study; None if no trial has the parameter."""
        known = self._cache(study_id).distributions
        if name not in known:
            rows = self._database.fetch_rows(_FIRST_DISTRIBUTION, {"study_id": study_id, "name": name})
            if rows and (found := decode_param(rows[0].param_value, rows[0].distribution_json)) is not None:
                known[name] = found[1]
        return known.get(name)
