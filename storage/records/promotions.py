"""Promotions of trials, as the study database remembers them: who gave which version of a model which alias, and when.

A row without an end says what an alias names now, as far as is known; the model registry has the last word, and
:mod:`hpsearch.search.promotion.registry_watch` brings the rows in line with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from hpsearch.storage.attributes import RUN_ID
from hpsearch.storage.database.statements import Database


@dataclass(frozen=True)
class Promotion:
    """One version of a registered model under one alias.

    Attributes:
        study_id: the study of the trial.
        trial_number: the trial whose model it is.
        model_name: of the registered model.
        version: of that model.
        alias: that names the version.
        promoted_at: by the database's clock; of a promotion made elsewhere, when it was noticed.
        promoted_by: user and host, or where it was done.
        evidence: what was known of the trial, see `hpsearch.search.promotion.evidence`.
        ended_at: when the alias went to another version or was removed; None while it names this one.
    """

    study_id: int
    trial_number: int
    model_name: str
    version: int
    alias: str
    promoted_at: datetime
    promoted_by: str
    evidence: Mapping[str, Any]
    ended_at: datetime | None

    @property
    def confirmed(self) -> bool:
        """Whether finalists and the test set stood behind it."""
        return bool(self.evidence.get("confirmed"))

    @property
    def address(self) -> str:
        """How the model is loaded: ``models:/digits@champion``."""
        return f"models:/{self.model_name}@{self.alias}"


@dataclass(frozen=True)
class TrialOfRun:
    """The trial that an MLflow run is of."""

    study_id: int
    study_name: str
    number: int


_COLUMNS = """
    study_id, trial_number, model_name, version, alias, promoted_at, promoted_by, evidence, ended_at
"""

_CURRENT = sa.text(f"SELECT {_COLUMNS} FROM hpsearch_promotions WHERE ended_at IS NULL")  # noqa: S608 the parts are constants

_OF_STUDY = sa.text(f"""
    SELECT {_COLUMNS} FROM hpsearch_promotions WHERE study_id = :study ORDER BY promoted_at, promotion_id
""")  # noqa: S608 the parts are constants

_END = sa.text("""
    UPDATE hpsearch_promotions SET ended_at = now()
     WHERE model_name = :model AND alias = :alias AND ended_at IS NULL
       AND (version, study_id, trial_number) IS DISTINCT FROM (:version, :study, :trial)
""")

_RECORD = sa.text("""
    INSERT INTO hpsearch_promotions (study_id, trial_number, model_name, version, alias, promoted_by, evidence)
    VALUES (:study, :trial, :model, :version, :alias, :by, CAST(:evidence AS jsonb))
    ON CONFLICT (model_name, alias) WHERE ended_at IS NULL DO UPDATE SET evidence = excluded.evidence
""")

_WAS_RECORDED = sa.text("""
    SELECT EXISTS (SELECT FROM hpsearch_promotions WHERE model_name = :model AND version = :version)
""")

_TRIALS = sa.text("""
    SELECT a.value_json::jsonb #>> '{}' AS run_id, t.study_id, s.study_name, t.number
      FROM trial_user_attributes a JOIN trials t USING (trial_id) JOIN studies s USING (study_id)
     WHERE a.key = :key AND a.value_json = ANY(:values)
""")

_NO_VERSION = 0  # versions are numbered from 1


def current_promotions(connection: sa.Connection) -> dict[tuple[str, str], Promotion]:
    """Return what the aliases name, as far as is recorded: (model, alias) to promotion."""
    found = [Promotion(**row._mapping) for row in connection.execute(_CURRENT)]
    return {(promotion.model_name, promotion.alias): promotion for promotion in found}


def promotions_of(engine: sa.Engine, study_id: int) -> list[Promotion]:
    """Return the promotions of a study's trials, the first one first."""
    return [Promotion(**row._mapping) for row in Database(engine).rows(_OF_STUDY, {"study": study_id})]


def record_promotion(
    connection: sa.Connection, evidence: Mapping[str, Any], model: str, version: int, alias: str, *, by: str
) -> None:
    """Write that an alias names a version now; what it named before has ended. Of the same version, only the evidence.

    Args:
        connection: in a transaction that holds `hpsearch.storage.database.locks.registry_lock`.
        evidence: plain values; `study_id` and `trial` name the trial that the model is of.
        model: name of the registered model.
        version: of it.
        alias: that names the version.
        by: user and host, for a person to read.
    """
    # The same version may be another trial's: a registered model that was deleted and made again counts from 1.
    trial = {"study": evidence["study_id"], "trial": evidence["trial"]}
    place = {"model": model, "alias": alias, "version": version, **trial}
    connection.execute(_END, place)
    connection.execute(_RECORD, {**place, "by": by, "evidence": json.dumps(_without_nan(evidence))})


def end_promotion(connection: sa.Connection, promotion: Promotion) -> None:
    """Write that an alias names this version no longer."""
    place = {"model": promotion.model_name, "alias": promotion.alias}
    connection.execute(_END, {**place, "version": _NO_VERSION, "study": promotion.study_id, "trial": None})


def _without_nan(value: Any) -> Any:
    """Return plain values with None for what JSON has no number for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _without_nan(one) for key, one in value.items()}
    return [_without_nan(one) for one in value] if isinstance(value, list | tuple) else value


def was_recorded(connection: sa.Connection, model: str, version: int) -> bool:
    """Whether any alias of this version was ever recorded."""
    return bool(connection.execute(_WAS_RECORDED, {"model": model, "version": version}).scalar())


def trials_of_runs(connection: sa.Connection, run_ids: Collection[str]) -> dict[str, TrialOfRun]:
    """Return the trials that some MLflow runs are of; runs of others are left out."""
    rows = connection.execute(_TRIALS, {"key": RUN_ID, "values": [json.dumps(run_id) for run_id in run_ids]})
    return {row.run_id: TrialOfRun(row.study_id, row.study_name, row.number) for row in rows}
