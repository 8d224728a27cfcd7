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
from hpsearch.storage.study_storage import creating, studies, writing
from hpsearch.storage.study_storage.cache import StudyCache
from hpsearch.storage.study_storage.reading import (
    FINISHED_STATES,
    copy_trial,
    parse_distribution,
    read_in_states,
    read_trial,
    utc_now,
)
from hpsearch.storage.study_storage.writing import Batch, raise_if_not_writable


@dataclass
class OwnedTrial:
    """A trial that this process alone writes, as it has written it, and the attempt by which it does."""

    trial: FrozenTrial
    attempt: int


def with_pending_writes(trial: FrozenTrial, batch: Batch | None) -> FrozenTrial:
    """Return a copy of the trial with what the batch would write."""
    copied = copy_trial(trial)
    if batch is not None:
        apply_pending_writes(copied, batch)
    return copied


def apply_pending_writes(trial: FrozenTrial, batch: Batch) -> None:
    """Change the trial as writing the batch does."""
    for name, (value, kind) in batch.params.items():
        if name not in trial.params:  # the first value stays
            trial.params[name] = kind.to_external_repr(value)
            trial.distributions[name] = kind
    trial.user_attrs.update(batch.user_attrs)
    trial.system_attrs.update(batch.system_attrs)


def open_storage(
    url: str, *, application_name: str, pool_size: int = 2, retry_seconds: float = RETRY_SECONDS
) -> PostgresStorage:
    """Return the storage on `url`.

    Call :func:`storage.database.connect.check_database` first: it says in one line what is wrong with a database.

    Args:
        url: A Postgres URL in any of its spellings.
        application_name: What `pg_stat_activity` shows for the connections.
        pool_size: Connections kept open.
        retry_seconds: time for retries while the database is unavailable.
    """
    # Without pre-ping, which is a round trip more each time: a statement whose connection was dropped is repeated.
    engine = make_engine(url, application_name=application_name, pool_size=pool_size, pre_ping=False)
    return PostgresStorage(engine, retry_seconds=retry_seconds)


_FIRST_DISTRIBUTION = """
    SELECT p.distribution_json FROM trial_params p JOIN trials t ON t.trial_id = p.trial_id
     WHERE t.study_id = :study_id AND p.param_name = :name LIMIT 1
"""


