"""Synchronization of promotions that users make in the MLflow UI.

The study records the promotion, and the model version gets its evidence. This module polls the model registry instead
of using MLflow's webhooks: webhooks reject addresses of private networks, unless the server's protection against forged
requests is disabled, and undelivered webhooks are lost after three tries or a restart of the server. A poll of an
unchanged registry costs one MLflow request. The first poll of a process also costs one database query.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Self

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from hpsearch.search.console import log_to_stderr
from hpsearch.search.errors import SearchError
from hpsearch.search.promotion.evidence import Confirmation, gather_evidence
from hpsearch.search.promotion.evidence_update import write_evidence
from hpsearch.search.services import MLFLOW_UI_URL
from hpsearch.search.study.control import find_trial
from hpsearch.search.study.study import load_parent_study, load_study_by_id
from hpsearch.storage.dashboard import serve_dashboard
from hpsearch.storage.database.connect import check_database
from hpsearch.storage.database.locks import check_lock_held, registry_lock
from hpsearch.storage.errors import DamagedStudyError, StorageError
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.artifacts import MlflowArtifactStore
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.credentials import allow_credentials
from hpsearch.storage.mlflow.health import check_server, describe_error
from hpsearch.storage.mlflow.registry import Registry, Version, is_previous
from hpsearch.storage.records.promotions import (
    Promotion,
    TrialOfRun,
    end_promotion,
    find_trials_of_runs,
    is_recorded,
    read_current_promotions,
    record_promotion,
    select_tagged,
)
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage

log = logging.getLogger(__name__)

MLFLOW_UI = "MLflow UI"

# Any worker can write attributes of studies and trials that the code does not expect.
DAMAGE_ERRORS = (DamagedStudyError, ValueError, TypeError, AttributeError, ArithmeticError, LookupError)

Aliases = dict[tuple[str, str], int]  # version by (model, alias)


def sync_promotions(storage: PostgresStorage, tracking: Tracking, *, known: Aliases | None = None) -> Aliases:
    """Update the stored promotions and study notes from the aliases of the model registry.

    Aliases of previous versions are not promotions.

    Args:
        storage: storage of the studies.
        tracking: the MLflow server.
        known: result of an earlier call; if the registry has not changed since then, the function does nothing.

    Returns:
        The version of each alias.

    Raises:
        StorageError: MLflow is unavailable or rejects a request.
    """
    registry, engine = Registry(tracking.client), storage.engine
    aliases = registry.list_aliases()
    if aliases == known:
        return aliases
    with engine.connect() as connection:
        if not _list_changed_aliases(aliases, read_current_promotions(connection)):
            return aliases
    with registry_lock(engine) as connection:
        aliases = registry.list_aliases()  # again, because a promotion may have held the lock
        changed = _record_all(connection, storage, tracking, aliases)
    for study_id in sorted(changed):
        _update_note(storage, study_id)
    return aliases


def _list_changed_aliases(aliases: Aliases, recorded: Mapping[tuple[str, str], Promotion]) -> list[tuple[str, str]]:
    """Return the aliases, as (model, alias), whose version in the registry differs from the recorded version."""
    versions = {key: promotion.version for key, promotion in recorded.items()}
    keys = sorted(aliases.keys() | versions.keys())
    return [key for key in keys if aliases.get(key) != versions.get(key) and not is_previous(key[1])]


def _record_all(connection: sa.Connection, storage: PostgresStorage, tracking: Tracking, aliases: Aliases) -> set[int]:
    """Record the aliases that have changed since the last record, and return the ids of the affected studies."""
    registry, recorded = Registry(tracking.client), read_current_promotions(connection)
    differing = _list_changed_aliases(aliases, recorded)
    versions = {key: registry.get_version(key[0], aliases[key]) for key in differing if key in aliases}
    runs = {version.run_id for version in versions.values() if version is not None and version.run_id}
    trials = find_trials_of_runs(connection, runs) if runs else {}
    changed = set()
    for key in differing:
        version, old = versions.get(key), recorded.get(key)
        found = [] if version is None else select_tagged(trials.get(version.run_id or "", []), version.tags)
        trial = found[0] if found else None
        check_lock_held(connection)
        if len(found) > 1:
            log.warning("promotion %s@%s not recorded: several trials name its run as theirs", *key)
            continue
        if version is not None and trial is not None:
            try:
                _record(connection, storage, tracking, trial, version, key[1])
            except (SearchError, *DAMAGE_ERRORS) as error:  # must not stop the records of others
                log.warning("promotion %s@%s of study %s not recorded: %s", *key, trial.study_name, error)
                continue
            changed.add(trial.study_id)
        # The alias has no trial of these studies any more. Promotions on another MLflow server stay as they are.
        elif old is not None and registry.has_run(str(old.evidence.get("run_id"))):
            end_promotion(connection, old)
        else:
            continue
        if old is not None:
            changed.add(old.study_id)
    return changed


def _record(
    connection: sa.Connection,
    storage: PostgresStorage,
    tracking: Tracking,
    trial: TrialOfRun,
    version: Version,
    alias: str,
) -> None:
    study = load_study_by_id(storage, trial.study_id)
    evidence = gather_evidence(Confirmation.read(study), find_trial(study, trial.number), tracking.client)
    # If the promotion has no record, the tag has the user of a `promote` command that died. If it has a record, a user
    # has moved the alias in MLflow.
    has_record = is_recorded(connection, version.model, version.number)
    by = (None if has_record else version.tags.get(tag_names.PROMOTED_BY)) or version.user or MLFLOW_UI
    try:
        write_evidence(Registry(tracking.client), version, evidence)
    except StorageError as error:  # such as missing permissions; the promotion is recorded anyway
        log.warning(
            "tags and description of version %d of model %s not written: %s", version.number, version.model, error
        )
    record_promotion(connection, evidence.to_record(), version.model, version.number, alias, by=by)
    log.info("trial %d of study %s promoted to %s@%s by %s", trial.number, trial.study_name, version.model, alias, by)


def _update_note(storage: PostgresStorage, study_id: int) -> None:
    from hpsearch.search.study.summary import summarise
    from hpsearch.search.tracking.study_run import write_note

    try:
        study = load_study_by_id(storage, study_id)
        if study.spec.finalists_of is not None:
            study = load_parent_study(study)
        write_note(study, summarise(study))
    except (SearchError, *DAMAGE_ERRORS) as error:
        log.info("study %d: note not updated, the study was deleted or is damaged: %s", study_id, error)


class RegistryWatcher:
    """Background thread that periodically calls `sync_promotions`.

    The thread logs failures of MLflow or the database at level info, and tries again.

    Args:
        storage: storage of the studies.
        tracking: function that returns a client of the MLflow server; called in the thread.
        every: interval in seconds.
    """

    def __init__(self, storage: PostgresStorage, tracking: Callable[[], Tracking], *, every: float = 5.0) -> None:
        self._storage = storage
        self._tracking = tracking
        self._every = every
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="registry-watcher", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(timeout=10.0)  # limited, because a request to MLflow may take longer

    def _run(self) -> None:
        known: Aliases | None = None
        is_logged = False
        while not self._end.is_set():
            try:
                known = sync_promotions(self._storage, self._tracking(), known=known)
                is_logged = False
            except (StorageError, SearchError, SQLAlchemyError) as error:
                log.info("promotions cannot be synchronized: %s; trying again", describe_error(error))
            except Exception:  # an unexpected error must not end the thread
                if not is_logged:
                    log.exception("promotions cannot be synchronized; trying again")
                is_logged = True
            self._end.wait(self._every)


def serve_dashboard_and_watch(
    storage_url: str, tracking_uri: str | None, *, host: str, port: int, read_only: bool = False, token: str | None
) -> None:
    """Serve the dashboard until the process ends. The tracking server may be unavailable.

    Args:
        storage_url: Postgres database with the studies.
        tracking_uri: MLflow server; if None, the dashboard serves no artifacts and records no promotions.
        host: address to listen on.
        port: port to listen on.
        read_only: whether the pages reject changes by users; promotions are recorded even then.
        token: token that requests must have; None to accept requests without a token.

    Raises:
        StorageError: the database is unusable, or the address is in use.
    """
    if tracking_uri is None:
        return serve_dashboard(storage_url, host=host, port=port, read_only=read_only, token=token)
    log_to_stderr(logging.WARNING)
    check_database(storage_url)
    allow_credentials(tracking_uri)

    @functools.cache
    def tracking() -> Tracking:
        check_server(tracking_uri)
        return Tracking(tracking_uri, ui_url=os.environ.get(MLFLOW_UI_URL))

    # Polls every few seconds, so it needs one connection and may give up early.
    storage = open_storage(storage_url, application_name="hpsearch-registry-watch", pool_size=1, retry_seconds=10.0)
    with RegistryWatcher(storage, tracking):
        artifacts = MlflowArtifactStore(lambda: tracking().client)
        serve_dashboard(storage_url, host=host, port=port, artifacts=artifacts, read_only=read_only, token=token)
    return None
