"""Choose the finalists of a study and create the study that retrains them."""

from __future__ import annotations

import itertools
import math
import secrets
import sys
from collections.abc import Mapping
from typing import Any

from optuna.exceptions import DuplicatedStudyError
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpsearch.search.console import command, counted
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.table import newest_set
from hpsearch.search.pruners.stopping import NoPruning
from hpsearch.search.samplers.optuna import Random
from hpsearch.search.samplers.suggest import derive_seed
from hpsearch.search.spec.spec import FINALISTS, REFIT, FinalistsOf, StudySpec, parse_spec
from hpsearch.search.study.create import name_metric, study_directions
from hpsearch.search.study.ranking import first_value, in_bounds, rank_trials
from hpsearch.search.study.steering import running_trials
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.search.study.summary import summarise
from hpsearch.storage.attributes import (
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
from hpsearch.storage.database.locks import name_lock
from hpsearch.storage.rungs.fronts import front, losses_of
from hpsearch.storage.trials.history import finalist_studies, refit_studies

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
    return [
        create_trial(
            state=TrialState.WAITING,
            system_attrs={"fixed_params": chosen[parent].params},
            user_attrs={PARENT_TRIAL: parent, TRAINING_SEED: seed},
        )
        for parent, seed in map(of.assignment, range(len(of.trials) * len(of.seeds)))
    ]


TOP, SEEDS = 5, 2  # top 10 is no better than top 5, and two seeds take most of the winner's curse away


def create_or_join(
    study: StoredStudy, *, top: int | None, seeds: int | None, new_set: bool = False, infeasible: bool = False
) -> tuple[StoredStudy, bool]:
    """Choose the finalists of a study and enqueue all their trials, or join the set that was chosen before.

    Args:
        study: the study, whose search is over.
        top: how many of its best configurations; `TOP`, or as the set has it, unless given. Of several metrics they
            are of the front, all of it unless given, else those that have most room about them.
        seeds: how many fresh seeds, the same for all; `SEEDS`, or as the set has it, unless given.
        new_set: choose anew, by the search as it is now and on seeds that no set has had.
        infeasible: whether trials may be among them that break a constraint.

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
        usual = None if study.spec.several else TOP
        best = best_configurations(study, top or usual or sys.maxsize, infeasible=infeasible)
        if not best:
            raise SearchError(f"study {study.spec.name!r} has {_no_finalist(study)}")
        of = FinalistsOf(
            study=study.spec.name,
            study_id=study.study_id,
            top=top or usual or len(best),
            trials=[trial.number for trial in best],
            seeds=fresh_seeds(study, seeds or SEEDS),
            divisions=True,
        )
        return create(study, of, {trial.number: trial for trial in best}), True


def _no_finalist(study: StoredStudy) -> str:
    if any(not in_bounds(trial) for trial in study.trials(TrialState.COMPLETE)):
        again = command("finalists", study.spec.name, "--infeasible")
        return f"no complete trial within its constraints: train those that break them with {again}"
    return "no complete trial: there is no finalist to choose"


def best_configurations(
    study: StoredStudy, top: int, *, removed: bool = False, infeasible: bool = False
) -> list[FrozenTrial]:
    """Return the best COMPLETE trials, the best one first; of equal values, and of equal parameters, the earliest.

    Of several metrics they are of the front.

    Args:
        study: the study.
        top: how many.
        removed: whether a trial counts whose model was removed: it could win, but not be tested or promoted.
        infeasible: whether one does that breaks a constraint.
    """
    spec = study.spec
    found = [
        trial
        for trial in study.best_trials(infeasible=infeasible)
        if math.isfinite(first_value(trial) or 0.0) and (removed or REMOVED not in trial.user_attrs)
    ]
    if spec.several:
        members = {found[place].number for place in front(losses_of([t.values for t in found], spec.maximized))}
        found = [trial for trial in rank_trials(found, spec.maximized, infeasible=True) if trial.number in members]
    chosen: list[FrozenTrial] = []
    for trial in found:
        if len(chosen) < top and all(trial.params != other.params for other in chosen):
            chosen.append(trial)
    return chosen


def passed_over(study: StoredStudy, top: int) -> list[int]:
    """Return the trials that would be among the best `top`, had their models not been removed."""
    return [t.number for t in best_configurations(study, top, removed=True) if REMOVED in t.user_attrs]


def fresh_seeds(study: StoredStudy, count: int, purpose: str = "finalists") -> list[int]:
    """Return seeds that nothing of the study was trained on, derived from the study's and what they are for."""
    taken = {derive_seed(study.spec.seed, "trial", trial.number) for trial in study.trials()}
    for names in (finalist_studies, refit_studies):
        for name in names(study.engine, study.study_id):
            of = load_study(study.storage, name).spec.finalists_of
            taken.update(of.seeds if of is not None else [])
    fresh: list[int] = []
    for index in itertools.count():
        if len(fresh) == count:
            break
        seed = derive_seed(study.spec.seed, purpose, index)
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
