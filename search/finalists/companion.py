"""The study that the finalists of a search are trained in: made whole, once, and joined by whoever comes later.

It is a study like any other, so that its trials are claimed, leased, resumed and counted as any trials are. It is
another study than the search, so that the search's sampler and budget know nothing of it.
"""

from __future__ import annotations

import itertools
import math
import secrets
import time
from typing import Any

import optuna
from optuna.exceptions import DuplicatedStudyError
from optuna.trial import FrozenTrial, TrialState, create_trial

from search.console import command, counted
from search.control import running_trials
from search.errors import SearchError
from search.finalists.table import newest_set
from search.samplers import derive_seed
from search.spec import FINALISTS, FinalistsOf, NoPruning, Random, StudySpec, parse_spec
from search.study import (
    CHECKPOINT_URL,
    FOLDER,
    REMOVED,
    RUN_ID,
    RUN_URL,
    SOURCE,
    STARTED_AT,
    TRACKING_URI,
    StudyHandle,
    load_study,
    name_metric,
)
from search.summary import summarise
from storage.claims import SPEC, STOPPED
from storage.finalists import finalist_studies
from storage.locks import name_lock
from storage.studies import engine_of

TOP, SEEDS = 5, 2  # top 10 is no better than top 5, and two seeds take most of the winner's curse away

_LONGEST_NAME = 100  # of the spec

# User attributes of a trial, for who reads it in the dashboard; what counts is in the spec.
PARENT_TRIAL, TRAINING_SEED = "hpsearch:finalist_of", "hpsearch:seed"


def create_or_join(
    handle: StudyHandle, *, top: int | None, seeds: int | None, new_set: bool = False
) -> tuple[StudyHandle, bool]:
    """Choose the finalists of a study and enqueue all their trials, or join the set that was chosen before.

    Args:
        handle: the study, whose search is over.
        top: how many of its best configurations; `TOP`, or as the set has it, unless given.
        seeds: how many fresh seeds, the same for all; `SEEDS`, or as the set has it, unless given.
        new_set: choose anew, by the search as it is now and on seeds that no set has had.

    Returns:
        The study of the finalists, and whether it was made now.

    Raises:
        SearchError: the search is not over, no trial of it is complete, or the set has another top or other seeds.
    """
    with name_lock(engine_of(handle.storage), handle.spec.name):
        held = None if new_set else newest_set(handle)
        if held is not None:
            _require_agreement(handle, held, top=top, seeds=seeds)
            return held, False
        _require_over(handle)
        chosen = best_configurations(handle, top or TOP)
        if not chosen:
            raise SearchError(f"study {handle.spec.name!r} has no complete trial: there is no finalist to choose")
        return _create(handle, chosen, top=top or TOP, seeds=fresh_seeds(handle, seeds or SEEDS)), True


def best_configurations(handle: StudyHandle, top: int, *, removed: bool = False) -> list[FrozenTrial]:
    """Return the best COMPLETE trials, the best one first; of equal values, and of equal parameters, the earliest.

    Args:
        handle: the study.
        top: how many.
        removed: whether a trial counts whose model was removed: it could win, but not be tested or promoted.
    """
    complete = [
        t for t in handle.trials() if t.state == TrialState.COMPLETE and t.value is not None and math.isfinite(t.value)
    ]
    sign = -1 if handle.spec.direction == "maximize" else 1
    chosen: list[FrozenTrial] = []
    for trial in sorted(complete, key=lambda t: (sign * (t.value or 0.0), t.number)):
        if REMOVED in trial.user_attrs and not removed:
            continue
        if len(chosen) < top and all(trial.params != other.params for other in chosen):
            chosen.append(trial)
    return chosen


def passed_over(handle: StudyHandle, top: int) -> list[int]:
    """Return the trials that would be among the best `top`, had their models not been removed."""
    return [t.number for t in best_configurations(handle, top, removed=True) if REMOVED in t.user_attrs]


