"""Promotions made in the MLflow UI are noticed: the study records them, the version gets its evidence.

It is done by asking, not by MLflow's webhooks: those refuse addresses of private networks unless the server's guard
against forged requests is lifted, and are delivered from memory, with three tries, so that asking would be needed
besides. When nothing has changed it costs one request of MLflow, and one query of a process's first look.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
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
    noticing = _Noticing(storage, tracking, Registry(tracking.client))
    return noticing.run(known)


@dataclass(frozen=True)
class _Difference:
    """An alias that names another version than is recorded; None for nothing."""

    model: str
    alias: str
    version: int | None
    recorded: Promotion | None


@dataclass(frozen=True)
class _Noticing:
    storage: PostgresStorage
    tracking: Tracking
    registry: Registry

    def run(self, known: Aliases | None) -> Aliases:
        aliases = self.registry.aliases()
        if aliases == known:
            return aliases
        engine = self.storage.engine
        with engine.connect() as connection:
            if not _differences(aliases, current_promotions(connection)):
                return aliases
        with registry_lock(engine) as connection:
            aliases = self.registry.aliases()  # again: a promotion of ours may have been at work
            changed = self._bring_in_line(connection, _differences(aliases, current_promotions(connection)))
        for study in sorted(changed):
            self._update_note(study)
        return aliases

    def _bring_in_line(self, connection: sa.Connection, differences: list[_Difference]) -> set[str]:
        """Record what has changed; return the names of the studies of which it was recorded."""
        versions = [self.registry.version(d.model, d.version) for d in differences if d.version is not None]
        named = {(version.model, version.number): version for version in versions if version is not None}
        runs = {version.run_id for version in named.values() if version.run_id}
        trials = trials_of_runs(connection, runs) if runs else {}
        changed = set()
        for difference in differences:
            version = named.get((difference.model, difference.version or 0))
            trial = trials.get(version.run_id or "") if version is not None else None
            old = difference.recorded
            still_held(connection)
            if version is not None and trial is not None:
                self._record(connection, difference.alias, version, trial)
                changed.add(trial.study_name)
            # Else it is somebody else's model, or nothing; a promotion that was made on another server stays.
            elif old is not None and self.registry.knows_run(str(old.evidence.get("run_id"))):
                end_promotion(connection, old)
            else:
                continue
            if old is not None:
                changed.add(str(old.evidence.get("study")))
        return changed

    def _record(self, connection: sa.Connection, alias: str, version: Version, trial: TrialOfRun) -> None:
        # Here, because they load torch: a process that only looks is to stay small.
        from hpsearch.search.promotion.evidence import Confirmation, gather_evidence
        from hpsearch.search.promotion.promote import write_evidence
        from hpsearch.search.study.steering import find_trial

        study = load_study(self.storage, trial.study_name)
        evidence = gather_evidence(Confirmation.read(study), find_trial(study, trial.number), self.tracking.client)
        # The tag says who promoted it by our command and died before that was recorded; later moves are another's.
        before = was_recorded(connection, version.model, version.number)
        by = (None if before else version.tags.get(tag_names.PROMOTED_BY)) or version.user or MLFLOW_UI
        try:
            write_evidence(self.registry, version, evidence)
        except StorageError as error:  # such as for want of rights: that it was promoted is true all the same
            log.warning("version %d of %s lacks its evidence: %s", version.number, version.model, error)
        record_promotion(
            connection,
            trial,
            model=version.model,
            version=version.number,
            alias=alias,
            by=by,
            evidence=evidence.as_record(),
        )
        log.info("trial %d of %s is %s@%s, by %s", trial.number, trial.study_name, version.model, alias, by)

    def _update_note(self, name: str) -> None:
        from hpsearch.search.study.summary import summarise
        from hpsearch.search.tracking.publish import write_note

        try:
            study = load_study(self.storage, name)
            if study.spec.finalists_of is not None:
                study = parent_of(study)
            write_note(study, summarise(study))
        except (SearchError, KeyError):
            log.info("study %s was deleted: it has no note to update", name)


def _differences(aliases: Aliases, recorded: dict[tuple[str, str], Promotion]) -> list[_Difference]:
    found = []
    for model, alias in sorted(aliases.keys() | recorded.keys()):
        version, promotion = aliases.get((model, alias)), recorded.get((model, alias))
        if version != (promotion.version if promotion else None) and not is_previous(alias):
            found.append(_Difference(model, alias, version, promotion))
    return found


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
