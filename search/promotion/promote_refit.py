"""Promotion of a refit: the model of the run of the median training loss gets the search's name in the registry."""

from __future__ import annotations

from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.refit import read_refit
from hpsearch.search.promotion.promote import Promoted, check_names, register
from hpsearch.search.study.steering import find_trial
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.registry import CHAMPION


def promote_refit(
    study: StoredStudy,
    tracking: Tracking,
    *,
    trial: int | None = None,
    alias: str = CHAMPION,
    model: str | None = None,
) -> Promoted:
    """Register the refit of a study's winner, with its evidence, and let an alias name it. Safe to repeat.

    Args:
        study: the search.
        tracking: the MLflow server that has its runs.
        trial: the winner's number, where it is to be made sure of.
        alias: for the version; what had it gets `previous_alias` of it.
        model: name of the registered model; the search's name unless given.

    Raises:
        SearchError: the refit is not trained, or its weights are not to be had.
        ObjectiveError: today's code does not fit its weights.
        StorageError: MLflow refuses, or is away.
    """
    name = model or study.spec.name
    check_names(alias, name)
    found = read_refit(study, trial)
    if found is None:
        raise SearchError(f"--refit: the winner of study {study.spec.name!r} was not trained on all data yet")
    made, refit = found
    if refit.pending:
        raise SearchError(f"--refit: {made.spec.name!r} is not done, {refit.pending} are left: go on with {made.go_on}")
    if refit.taken is None:
        why = "; ".join(f"trial {number} {why}" for number, why in enumerate(refit.reasons))
        raise SearchError(f"--refit: no run of {made.spec.name!r} has come to its end: {why}")
    return register(made, find_trial(made, refit.taken), tracking, alias=alias, name=name)
