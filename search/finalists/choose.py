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

from hpsearch.search.console import format_command, pluralize
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.refit import choose_refit_epochs, find_refit, find_refit_winner
from hpsearch.search.finalists.table import find_newest_set
from hpsearch.search.pruners.stopping import NoPruning
from hpsearch.search.samplers.optuna import Random
from hpsearch.search.samplers.suggest import derive_seed
from hpsearch.search.spec.spec import FINALISTS, REFIT, FinalistsOf, StudySpec, parse_spec
from hpsearch.search.study.control import count_running, find_trial
from hpsearch.search.study.create import get_study_directions, set_metric_names
from hpsearch.search.study.ranking import get_first_value, get_schedule, is_feasible, rank_trials
from hpsearch.search.study.study import StoredStudy, load_companion
from hpsearch.search.study.summary import summarise
from hpsearch.storage.attributes import (
    CHECKPOINT_URL,
    CONFIG_SCHEDULE,
    DATA_SHA256,
    FOLDER_NAME,
    LEAKS,
    PARENT_TRIAL,
    REMOVED_BY,
    RESTORED,
    RUN_ID,
    RUN_URL,
    SOURCE_SHA256,
    SPEC,
    TRACKING_URI,
    TRAINING_SEED,
)
from hpsearch.storage.database.locks import name_lock
from hpsearch.storage.rungs.fronts import find_front, to_losses
from hpsearch.storage.trials.history import read_finalist_studies, read_refit_studies

_MAX_NAME_LENGTH = 100  # maximum length of `StudySpec.name`


def create_finalist_study(study: StoredStudy, of: FinalistsOf, chosen: Mapping[int, FrozenTrial]) -> StoredStudy:
    """Create the finalist or refit study of a search with all its trials, under the first unused name.

    Args:
        study: the search.
        of: setting with the configurations to retrain and their seeds.
        chosen: trials of the search that have these configurations, by number.
    """
    trials = _make_trials(of, chosen)
    for number in itertools.count(1):
        spec = _make_spec(study.spec, of, number)
        directions, attrs = get_study_directions(spec), _make_attrs(study, spec)
        try:
            made = study.storage.create_filled_study(directions, spec.name, user_attrs=attrs, trials=trials)
        except DuplicatedStudyError:
            continue  # an earlier set, or an unrelated study
        set_metric_names(study.storage, spec)
        return StoredStudy(spec, study.storage, made)
    raise AssertionError("unreachable: the numbers are unbounded")


def _make_spec(searched: StudySpec, of: FinalistsOf, number: int) -> StudySpec:
    suffix = (FINALISTS if of.refit is None else REFIT) + (f"-{number}" if number > 1 else "")
    own = {
        "name": searched.name[: _MAX_NAME_LENGTH - len(suffix)] + suffix,
        "n_trials": len(of.trials) * len(of.seeds),
        "sampler": Random().model_dump(),
        "warm_start": None,
        "min_expected_gain": None,
        "pruner": NoPruning().model_dump(),
        "folds": searched.folds if of.refit is None else None,
        "timeout": None,
        "budget_epochs": None,
        "budget_seconds": None,
        # `promote` uses the model of the trial in the search. For a refit it exports the model of the selected run.
        "models": "none",
        "finalists_of": of.model_dump(),
    }
    return parse_spec({**searched.model_dump(), **own})


_CHOSEN_BY_SEARCH = ("objective", "sampler", "pruner", "tensorboard", "wandb")  # settings with code or destinations


def check_generated(study: StoredStudy, made: StoredStudy) -> None:
    """Check that a finalist or refit study has the settings with code and destinations that hpsearch gives it.

    Every worker's database role can create such a study. The workers that retrain the finalists would run its code.

    Args:
        study: the search.
        made: the finalist or refit study.

    Raises:
        SearchError: a setting differs.
    """
    expected = _make_spec(study.spec, made.finalists_of, number=1)
    for name in _CHOSEN_BY_SEARCH:
        if getattr(made.spec, name) != getattr(expected, name):
            raise SearchError(
                f"study {made.spec.name!r} has another {name} than hpsearch sets for {made.finalists_of.description}; "
                f"delete it with: {format_command('delete', made.spec.name)}"
            )


_SHARED = (  # attributes as in the search
    *(SOURCE_SHA256, DATA_SHA256, LEAKS, RESTORED),
    *(CHECKPOINT_URL, TRACKING_URI, RUN_ID, RUN_URL),
)


def _make_attrs(study: StoredStudy, spec: StudySpec) -> dict[str, Any]:
    """Return the user attributes of the new study: its folder and spec, and attributes copied from the search."""
    attrs = study.attrs
    shared = {key: attrs[key] for key in _SHARED if key in attrs}
    return {**shared, FOLDER_NAME: f"{spec.name}-{secrets.token_hex(8)}", SPEC: spec.model_dump()}


