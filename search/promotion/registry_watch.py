"""Promotions made in the MLflow UI are noticed: the study records them, the version gets its evidence.

It is done by asking, not by MLflow's webhooks: those refuse addresses of private networks unless the server's guard
against forged requests is lifted, and are delivered from memory, with three tries, so that asking would be needed
besides. When nothing has changed it costs one request of MLflow, and one query of a process's first look.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Self

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from hpsearch.search.errors import SearchError
from hpsearch.search.study.study import load_study, parent_of
from hpsearch.storage.database.locks import registry_lock, still_held
from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.health import describe_error
from hpsearch.storage.mlflow.registry import Registry, Version, is_previous
from hpsearch.storage.records.promotions import (
    Promotion,
    TrialOfRun,
    current_promotions,
    end_promotion,
    record_promotion,
    trials_of_runs,
    was_recorded,
)
from hpsearch.storage.study_storage.storage import PostgresStorage

log = logging.getLogger(__name__)

MLFLOW_UI = "MLflow UI"

Aliases = dict[tuple[str, str], int]  # (model, alias) to version


def notice(storage: PostgresStorage, tracking: Tracking, *, known: Aliases | None = None) -> Aliases:
    """Bring what the studies record of promotions in line with the model registry, and their notes with that.

    Aliases that say what another named before are nobody's promotion.

    Args:
        storage: of the studies.
        tracking: the MLflow server.
        known: what this function returned before: while the registry is still so, nothing is to be done.

    Returns:
        What the aliases name.

    Raises:
        StorageError: MLflow is away, or refuses.
    """
    registry, engine = Registry(tracking.client), storage.engine
    aliases = registry.aliases()
    if aliases == known:
        return aliases
    with engine.connect() as connection:
        if not _differing(aliases, current_promotions(connection)):
            return aliases
    with registry_lock(engine) as connection:
        aliases = registry.aliases()  # again: a promotion of ours may have been at work
        changed = _bring_in_line(connection, storage, tracking, aliases)
    for study in sorted(changed):
        _update_note(storage, study)
    return aliases


def _differing(aliases: Aliases, recorded: Mapping[tuple[str, str], Promotion]) -> list[tuple[str, str]]:
    """Return the aliases (model, alias) that do not name the version that is recorded."""
    versions = {key: promotion.version for key, promotion in recorded.items()}
    keys = sorted(aliases.keys() | versions.keys())
    return [key for key in keys if aliases.get(key) != versions.get(key) and not is_previous(key[1])]


def _bring_in_line(
    connection: sa.Connection, storage: PostgresStorage, tracking: Tracking, aliases: Aliases
) -> set[str]:
    """Record the changed aliases; return the names of the studies whose trials they are of."""
    registry, recorded = Registry(tracking.client), current_promotions(connection)
    differing = _differing(aliases, recorded)
    versions = {key: registry.version(key[0], aliases[key]) for key in differing if key in aliases}
    runs = {version.run_id for version in versions.values() if version is not None and version.run_id}
    trials = trials_of_runs(connection, runs) if runs else {}
    changed = set()
    for key in differing:
        version, old = versions.get(key), recorded.get(key)
        trial = trials.get(version.run_id or "") if version is not None else None
        still_held(connection)
        if version is not None and trial is not None:
            _record(connection, storage, tracking, trial, version, key[1])
            changed.add(trial.study_name)
        # Else it is somebody else's model, or nothing; a promotion that was made on another server stays.
        elif old is not None and registry.knows_run(str(old.evidence.get("run_id"))):
            end_promotion(connection, old)
        else:
            continue
        if old is not None:
            changed.add(str(old.evidence.get("study")))
    return changed


def _record(
    connection: sa.Connection,
    storage: PostgresStorage,
    tracking: Tracking,
    trial: TrialOfRun,
    version: Version,
    alias: str,
) -> None:
    # Here, because they load torch: a process that only looks is to stay small.
    from hpsearch.search.promotion.evidence import Confirmation, gather_evidence
    from hpsearch.search.promotion.promote import write_evidence
    from hpsearch.search.study.steering import find_trial

    study = load_study(storage, trial.study_name)
    evidence = gather_evidence(Confirmation.read(study), find_trial(study, trial.number), tracking.client)
    # The tag says who promoted it by our command and died before that was recorded; later moves are another's.
    before = was_recorded(connection, version.model, version.number)
    by = (None if before else version.tags.get(tag_names.PROMOTED_BY)) or version.user or MLFLOW_UI
    try:
        write_evidence(Registry(tracking.client), version, evidence)
    except StorageError as error:  # such as for want of rights: that it was promoted is true all the same
        log.warning("version %d of %s lacks its evidence: %s", version.number, version.model, error)
    record_promotion(connection, evidence.as_record(), version.model, version.number, alias, by=by)
    log.info("trial %d of %s is %s@%s, by %s", trial.number, trial.study_name, version.model, alias, by)


def _update_note(storage: PostgresStorage, name: str) -> None:
    from hpsearch.search.study.summary import summarise
    from hpsearch.search.tracking.publish import write_note

    try:
        study = load_study(storage, name)
        if study.spec.finalists_of is not None:
            study = parent_of(study)
        write_note(study, summarise(study))
    except (SearchError, KeyError):
        log.info("study %s was deleted: it has no note to update", name)


class Watch:
    """Notices promotions every few seconds, in a thread, for as long as the block lasts.

    MLflow or the database being away is no news here: it is tried again.

    Args:
        storage: of the studies.
        tracking: makes, or remembers, the MLflow server; called in the thread.
        every: seconds between two looks.
    """

    def __init__(self, storage: PostgresStorage, tracking: Callable[[], Tracking], *, every: float = 5.0) -> None:
        self._storage = storage
        self._tracking = tracking
        self._every = every
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="noticing", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(timeout=10.0)  # it may be waiting for MLflow

    def _run(self) -> None:
        known: Aliases | None = None
        told = False
        while not self._end.is_set():
            try:
                known = notice(self._storage, self._tracking(), known=known)
                told = False
            except (StorageError, SearchError, SQLAlchemyError) as error:
                log.info("promotions are not noticed for now: %s", describe_error(error))
            except Exception:  # whatever it is, it must not end the noticing for good
                if not told:
                    log.exception("promotions are not noticed for now")
                told = True
            self._end.wait(self._every)