def fresh_seeds(handle: StudyHandle, count: int) -> list[int]:
    """Return seeds that no trial of the search and no earlier set was trained on, derived from the study's seed."""
    taken = {derive_seed(handle.spec.seed, "trial", trial.number) for trial in handle.trials()}
    for name in finalist_studies(engine_of(handle.storage), handle.study_id):
        of = load_study(handle.storage, name).spec.finalists_of
        taken.update(of.seeds if of is not None else [])
    fresh: list[int] = []
    for index in itertools.count():
        if len(fresh) == count:
            break
        seed = derive_seed(handle.spec.seed, "finalists", index)
        if seed not in taken:
            taken.add(seed)
            fresh.append(seed)
    return fresh


def parent_of(held: StudyHandle) -> StudyHandle:
    """Return the study whose finalists a study holds.

    Raises:
        SearchError: it was deleted.
    """
    of = held.spec.finalists_of
    assert of is not None
    try:
        parent = load_study(held.storage, of.study)
    except SearchError:
        parent = None
    if parent is None or parent.study_id != of.study_id:
        raise SearchError(
            f"study {of.study!r}, whose finalists {held.spec.name!r} holds, was deleted: "
            f"delete them too: {command('delete', held.spec.name)}"
        )
    return parent


def _require_agreement(handle: StudyHandle, held: StudyHandle, *, top: int | None, seeds: int | None) -> None:
    of = held.spec.finalists_of
    assert of is not None
    pairs = (("--top", of.top, top), ("--seeds", len(of.seeds), seeds))
    differ = [f"{flag}: {before} -> {now}" for flag, before, now in pairs if now is not None and now != before]
    if differ:
        raise SearchError(
            f"the finalists of {handle.spec.name!r} were chosen with another setting ({'; '.join(differ)}): leave it "
            "out to go on with them, or choose others, on other seeds, with --new-set"
        )


def _require_over(handle: StudyHandle) -> None:
    """Refuse to choose while better trials may come."""
    finished, budget, name = summarise(handle).finished, handle.budget, handle.spec.name
    if finished >= budget:
        return
    ended = handle.attrs.get(STOPPED) is not None or _out_of_time(handle)
    if ended and (running := running_trials(handle)):
        wait = command("stop", name, "--wait")
        raise SearchError(f"study {name!r} has {counted(running, 'running trial')}: wait for the end: {wait}")
    if not ended:
        raise SearchError(
            f"study {name!r} is not over, {finished} of its {budget} trials are done: let it end, or stop it first: "
            f"{command('stop', name)}"
        )


def _out_of_time(handle: StudyHandle) -> bool:
    started = handle.attrs.get(STARTED_AT)
    timeout = handle.spec.timeout
    return timeout is not None and started is not None and time.time() >= float(started) + timeout


def _create(handle: StudyHandle, chosen: list[FrozenTrial], *, top: int, seeds: list[int]) -> StudyHandle:
    of = FinalistsOf(
        study=handle.spec.name,
        study_id=handle.study_id,
        top=top,
        trials=[trial.number for trial in chosen],
        seeds=seeds,
    )
    for number in itertools.count(1):
        spec = _spec(handle.spec, of, number)
        try:
            made = handle.storage.create_filled_study(
                [optuna.study.StudyDirection[spec.direction.upper()]],
                spec.name,
                user_attrs=_attrs(handle, spec),
                trials=_trials(of, {trial.number: trial for trial in chosen}),
            )
        except DuplicatedStudyError:
            continue  # an earlier set, or somebody's study of that name
        name_metric(handle.storage, spec)
        return StudyHandle(spec, handle.storage, made)
    raise AssertionError("names do not run out")


def _spec(searched: StudySpec, of: FinalistsOf, number: int) -> StudySpec:
    suffix = FINALISTS + (f"-{number}" if number > 1 else "")
    own = {
        "name": searched.name[: _LONGEST_NAME - len(suffix)] + suffix,
        "n_trials": len(of.trials) * len(of.seeds),
        "sampler": Random().model_dump(),
        "pruner": NoPruning().model_dump(),
        "timeout": None,
        # What is promoted is the finalist's own run of the search: its weights, not those of a re-run, were chosen.
        "models": "none",
        "finalists_of": of.model_dump(),
    }
    return parse_spec({**searched.model_dump(), **own})


def _attrs(handle: StudyHandle, spec: StudySpec) -> dict[str, Any]:
    """Return what the study is to have: what its workers need of the search's attributes, a folder, and its spec."""
    theirs = handle.attrs
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
