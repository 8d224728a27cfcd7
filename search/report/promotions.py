"""What a study's promotions are, for a person to read."""

from __future__ import annotations

import datetime

from search.study.study import StoredStudy
from storage.records.promotions import Promotion, promotions_of


def current(study: StoredStudy, *, trial: int | None = None) -> list[Promotion]:
    """Return the promotions of a study, or of one of its trials, whose aliases still name the version."""
    found = promotions_of(study.engine, study.study_id)
    return [p for p in found if p.ended_at is None and trial in (None, p.trial_number)]


def promotion_lines(study: StoredStudy, *, trial: int | None = None) -> list[str]:
    """Return a line for each promotion of a study, or of one of its trials, that holds."""
    return [tell(promotion) for promotion in current(study, trial=trial)]


def tell(promotion: Promotion) -> str:
    """Return ``promoted: trial 7 is digits@champion (version 3), by ann@host on 2026-05-01 12:00 UTC, unconfirmed``."""
    when = promotion.promoted_at.astimezone(datetime.UTC)
    why = promotion.evidence.get("unconfirmed")
    doubt = f", unconfirmed ({why})" if why else ""
    return (
        f"promoted: trial {promotion.trial_number} is {promotion.model_name}@{promotion.alias} "
        f"(version {promotion.version}), by {promotion.promoted_by} on {when:%Y-%m-%d %H:%M} UTC{doubt}"
    )
