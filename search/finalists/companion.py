"""A study beside a search, in which trials of it are trained again: made whole, at once.

It is a study like any other, so that its trials are claimed, leased, resumed and counted as any trials are. It is
another study than the search, so that the search's sampler and budget know nothing of it.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping
from typing import Any

from optuna.exceptions import DuplicatedStudyError
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpsearch.search.pruners.none import NoPruning
from hpsearch.search.samplers.random import Random
from hpsearch.search.spec.spec import FINALISTS, REFIT, FinalistsOf, StudySpec, parse_spec
from hpsearch.search.study.create_or_join import name_metric, study_directions
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import (
    CHECKPOINT_URL,
    FOLDER,
    PARENT_TRIAL,
    RUN_ID,
    RUN_URL,
    SOURCE,
    SPEC,
    TRACKING_URI,
    TRAINING_SEED,
)

_LONGEST_NAME = 100  # of the spec


def create(study: StoredStudy, of: FinalistsOf, chosen: Mapping[int, FrozenTrial]) -> StoredStudy:
    """Make the study with all its trials, under the first name that nobody has.

    Args:
        study: the search.
        of: what is trained again.
        chosen: the trials of the search that it names, by their numbers.
    """
    for number in itertools.count(1):
        spec = _spec(study.spec, of, number)
        try:
            made = study.storage.create_filled_study(
                study_directions(spec),
                spec.name,
                user_attrs=_attrs(study, spec),
                trials=_trials(of, chosen),
            )
        except DuplicatedStudyError:
            continue  # an earlier one, or somebody's study of that name
        name_metric(study.storage, spec)
        return StoredStudy(spec, study.storage, made)
    raise AssertionError("names do not run out")


def _spec(searched: StudySpec, of: FinalistsOf, number: int) -> StudySpec:
    suffix = (FINALISTS if of.refit is None else REFIT) + (f"-{number}" if number > 1 else "")
    own = {
        "name": searched.name[: _LONGEST_NAME - len(suffix)] + suffix,
        "n_trials": len(of.trials) * len(of.seeds),
        "sampler": Random().model_dump(),
        "warm_start": None,
        "stop_when": None,
        "pruner": NoPruning().model_dump(),
        "timeout": None,
        "budget_epochs": None,
        "budget_seconds": None,
        # What is promoted is the finalist's own run of the search: its weights, not those of a re-run, were chosen. Of
        # the runs of a refit it is one, whose model is made then.
        "models": "none",
        "finalists_of": of.model_dump(),
    }
    return parse_spec({**searched.model_dump(), **own})


def _attrs(study: StoredStudy, spec: StudySpec) -> dict[str, Any]:
    """Return what the study is to have: what its workers need of the search's attributes, a folder, and its spec."""
    theirs = study.attrs
    shared = {key: theirs[key] for key in (SOURCE, CHECKPOINT_URL, TRACKING_URI, RUN_ID, RUN_URL) if key in theirs}
    return {**shared, FOLDER: f"{spec.name}-{secrets.token_hex(8)}", SPEC: spec.model_dump()}


def _trials(of: FinalistsOf, chosen: Mapping[int, FrozenTrial]) -> list[FrozenTrial]:
    """Return the trials as `Study.enqueue_trial` makes them, their parameters fixed."""
    made = []
    for number in range(len(of.trials) * len(of.seeds)):
        parent, seed = of.assignment(number)
        made.append(
            create_trial(
                state=TrialState.WAITING,
                system_attrs={"fixed_params": chosen[parent].params},
                user_attrs={PARENT_TRIAL: parent, TRAINING_SEED: seed},
            )
        )
    return made
