"""Records of promotions: model version, alias, user, time and evidence.

A row without an end time is the last known target of an alias. The model registry is authoritative:
:mod:`hpsearch.search.promotion.registry_watch` updates the rows from the registry.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from hpsearch.storage.attributes import MODEL_SHA256, RUN_ID
from hpsearch.storage.database.statements import Database
from hpsearch.storage.mlflow.tag_names import STUDY, TRIAL


@dataclass(frozen=True)
class Promotion:
    """Version of a registered model under an alias.

    Attributes:
        study_id: id of the trial's study.
        trial_number: number of the trial that trained the model.
        model_name: name of the registered model.
        version: version of the model.
        alias: alias of the version.
        promoted_at: time of the promotion by the database clock; for a promotion with another tool than hpsearch, the
            time at which hpsearch detected it.
        promoted_by: user and host, or the other tool.
        evidence: evidence for the promotion, see `hpsearch.search.promotion.evidence`.
        ended_at: time at which the alias was moved or removed; None for the current target.
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
    def is_confirmed(self) -> bool:
        """Whether finalists and a test score support the promotion."""
        return bool(self.evidence.get("confirmed"))

    @property
    def model_uri(self) -> str:
        """URI that loads the model: ``models:/digits@champion``."""
        return f"models:/{self.model_name}@{self.alias}"


@dataclass(frozen=True)
class TrialOfRun:
    """Trial that an MLflow run belongs to."""

    study_id: int
    study_name: str
    number: int


# Any worker can write rows. Without these conditions, a damaged row of one study would stop commands of all studies.
_SELECT_VALID = """
    SELECT study_id, trial_number, model_name, version, alias, promoted_at, promoted_by, evidence, ended_at
      FROM hpsearch_promotions
     WHERE jsonb_typeof(evidence) = 'object' AND promoted_at BETWEEN '1970-01-01' AND '9998-12-31'
       AND coalesce(ended_at, promoted_at) BETWEEN '1970-01-01' AND '9998-12-31'
"""

_CURRENT = sa.text(f"{_SELECT_VALID} AND ended_at IS NULL")

_OF_STUDY = sa.text(f"{_SELECT_VALID} AND study_id = :study ORDER BY promoted_at, promotion_id")

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

# The earliest promotion has the verified digest. The trial's attribute is written again when a worker sends a model.
_VERIFIED_SHA256 = sa.text("""
    SELECT evidence ->> 'model_sha256' FROM hpsearch_promotions
     WHERE evidence ->> 'model_id' = :model AND evidence ->> 'model_sha256' IS NOT NULL ORDER BY promotion_id LIMIT 1
""")
_MODEL_SHA256 = sa.text("""
    SELECT value_json FROM trial_user_attributes
     WHERE key = :key AND strpos(value_json, :model) > 0 ORDER BY trial_id
""")

_NO_VERSION = 0  # versions are numbered from 1


def read_current_promotions(connection: sa.Connection) -> dict[tuple[str, str], Promotion]:
    """Return the current promotion of each alias, by (model, alias)."""
    found = [Promotion(**row._mapping) for row in connection.execute(_CURRENT)]
    return {(promotion.model_name, promotion.alias): promotion for promotion in found}


def read_promotions(engine: sa.Engine, study_id: int) -> list[Promotion]:
    """Return the promotions of the models of a study's trials, the earliest first."""
    return [Promotion(**row._mapping) for row in Database(engine).fetch_rows(_OF_STUDY, {"study": study_id})]


def record_promotion(
    connection: sa.Connection, evidence: Mapping[str, Any], model: str, version: int, alias: str, *, by: str
) -> None:
    """Record that an alias points to a version, and end the promotion of the version to which it pointed before.

    If the alias pointed to the same version before, only the evidence is updated.

    Args:
        connection: connection with a transaction that holds `hpsearch.storage.database.locks.registry_lock`.
        evidence: JSON values; `study_id` and `trial` identify the trial of the model.
        model: name of the registered model.
        version: version of the model.
        alias: alias of the version.
        by: user and host.
    """
    # A registered model that was deleted and created again starts at version 1, so a version may belong to a new trial.
    trial = {"study": evidence["study_id"], "trial": evidence["trial"]}
    target = {"model": model, "alias": alias, "version": version, **trial}
    connection.execute(_END, target)
    connection.execute(_RECORD, {**target, "by": by, "evidence": json.dumps(_replace_nan(evidence))})


def end_promotion(connection: sa.Connection, promotion: Promotion) -> None:
    """Record that the alias of a promotion does not point to the promoted version any more."""
    alias = {"model": promotion.model_name, "alias": promotion.alias}
    connection.execute(_END, {**alias, "version": _NO_VERSION, "study": promotion.study_id, "trial": None})


def _replace_nan(value: Any) -> Any:
    """Return a value with None for each number that JSON cannot represent."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _replace_nan(one) for key, one in value.items()}
    return [_replace_nan(one) for one in value] if isinstance(value, list | tuple) else value


def is_recorded(connection: sa.Connection, model: str, version: int) -> bool:
    """Return whether a promotion of this version was ever recorded, under any alias."""
    return bool(connection.execute(_WAS_RECORDED, {"model": model, "version": version}).scalar())


def find_trials_of_runs(connection: sa.Connection, run_ids: Collection[str]) -> dict[str, list[TrialOfRun]]:
    """Return the trials that name each MLflow run as theirs, by run id; more than one, if a worker wrote a false id."""
    rows = connection.execute(_TRIALS, {"key": RUN_ID, "values": [json.dumps(run_id) for run_id in run_ids]})
    found: dict[str, list[TrialOfRun]] = {}
    for row in rows:
        found.setdefault(row.run_id, []).append(TrialOfRun(row.study_id, row.study_name, row.number))
    return found


def select_tagged(trials: list[TrialOfRun], tags: Mapping[str, str]) -> list[TrialOfRun]:
    """Return the trials that the tags of a model version name; all trials if the version has no such tags."""
    if STUDY not in tags:
        return trials
    return [each for each in trials if (each.study_name, str(each.number)) == (tags[STUDY], tags.get(TRIAL))]


def read_model_sha256(connection: sa.Connection, model_id: str) -> str | None:
    """Return the recorded digest of a logged model's files, see `compute_folder_sha256`; None if none is recorded."""
    arguments = {"model": model_id, "key": MODEL_SHA256}
    if (verified := connection.execute(_VERIFIED_SHA256, arguments).scalar()) is not None:
        return str(verified)
    for text in connection.execute(_MODEL_SHA256, arguments).scalars():
        with contextlib.suppress(ValueError):  # any worker can write attributes of other studies
            stored = json.loads(text)
            if isinstance(stored, dict) and stored.get(model_id) is not None:
                return str(stored[model_id])
    return None