class PostgresStorage(BaseStorage):
    """Studies in Postgres, beside RDBStorage, the dashboard and the `optuna` CLI on the same tables.

    Every write is one statement and one round trip, durable when it returns. Finished trials are read once per
    process, running ones without what is known of them. While the database is away, calls wait.

    Safe to share between threads.

    Args:
        engine: Of a database that `hpsearch.storage.database.migrate` made. Its pool may go without pre-ping.
        retry_seconds: time for retries while the database is unavailable.
    """

    def __init__(self, engine: sa.Engine, *, retry_seconds: float = RETRY_SECONDS) -> None:
        self._start(engine, retry_seconds)

    def _start(self, engine: sa.Engine, retry_seconds: float) -> None:
        self._database = Database(engine, retry_seconds)
        self._lock = threading.RLock()
        self._caches: dict[int, StudyCache] = {}
        self._names: dict[int, str] = {}
        self._directions: dict[int, list[StudyDirection]] = {}
        self._study_of: dict[int, int] = {}  # of a trial's id
        self._owned: dict[int, OwnedTrial] = {}
        self._deferred: dict[int, Batch] = {}

    def __getstate__(self) -> dict[str, Any]:
        url = self.engine.url.render_as_string(hide_password=False)
        return {"url": url, "retry_seconds": self._database.retry_seconds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start(make_engine(state["url"], application_name="hpsearch"), state["retry_seconds"])

    @property
    def engine(self) -> sa.Engine:
        """The engine, for statements of the caller's own."""
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
        """Create a study with attributes and trials, in one transaction: nobody sees it before it is whole.

        Args:
            directions: Of its objectives.
            study_name: Its name.
            user_attrs: Its user attributes.
            trials: As they are, numbered from 0; their distributions are not compared.
            also: Writes what else belongs to the study of that number.

        Raises:
            DuplicatedStudyError: There is one of that name.
        """

        def fill(connection: sa.Connection, study_id: int) -> None:
            studies.set_attrs_in(connection, study_id, user_attrs)
            creating.insert_trials_in(connection, study_id, trials)
            if also is not None:
                also(connection, study_id)

        return studies.create_study(self._database, study_name, directions, fill=fill)

    def delete_study(self, study_id: int) -> None:
        self._forget(study_id)
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
        start = utc_now()
        trial_id, _ = creating.create_trial(self._database, study_id, start, self._cache(study_id).last_trial_id)
        self._study_of[trial_id] = study_id
        return trial_id

    def import_trials(self, study_id: int, trials: Sequence[FrozenTrial]) -> list[int]:
        """Add trials as they are, but for their numbers: all of them or, when this raises, none.

        Args:
            study_id: The study.
            trials: In any states, numbered on in this order.

        Returns:
            Their ids.

        Raises:
            KeyError: There is no such study.
            ValueError: A parameter has a distribution that does not go with the one it has in the study.
        """
        found: dict[str, BaseDistribution] = {}
        for trial in trials:
            for name, given in trial.distributions.items():
                previous = found.get(name) or self._distribution(study_id, name)
                if previous is not None and previous is not given:
                    check_distribution_compatibility(previous, given)
                found.setdefault(name, given)
        made = creating.insert_trials(self._database, study_id, trials)
        self._study_of.update((trial_id, study_id) for trial_id, _ in made)
        return [trial_id for trial_id, _ in made]

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
        """Read an owned trial again after a write that workers do not make this way: they report and settle claims."""
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
            for name, (_, given) in batch.params.items():
                self._cache(self._study_of[trial_id]).distributions.setdefault(name, given)

    # Trials of one's own

    def acquire_trial(self, trial: FrozenTrial, attempt: int) -> None:
        """Take a trial as this process's own: `attempt` must be its live attempt in `hpsearch_attempts`.

        Until `release_trial`, this storage rejects every write of the trial with `ClaimLostError`, and writes nothing,
        once the attempt has ended or the trial does not run; reads of it are answered from what was written here.

        Args:
            trial: As it is in the database.
            attempt: The attempt that the writes are made by.
        """
        with self._lock:
            self._owned[trial._trial_id] = OwnedTrial(with_pending_writes(trial, None), attempt)

    def release_trial(self, trial_id: int) -> None:
        """Undo `acquire_trial`; nothing happens where the trial is not owned."""
        with self._lock:
            if self._owned.pop(trial_id, None) is not None and trial_id in self._study_of:
                # It may have finished: a worker's next trial is judged by all that it has run itself.
                self._cache(self._study_of[trial_id]).invalidate()

    @contextmanager
    def hold_trial(self, trial_id: int, attempt: int) -> Iterator[None]:
        """Read the trial and `acquire_trial` it inside; raises KeyError if it is not there."""
        self.acquire_trial(self.read_trial(trial_id), attempt)
        try:
            yield
        finally:
            self.release_trial(trial_id)

    @contextmanager
    def batch_writes(self, trial_id: int) -> Iterator[Batch]:
        """Defer what is set of a trial's parameters and attributes, and write it in one statement at the exit.

        Reads of the trial through this storage show what is deferred. When the block raises, nothing of it is written;
        the object that it yields has `discard()`, which drops what was deferred so far.
        """
        with self._lock:
            if trial_id in self._deferred:
                raise RuntimeError(f"the writes of trial id {trial_id} are deferred already")
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
        study_id = self._study_of.get(trial_id)
        if study_id is not None and (known := self._cache(study_id).get_finished(trial_id)) is not None:
            return known
        trial = self.read_trial(trial_id)
        return trial if deferred is None else with_pending_writes(trial, deferred)

    def read_trial(self, trial_id: int) -> FrozenTrial:
        """Return a trial as the database has it now, whatever is known of it here; raises KeyError if it is not there.

        Finished trials are cached for good: this is how one that was reopened is read.
        """
        found = read_trial(self._database, trial_id)
        if found is None:
            raise KeyError(f"there is no trial with id {trial_id}")
        trial, self._study_of[trial_id] = found
        return trial

    def refresh_trial(self, trial_id: int) -> None:
        """Read a trial that is known to be finished anew: somebody has written to it by other ways than Optuna's.

        Raises:
            KeyError: There is no such trial.
        """
        trial = self.read_trial(trial_id)
        self._cache(self._study_of[trial_id]).replace(trial)

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
            self._forget(study_id)
            raise
        if not wanted <= FINISHED_STATES:
            trials = [self._with_deferred(trial) for trial in trials] if self._deferred else trials
        return [copy_trial(trial) for trial in trials] if deepcopy else trials

    def get_finished_trials(
        self, study_id: int, states: Container[TrialState], *, max_age: float = 0.0
    ) -> list[FrozenTrial]:
        """Return the trials in those of `states` that are final, by number; they are not copied.

        Args:
            study_id: The study.
            states: Their states.
            max_age: Do without asking the database where that was done less than so many seconds ago: trials that
                finished since may be missing.

        Raises:
            KeyError: There is no such study.
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

    def _forget(self, study_id: int) -> None:
        with self._lock:
            for known in (self._caches, self._names, self._directions):
                known.pop(study_id, None)

    def _check_distribution(self, trial_id: int, name: str, given: BaseDistribution) -> None:
        if trial_id not in self._study_of:
            self.read_trial(trial_id)
        previous = self._distribution(self._study_of[trial_id], name)
        if previous is None or previous is given:
            return
        try:
            check_distribution_compatibility(previous, given)
        except ValueError:
            if self._attempt(trial_id) is None:  # that the trial is finished comes first
                statement = "SELECT number, state FROM trials WHERE trial_id = :trial_id"
                raise_if_not_writable(self._database.fetch_rows(statement, {"trial_id": trial_id}), trial_id)
            raise

    def _distribution(self, study_id: int, name: str) -> BaseDistribution | None:
        """Return a distribution that the parameter has in the study, if it has been set there."""
        known = self._cache(study_id).distributions
        if name not in known:
            rows = self._database.fetch_rows(_FIRST_DISTRIBUTION, {"study_id": study_id, "name": name})
            if rows:
                known[name] = parse_distribution(rows[0].distribution_json)
        return known.get(name)
