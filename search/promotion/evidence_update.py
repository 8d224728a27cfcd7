"""Write the evidence for a promotion to its model version, and update it after finalists or a test evaluation."""

from __future__ import annotations

from hpsearch.search.promotion.evidence import Confirmation, Evidence, gather_evidence, version_tags
from hpsearch.search.promotion.model_card import describe_evidence
from hpsearch.search.study.control import find_trial
from hpsearch.search.study.promotions import list_current_promotions
from hpsearch.search.study.study import StoredStudy, load_study_by_id
from hpsearch.storage.attributes import RUN_ID
from hpsearch.storage.database.locks import registry_lock
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.registry import Registry, Version
from hpsearch.storage.records.promotions import Promotion, record_promotion


def refresh_evidence(study: StoredStudy, tracking: Tracking) -> None:
    """Update the evidence of a study's current promotions if finalists or the test evaluation have changed it.

    Raises:
        StorageError: MLflow is unavailable or rejects a request.
    """
    changed: list[tuple[Promotion, StoredStudy]] = []
    for each in list_current_promotions(study):
        of = study if each.study_id == study.study_id else load_study_by_id(study.storage, each.study_id)
        if Confirmation.read(of).explain_unconfirmed(each.trial_number) != each.evidence.get("unconfirmed"):
            changed.append((each, of))
    if not changed:
        return
    registry = Registry(tracking.client)
    with registry_lock(study.engine) as connection:
        for each, of in changed:
            version = registry.get_version_by_alias(each.model_name, each.alias)
            if version is None or version.number != each.version:
                continue  # the alias has moved, which `registry_watch` records
            trial = find_trial(of, each.trial_number)
            if version.run_id is None or version.run_id != trial.user_attrs.get(RUN_ID):
                continue  # any worker can store a promotion, also of a version of other users
            evidence = gather_evidence(Confirmation.read(of), trial, tracking.client)
            write_evidence(registry, version, evidence)
            by = each.promoted_by
            record_promotion(connection, evidence.to_record(), version.model, version.number, each.alias, by=by)


def write_evidence(registry: Registry, version: Version, evidence: Evidence) -> None:
    """Write the evidence for a trial to the tags and the description of a model version."""
    text = describe_evidence(evidence, address=version.uri, written=version.description)
    registry.update_version(version, tags=version_tags(evidence), description=text)