def _make_trials(of: FinalistsOf, chosen: Mapping[int, FrozenTrial]) -> list[FrozenTrial]:
    """Return one waiting trial per configuration and seed, with fixed parameters as in Optuna's `enqueue_trial`."""
    return [
        create_trial(
            state=TrialState.WAITING,
            system_attrs={"fixed_params": chosen[parent].params},
            user_attrs={PARENT_TRIAL: parent, TRAINING_SEED: seed, **_get_schedule(chosen[parent], of.refit)},
        )
        for parent, seed in map(of.get_trial_and_seed, range(len(of.trials) * len(of.seeds)))
    ]


def _get_schedule(trial: FrozenTrial, epochs: int | None = None) -> dict[str, Any]:
    """Return the attribute with the schedule of a trial whose configuration changed, so that other runs follow it.

    Args:
        trial: trial of the search.
        epochs: number of epochs that the other runs train; None if they train all.
    """
    if (schedule := get_schedule(trial)) is None:
        return {}
    return {CONFIG_SCHEDULE: [part for part in schedule if epochs is None or part["epoch"] < epochs]}


FINALIST_COUNT, FINALIST_SEEDS = 5, 2  # ten are no better than five, and two seeds remove most of the selection bias


REFIT_SEEDS = 3
MAX_SEEDS = 1_000  # per finalist or refit; each seed is a training


def check_count(flag: str, value: object, *, maximum: int | None = None) -> None:
    """Reject a given number that is not an integer from 1 to `maximum`; None is accepted."""
    if value is not None and (not isinstance(value, int) or value < 1 or (maximum is not None and value > maximum)):
        valid = "an integer of at least 1" if maximum is None else f"an integer in [1, {maximum}]"
        raise SearchError(f"{flag} must be {valid}, not {value!r}")


def create_or_join(
    study: StoredStudy, *, top: int | None, seeds: int | None, new_set: bool = False, infeasible: bool = False
) -> tuple[StoredStudy, bool]:
    """Choose the finalists of a study and enqueue their trials, or join the existing set.

    Args:
        study: the search, which must have ended.
        top: number of best configurations. None uses that of the existing set, or `FINALIST_COUNT` for a new set. In a
            multi-objective study, None selects the whole Pareto front for a new set, and a number selects the trials of
            the front with the largest crowding distance.
        seeds: number of new seeds, common to all finalists. None uses that of the existing set, or `FINALIST_SEEDS`.
        new_set: whether to choose a new set from the current results, on seeds that no other set uses.
        infeasible: whether to include trials that violate a constraint.

    Returns:
        The finalist study, and whether this call created it.

    Raises:
        SearchError: the search has not ended, it has no COMPLETE trial, or the set has another `top` or `seeds`.
    """
    check_count("--top", top)
    check_count("--seeds", seeds, maximum=MAX_SEEDS)
    with name_lock(study.engine, study.spec.name):
        chosen = None if new_set else find_newest_set(study)
        if chosen is not None:
            _check_same_settings(study, chosen, top=top, seeds=seeds)
            return chosen, False
        _check_search_ended(study)
        default = None if study.spec.is_multi_objective else FINALIST_COUNT
        best = select_finalists(study, top or default or sys.maxsize, infeasible=infeasible)
        if not best:
            raise SearchError(f"study {study.spec.name!r} has {_describe_no_finalist(study)}")
        of = FinalistsOf(
            study=study.spec.name,
            study_id=study.study_id,
            top=top or default or len(best),
            trials=[trial.number for trial in best],
            seeds=derive_new_seeds(study, seeds or FINALIST_SEEDS),
            divisions=True,
        )
        return create_finalist_study(study, of, {trial.number: trial for trial in best}), True


def _describe_no_finalist(study: StoredStudy) -> str:
    if any(not is_feasible(trial) for trial in study.trials(TrialState.COMPLETE)):
        again = format_command("finalists", study.spec.name, "--infeasible")
        return f"no complete trial within its constraints; retrain infeasible trials with {again}"
    return "no complete trial; extend the study, or start a new one"


