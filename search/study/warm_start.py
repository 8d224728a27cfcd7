"""A warm start: the earlier studies that a new one is to learn from, checked, and what is kept of them with it."""

from __future__ import annotations

from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import RandomSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpsearch.objectives.base import BaseObjective
from hpsearch.objectives.errors import users_code
from hpsearch.search.errors import SearchError
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.storage.study_storage import PostgresStorage

DRAWS = 50  # configurations by which a search space is known before there are trials: enough to see its branches


def told_by_earlier(storage: PostgresStorage, spec: StudySpec, objective: BaseObjective) -> dict[str, Any]:
    """Return the system attributes of a new study by which its sampler knows what earlier studies tell.

    Their trials are taken as they are now, those that run or wait with what they have reported: nothing that becomes of
    these studies afterwards changes a suggestion of the new one.

    Raises:
        SearchError: an earlier study is none, goes another way, or has nothing to tell of the objective's space.
        ObjectiveError: `suggest` failed.
    """
    if spec.warm_start is None:
        return {}
    found = {name: _trials(_earlier(storage, spec, name)) for name in spec.warm_start}
    distributions, drawn = search_space(objective)
    for name, trials in found.items():
        if not {key for trial in trials for key in trial.params} & distributions.keys():
            has = ", ".join(sorted(distributions))
            raise SearchError(
                f"--warm-start {name}: its trials have none of the parameters of {objective.name} ({has}): "
                "name a study of the same parameters, or leave it out"
            )
    try:
        return spec.sampler.earlier(
            found,
            distributions=distributions,
            drawn=drawn,
            direction=StudyDirection[spec.direction.upper()],
            epochs=spec.epochs,
            seed=spec.seed,
        )
    except ValueError as error:
        raise SearchError(f"--warm-start {error}") from None


def search_space(objective: BaseObjective) -> tuple[dict[str, BaseDistribution], list[dict[str, Any]]]:
    """Return the distributions of an objective's parameters, and the configurations at random that showed them."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    scratch = optuna.create_study(sampler=RandomSampler(0))
    distributions: dict[str, BaseDistribution] = {}
    drawn = []
    for _ in range(DRAWS):
        trial = scratch.ask()
        with users_code(f"{type(objective).__name__}.suggest"):
            objective.configure(trial)
        distributions |= trial.distributions
        drawn.append(trial.params)
    return distributions, drawn


def _earlier(storage: PostgresStorage, spec: StudySpec, name: str) -> StoredStudy:
    try:
        study = load_study(storage, name)
    except SearchError as error:
        raise SearchError(f"--warm-start {name}: {error}") from None
    if (of := study.spec.finalists_of) is not None:
        raise SearchError(f"--warm-start {name}: it holds {of.what}: name {of.study} instead")
    if study.spec.direction != spec.direction:
        raise SearchError(
            f"--warm-start {name}: it is to {study.spec.direction} {study.spec.metric}, this study is to "
            f"{spec.direction} {spec.metric}: name a study of the same direction, or leave it out"
        )
    return study


def _trials(study: StoredStudy) -> list[FrozenTrial]:
    """Return those that have reported something, or ended before they could."""
    trials = study.trials(TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING, TrialState.WAITING)
    told = [t for t in trials if t.params and (t.intermediate_values or t.state.is_finished())]
    if not told:
        raise SearchError(
            f"--warm-start {study.spec.name}: no trial of it has reported anything yet: run it first, or leave it out"
        )
    return told
