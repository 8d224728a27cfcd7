"""The study that the finalists of a search are trained in: made whole, once, and joined by whoever comes later.

It is a study like any other, so that its trials are claimed, leased, resumed and counted as any trials are. It is
another study than the search, so that the search's sampler and budget know nothing of it.
"""

from __future__ import annotations

import itertools
import math
import secrets
from typing import Any

import optuna
from optuna.exceptions import DuplicatedStudyError
from optuna.trial import FrozenTrial, TrialState, create_trial

from search.console import command, counted
from search.errors import SearchError
from search.finalists.table import newest_set
from search.pruners.none import NoPruning
from search.samplers.random import Random
from search.sampling.seeds import derive_seed
from search.spec.spec import FINALISTS, FinalistsOf, StudySpec, parse_spec
from search.study.create_or_join import name_metric
from search.study.steering import running_trials
from search.study.study import StoredStudy, load_study
from search.study.summary import summarise
from storage.attributes import (
    CHECKPOINT_URL,
    FOLDER,
    PARENT_TRIAL,
    REMOVED,
    RUN_ID,
    RUN_URL,
    SOURCE,
    SPEC,
    STOPPED,
    TRACKING_URI,
    TRAINING_SEED,
)
from storage.database.locks import name_lock
from storage.trials.finalist_sets import finalist_studies

TOP, SEEDS = 5, 2  # top 10 is no better than top 5, and two seeds take most of the winner's curse away

_LONGEST_NAME = 100  # of the spec


def create_or_join(
    study: StoredStudy, *, top: int | None, seeds: int | None, new_set: bool = False
) -> tuple[StoredStudy, bool]:
    """Choose the finalists of a study and enqueue all their trials, or join the set that was chosen before.

    Args:
        study: the study, whose search is over.
        top: how many of its best configurations; `TOP`, or as the set has it, unless given.
        seeds: how many fresh seeds, the same for all; `SEEDS`, or as the set has it, unless given.
        new_set: choose anew, by the search as it is now and on seeds that no set has had.

    Returns:
        The study of the finalists, and whether it was made now.

    Raises:
        SearchError: the search is not over, no trial of it is complete, or the set has another top or other seeds.
    """
    with name_lock(study.engine, study.spec.name):
        chosen = None if new_set else newest_set(study)
        if chosen is not None:
            _require_agreement(study, chosen, top=top, seeds=seeds)
            return chosen, False
        _require_over(study)
        best = best_configurations(study, top or TOP)
        if not best:
            raise SearchError(f"study {study.spec.name!r} has no complete trial: there is no finalist to choose")
        return _create(study, best, top=top or TOP, seeds=fresh_seeds(study, seeds or SEEDS)), True


def best_configurations(study: StoredStudy, top: int, *, removed: bool = False) -> list[FrozenTrial]:
    """Return the best COMPLETE trials, the best one first; of equal values, and of equal parameters, the earliest.

    Args:
        study: the study.
        top: how many.
        removed: whether a trial counts whose model was removed: it could win, but not be tested or promoted.
    """
    chosen: list[FrozenTrial] = []
    for trial in study.best_trials():
        if not math.isfinite(trial.value or 0.0) or (REMOVED in trial.user_attrs and not removed):
            continue
        if len(chosen) < top and all(trial.params != other.params for other in chosen):
            chosen.append(trial)
    return chosen


def passed_over(study: StoredStudy, top: int) -> list[int]:
    """Return the trials that would be among the best `top`, had their models not been removed."""
    return [t.number for t in best_configurations(study, top, removed=True) if REMOVED in t.user_attrs]


def fresh_seeds(study: StoredStudy, count: int) -> list[int]:
    """Return seeds that no trial of the search and no earlier set was trained on, derived from the study's seed."""
    taken = {derive_seed(study.spec.seed, "trial", trial.number) for trial in study.trials()}
    for name in finalist_studies(study.engine, study.study_id):
        of = load_study(study.storage, name).spec.finalists_of
        taken.update(of.seeds if of is not None else [])
    fresh: list[int] = []
    for index in itertools.count():
        if len(fresh) == count:
            break
        seed = derive_seed(study.spec.seed, "finalists", index)
        if seed not in taken:
            taken.add(seed)
            fresh.append(seed)
    return fresh


def _require_agreement(study: StoredStudy, chosen: StoredStudy, *, top: int | None, seeds: int | None) -> None:
    of = chosen.spec.finalists_of
    assert of is not None
    pairs = (("--top", of.top, top), ("--seeds", len(of.seeds), seeds))
    differ = [f"{flag}: {before} -> {now}" for flag, before, now in pairs if now is not None and now != before]
    if differ:
        raise SearchError(
            f"the finalists of {study.spec.name!r} were chosen with another setting ({'; '.join(differ)}): leave it "
            "out to go on with them, or choose others, on other seeds, with --new-set"
        )


def _require_over(study: StoredStudy) -> None:
    """Refuse to choose while better trials may come."""
    finished, name = summarise(study).finished, study.spec.name
    if study.is_spent(finished):
        return
    ended = study.attrs.get(STOPPED) is not None or study.out_of_time
    if ended and (running := running_trials(study)):
        wait = command("stop", name, "--wait")
        raise SearchError(f"study {name!r} has {counted(running, 'running trial')}: wait for the end: {wait}")
    if not ended:
        raise SearchError(
            f"study {name!r} is not over, {study.done(finished)} are done: let it end, or stop it first: "
            f"{command('stop', name)}"
        )


def _create(study: StoredStudy, chosen: list[FrozenTrial], *, top: int, seeds: list[int]) -> StoredStudy:
    of = FinalistsOf(
        study=study.spec.name,
        study_id=study.study_id,
        top=top,
        trials=[trial.number for trial in chosen],
        seeds=seeds,
        divisions=True,
    )
    for number in itertools.count(1):
        spec = _spec(study.spec, of, number)
        try:
            made = study.storage.create_filled_study(
                [optuna.study.StudyDirection[spec.direction.upper()]],
                spec.name,
                user_attrs=_attrs(study, spec),
                trials=_trials(of, {trial.number: trial for trial in chosen}),
            )
        except DuplicatedStudyError:
            continue  # an earlier set, or somebody's study of that name
        name_metric(study.storage, spec)
        return StoredStudy(spec, study.storage, made)
    raise AssertionError("names do not run out")


def _spec(searched: StudySpec, of: FinalistsOf, number: int) -> StudySpec:
    suffix = FINALISTS + (f"-{number}" if number > 1 else "")
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
        # What is promoted is the finalist's own run of the search: its weights, not those of a re-run, were chosen.
        "models": "none",
        "finalists_of": of.model_dump(),
    }
    return parse_spec({**searched.model_dump(), **own})


def _attrs(study: StoredStudy, spec: StudySpec) -> dict[str, Any]:
    """Return what the study is to have: what its workers need of the search's attributes, a folder, and its spec."""
    theirs = study.attrs
    shared = {key: theirs[key] for key in (SOURCE, CHECKPOINT_URL, TRACKING_URI, RUN_ID, RUN_URL) if key in theirs}
    return {**shared, FOLDER: f"{spec.name}-{secrets.token_hex(8)}", SPEC: spec.model_dump()}


def _trials(of: FinalistsOf, chosen: dict[int, FrozenTrial]) -> list[FrozenTrial]:
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
