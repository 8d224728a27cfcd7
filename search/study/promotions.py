"""The promotions of a search and of its refits."""

from __future__ import annotations

from hpsearch.search.study.study import StoredStudy, find_study
from hpsearch.storage.records.promotions import Promotion, read_promotions
from hpsearch.storage.trials.history import read_refit_studies


def list_promotions(study: StoredStudy) -> list[Promotion]:
    """Return the promotions of a study's trials and of its refits, oldest first."""
    refits = [find_study(study.storage, name) for name in read_refit_studies(study.engine, study.study_id)]
    study_ids = [study.study_id, *(each for each in refits if each is not None)]
    found = [promotion for study_id in study_ids for promotion in read_promotions(study.engine, study_id)]
    return sorted(found, key=lambda promotion: promotion.promoted_at)


def list_current_promotions(study: StoredStudy, *, trial: int | None = None) -> list[Promotion]:
    """Return the promotions of a study and its refits whose alias still points to the promoted version.

    Args:
        study: the search.
        trial: number of the trial; None selects all trials.
    """
    found = list_promotions(study) if trial is None else read_promotions(study.engine, study.study_id)
    return [p for p in found if p.ended_at is None and trial in (None, p.trial_number)]
