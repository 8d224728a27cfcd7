"""What a study's promotions are, for a person to read."""

from __future__ import annotations

import datetime

from hpsearch.search.study.study import StoredStudy, find_study
from hpsearch.storage.records.promotions import Promotion, promotions_of
from hpsearch.storage.trials.finalist_sets import refit_studies


def with_refits(study: StoredStudy) -> list[Promotion]:
    """Return the promotions of a study's trials and of refits of its winners, the first one first."""
    refits = [find_study(study.storage, name) for name in refit_studies(study.engine, study.study_id)]
    of = [study.study_id, *(each for each in refits if each is not None)]
    found = [promotion for study_id in of for promotion in promotions_of(study.engine, study_id)]
    return sorted(found, key=lambda promotion: promotion.promoted_at)


def current(study: StoredStudy, *, trial: int | None = None) -> list[Promotion]:
    """Return the promotions of a study and its refits, or of one trial, whose aliases still name the version."""
    found = with_refits(study) if trial is None else promotions_of(study.engine, study.study_id)
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
        f"promoted: {subject(promotion)} is {promotion.model_name}@{promotion.alias} "
        f"(version {promotion.version}), by {promotion.promoted_by} on {when:%Y-%m-%d %H:%M} UTC{doubt}"
    )


def subject(promotion: Promotion) -> str:
    """Return whose model it is: ``trial 7``, or ``the refit of trial 7``."""
    refit = promotion.evidence.get("refit")
    return f"trial {promotion.trial_number}" if refit is None else f"the refit of trial {refit['of']}"