def select_finalists(
    study: StoredStudy, top: int, *, removed: bool = False, infeasible: bool = False
) -> list[FrozenTrial]:
    """Return the best COMPLETE trials with different configurations, best first.

    Among equal values, the trial with the lowest number comes first. Of trials with equal configurations, only the
    first is returned. In a multi-objective study, only trials of the Pareto front are returned.

    Args:
        study: the study.
        top: maximum number of trials.
        removed: whether to include trials whose model was deleted. These trials cannot be tested or promoted.
        infeasible: whether to include trials that violate a constraint.
    """
    spec = study.spec
    found = [
        trial
        for trial in study.best_trials(infeasible=infeasible)
        if math.isfinite(get_first_value(trial) or 0.0) and (removed or REMOVED_BY not in trial.user_attrs)
    ]
    if spec.is_multi_objective:
        members = {found[i].number for i in find_front(to_losses([t.values for t in found], spec.maximize_each))}
        found = [trial for trial in rank_trials(found, spec.maximize_each, infeasible=True) if trial.number in members]
    chosen: list[FrozenTrial] = []
    for trial in found:
        if len(chosen) < top and all(_get_training(trial) != _get_training(other) for other in chosen):
            chosen.append(trial)
    return chosen


def _get_training(trial: FrozenTrial) -> tuple[object, object]:
    return trial.params, _get_schedule(trial)


def list_excluded_trials(study: StoredStudy, top: int) -> list[int]:
    """Return the numbers of the trials that would be among the best `top` if their models had not been deleted."""
    return [t.number for t in select_finalists(study, top, removed=True) if REMOVED_BY in t.user_attrs]


def derive_new_seeds(study: StoredStudy, count: int, purpose: str = "finalists") -> list[int]:
    """Return `count` seeds, derived from the study's seed and `purpose`, that no trial, finalist or refit has used."""
    taken = {derive_seed(study.spec.seed, "trial", trial.number) for trial in study.trials()}
    for names in (read_finalist_studies, read_refit_studies):
        for name in names(study.engine, study.study_id):
            taken.update(load_companion(study, name).finalists_of.seeds)
    new: list[int] = []
    indices = itertools.count()
    while len(new) < count:
        seed = derive_seed(study.spec.seed, purpose, next(indices))
        if seed not in taken and seed not in new:
            new.append(seed)
    return new


def _check_same_settings(study: StoredStudy, chosen: StoredStudy, *, top: int | None, seeds: int | None) -> None:
    of = chosen.finalists_of
    pairs = (("--top", of.top, top), ("--seeds", len(of.seeds), seeds))
    differ = [f"{flag} {before}, not {now}" for flag, before, now in pairs if now is not None and now != before]
    if differ:
        raise SearchError(
            f"the finalists of {study.spec.name!r} were chosen with {'; '.join(differ)}; remove these options to "
            "continue with these finalists, or choose new finalists with --new-set"
        )


def _check_search_ended(study: StoredStudy) -> None:
    """Reject a search that has not ended, because the search may still find better trials."""
    finished, name = summarise(study).finished, study.spec.name
    if study.is_spent(finished):
        return
    ended = study.stopped is not None or study.is_timed_out
    if ended and (running := count_running(study)):
        wait = format_command("stop", name, "--wait")
        raise SearchError(f"study {name!r} has {pluralize(running, 'running trial')}; to wait for its end, run {wait}")
    if not ended:
        raise SearchError(
            f"study {name!r} has not ended ({study.format_progress(finished)} done); wait until it ends, or stop it "
            f"with {format_command('stop', name)}"
        )


def make_or_join_refit(study: StoredStudy, *, seeds: int | None, trial: int | None = None) -> tuple[StoredStudy, bool]:
    """Create the refit study of a search's winner with all its trials, or join the existing refit study.

    Args:
        study: the search.
        seeds: odd number of runs. None uses the number of the existing refit, or `REFIT_SEEDS` for a new refit.
        trial: number of the expected winner; None accepts any winner.

    Returns:
        The refit study, and whether this call created it.

    Raises:
        SearchError: `seeds` is even or differs from the existing refit's, the finalists have no result, or another
            trial won.
    """
    check_count("--refit-seeds", seeds, maximum=MAX_SEEDS)
    if seeds is not None and seeds % 2 == 0:
        raise SearchError(f"--refit-seeds {seeds} is even; give an odd number, so that one run has the median loss")
    with name_lock(study.engine, study.spec.name):
        chosen, winner = find_refit_winner(study, trial)
        epochs = choose_refit_epochs(study, chosen, winner)
        made = find_refit(study, winner, epochs)
        if made is None:
            of = FinalistsOf(
                study=study.spec.name,
                study_id=study.study_id,
                top=1,
                trials=[winner],
                seeds=derive_new_seeds(study, seeds or REFIT_SEEDS, "refit"),
                refit=epochs,
            )
            return create_finalist_study(study, of, {winner: find_trial(study, winner)}), True
    of = made.finalists_of
    if seeds not in {None, len(of.seeds)}:
        raise SearchError(
            f"--refit-seeds {seeds} differs from the {len(of.seeds)} of the existing refit; remove --refit-seeds"
        )
    return made, False
