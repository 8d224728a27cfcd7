"""Create a study or join an existing one with the same spec."""

from __future__ import annotations

import functools
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np
import optuna
import sqlalchemy as sa
import torch
from optuna.distributions import BaseDistribution
from optuna.samplers import RandomSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from hpsearch.kill_points import kill_point
from hpsearch.objectives.errors import MetricError, wrap_user_errors
from hpsearch.objectives.loading import load_objective, objective_reference, source_hash
from hpsearch.objectives.model_metrics import MODEL_METRICS
from hpsearch.objectives.objective import BaseObjective, Objective, overrides
from hpsearch.objectives.training.config import RunPlan
from hpsearch.search.console import format_command, show_steps
from hpsearch.search.errors import SearchError, as_search_error
from hpsearch.search.freeze_thaw.warm_start import WARM_START_KEY, WarmStartData
from hpsearch.search.samplers.suggest import derive_seed, make_sampler
from hpsearch.search.services import Services, find_services
from hpsearch.search.spec.settings import resolve, resolve_metric_settings
from hpsearch.search.spec.spec import StudySpec, parse_parent_name
from hpsearch.search.study.checkpoints import note_checkpoints
from hpsearch.search.study.enqueue import Configurations, check_budget, default_params, make_waiting_trial, read_rows
from hpsearch.search.study.enqueue import enqueue as enqueue_missing
from hpsearch.search.study.study import StoredStudy, find_study, load_study, set_metrics
from hpsearch.storage.attributes import FOLDER, SOURCE_SHA256, SPEC, STARTED_AT, TRACKING_URI, VERSION
from hpsearch.storage.checkpoints.store import CheckpointStore
from hpsearch.storage.database.locks import LockLostError, check_lock_held, name_lock
from hpsearch.storage.database.retry import retrying
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from hpsearch.storage.study_storage.studies import set_attrs_in
from hpsearch.storage.trials.budget import create_spending
from hpsearch.storage.trials.claims import count_running_trials
from hpsearch.storage.urls import Addresses

DRAWS = 50  # configurations by which a search space is known before there are trials: enough to see its branches


def make_warm_start_attrs(storage: PostgresStorage, spec: StudySpec, objective: BaseObjective) -> dict[str, Any]:
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
    with as_search_error("--warm-start "):
        told = WarmStartData.from_studies(
            found,
            distributions=distributions,
            sampled=drawn,
            direction=StudyDirection[spec.direction.upper()],
            epochs=spec.epochs,
            random=np.random.default_rng(spec.seed),
        )
    return {WARM_START_KEY: told.to_json()}


def search_space(objective: BaseObjective) -> tuple[dict[str, BaseDistribution], list[dict[str, Any]]]:
    """Return the distributions of an objective's parameters, and the configurations at random that showed them."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    scratch = optuna.create_study(sampler=RandomSampler(0))
    distributions: dict[str, BaseDistribution] = {}
    drawn = []
    for _ in range(DRAWS):
        trial = scratch.ask()
        with wrap_user_errors(f"{type(objective).__name__}.suggest"):
            objective.configure(trial)
        distributions |= trial.distributions
        drawn.append(trial.params)
    return distributions, drawn


def _earlier(storage: PostgresStorage, spec: StudySpec, name: str) -> StoredStudy:
    with as_search_error(f"--warm-start {name}: ", SearchError):
        study = load_study(storage, name)
        study.require_search("name {study} instead")
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


def create_or_join(
    storage: PostgresStorage,
    settings: dict[str, Any],
    objective: BaseObjective,
    *,
    sanity_check: Callable[[BaseObjective, StudySpec], None],
    check: Callable[[StudySpec], None] = lambda _: None,
    enqueued: Sequence[FrozenTrial] = (),
) -> tuple[StoredStudy, bool]:
    """Create the study, or join it when its stored spec agrees with every one of `settings`.

    Args:
        storage: where studies are kept.
        settings: that were given; the stored spec has the others, or the objective where the study is new.
        objective: that is searched.
        sanity_check: called before a study is created; raises where the objective cannot be searched.
        check: called before a study is created or joined; raises where its spec cannot be run on this machine.
        enqueued: trials that are in a new study from its beginning; a study that is joined gets each once.

    Returns:
        The study, and whether it was created now.

    Raises:
        SearchError: a setting is wrong, or the stored spec has it otherwise.
    """
    name, made = str(settings.get("name", objective.name)), list[int]()

    @functools.cache  # once, however often a connection is cut
    def new_spec() -> StudySpec:
        if (searched := parse_parent_name(name)) is not None:
            raise SearchError(
                f"--name {name!r} is kept for the finalists of {searched!r}: train them with "
                f"{format_command('finalists', searched)}, or choose another --name"
            )
        spec = _fitted(resolve(settings, objective), settings, objective)
        if spec.budget_epochs is not None and spec.budget_epochs < spec.epochs:
            raise SearchError(
                f"--budget-epochs {spec.budget_epochs} is less than one full trial of {spec.epochs} epochs: none would "
                "run to its end; raise it, or lower --epochs"
            )
        check(spec)
        sanity_check(objective, spec)
        return spec

    def once() -> tuple[StoredStudy, bool]:
        with name_lock(storage.engine, name) as lock:
            if find_study(storage, name) is None:
                study = _created(storage, new_spec(), objective, enqueued, lock)
                made.append(study.study_id)
                name_metric(storage, study.spec)
                return study, True
            study = load_study(storage, name)
            study.require_search("run them with {resume_command}, or choose another --name")
            resolve(settings, objective, study.spec)
            check(study.spec)
        if enqueued:
            enqueue_missing(study, enqueued)
        return study, bool(made)

    return retrying(also=LockLostError)(once)


def _fitted(spec: StudySpec, settings: dict[str, Any], objective: BaseObjective) -> StudySpec:
    """Return the spec of a new study with the sampler fitted to the objective's search space."""
    with as_search_error():
        sampler = spec.sampler.for_objective(objective)
        n_trials = settings.get("n_trials", sampler.max_trials() or spec.n_trials)
        sampler.for_trials(n_trials)
    return spec.model_copy(update={"sampler": sampler, "n_trials": n_trials})


def _created(
    storage: PostgresStorage,
    spec: StudySpec,
    objective: BaseObjective,
    enqueued: Sequence[FrozenTrial],
    lock: sa.Connection,
) -> StoredStudy:
    """Create the study with its attributes and first trials, in one transaction."""
    earlier, trials = make_warm_start_attrs(storage, spec, objective), _first_trials(spec, objective, enqueued)
    folder = f"{spec.name}-{secrets.token_hex(8)}"
    release = version("hpsearch")
    attrs = {SOURCE_SHA256: source_hash(objective), FOLDER: folder, VERSION: release, SPEC: spec.model_dump()}

    def fill(connection: sa.Connection, study_id: int) -> None:
        if spec.has_epoch_or_time_budget:
            create_spending(connection, study_id, epochs=spec.budget_epochs, seconds=spec.budget_seconds)
        set_attrs_in(connection, study_id, earlier, kind="system")

    check_lock_held(lock)
    directions = study_directions(spec)
    study_id = storage.create_filled_study(directions, spec.name, user_attrs=attrs, trials=trials, also=fill)
    return StoredStudy(spec, storage, study_id)


def _first_trials(spec: StudySpec, objective: BaseObjective, enqueued: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the trials that a new study is made with: the objective's default, then what somebody enqueued.

    A grid lists what is run, and has no default.
    """
    if enqueued:
        check_budget(spec, len(enqueued))
    default = default_params(objective) if spec.default_first and not spec.sampler.is_indexed_by_trial else None
    if default is None:
        return list(enqueued)
    others = [trial for trial in enqueued if trial.system_attrs["fixed_params"] != default]
    check_budget(spec, 1 + len(others))
    return [make_waiting_trial(default, "default"), *others]


def name_metric(storage: PostgresStorage, spec: StudySpec) -> None:
    """Tell the dashboard what the values of a study are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.load_study(study_name=spec.name, storage=storage).set_metric_names(list(spec.direction_by_metric))


def study_directions(spec: StudySpec) -> list[optuna.study.StudyDirection]:
    """Return Optuna's directions of the metrics that a study optimises."""
    return [optuna.study.StudyDirection[way.upper()] for way in spec.direction_by_metric.values()]


def begin_search(
    settings: dict[str, Any],
    where: Addresses,
    console: Console,
    enqueue: Configurations | None = None,
    *,
    tracking_required: bool = False,
    check: Callable[[StudySpec], None] = lambda _: None,
) -> tuple[Services, StoredStudy, bool]:
    """Create or join the study that `settings` describe and make it ready for workers.

    Args:
        settings: settings that were given, checked.
        where: addresses of its services.
        console: receives each step.
        enqueue: configurations that run before others.
        tracking_required: whether the tracking server has to answer now.
        check: called before a study is created or joined; raises if this machine cannot run the spec.

    Returns:
        The services, the study, and whether it is new.

    Raises:
        SearchError: a setting is wrong or differs from the stored spec.
        ObjectiveError: the objective cannot be searched.
        StorageError: a service cannot be used.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    checkpoint_url = where.get("checkpoint_url")
    if checkpoint_url is not None:
        CheckpointStore(checkpoint_url).check()
    with show_steps(console) as tell:
        tell("loading the objective")
        settings, objective = load_for_search(settings)
        enqueued = read_rows(enqueue, objective) if enqueue else []
        services = find_services(where, both=True, tracking_required=tracking_required, progress=tell)
        tell("opening the study")
        storage = open_storage(services.storage_url, application_name="hpsearch run")
        study, created = create_or_join(
            storage, settings, objective, check=check, sanity_check=sanity_check, enqueued=enqueued
        )
        study.set_attr(TRACKING_URI, services.open_tracking().uri)
        start_clock(study)
        if checkpoint_url is not None:
            note_checkpoints(study, checkpoint_url)
    return services, study, created


def start_clock(study: StoredStudy) -> None:
    """Let the study's timeout begin, unless it has and trials are running."""
    if STARTED_AT not in study.attrs or not count_running_trials(study.engine, study.study_id):
        study.set_attr(STARTED_AT, time.time())


def load_for_search(settings: dict[str, Any]) -> tuple[dict[str, Any], BaseObjective]:
    """Load the objective that `settings` name; return the settings with its storable reference, and the objective.

    Raises:
        ObjectiveError: there is no such objective, or it cannot be imported.
    """
    reference = str(settings["objective"])
    objective = load_objective(reference)
    settings = {**settings, "objective": objective_reference(reference)}
    spec = StudySpec.model_construct(
        **resolve_metric_settings(settings, objective)
    )  # the rest may be that of a stored study
    with _metric_named(objective, spec):
        set_metrics(objective, spec)
    _check_ways(objective, spec)
    return settings, objective


def _check_ways(objective: BaseObjective, spec: StudySpec) -> None:
    """Refuse to maximise what is better when it is lower, or the other way round, where that is known."""
    from hpsearch.objectives.training.evaluation.metrics import DIRECTIONS

    known: dict[str, str] = {name: measured.direction for name, measured in MODEL_METRICS.items()}
    if isinstance(objective, Objective) and not overrides(objective, "metrics"):
        known |= DIRECTIONS
    for name, way in spec.direction_by_metric.items():
        if known.get(name, way) != way:
            raise SearchError(f"--directions {name}={way}: it is better the other way round: use {name}={known[name]}")


@contextmanager
def _metric_named(objective: BaseObjective, spec: StudySpec) -> Iterator[None]:
    """Name the setting that a wrong metric came from, unless it is the objective's own."""
    try:
        yield
    except MetricError as error:
        wrong = error.metric
        if wrong == spec.metric == type(objective).metric:
            raise
        own = "--directions" if spec.is_multi_objective else "--metric"
        setting = own if wrong in spec.direction_by_metric else "--constraints"
        raise SearchError(f"{setting} {wrong!r} {error.reason}") from None


@kill_point("rehearse")
def sanity_check(objective: BaseObjective, spec: StudySpec) -> None:
    """Run every part of the objective's code once, on values that the sampler might suggest.

    A typo is found here, before there is a study, rather than by a night's trials.

    Raises:
        ObjectiveError: with the file and line of the mistake.
    """
    from hpsearch.objectives.training.loop.build import build

    config, seed = suggested(objective, spec), derive_seed(spec.seed, "trial", 0)
    if not isinstance(objective, Objective):
        return  # an own loop is not known before it runs
    with _metric_named(objective, spec):
        build(objective, config, RunPlan(spec.epochs, seed, spec.seed), device=torch.device("cpu"))


def suggested(objective: BaseObjective, spec: StudySpec) -> Any:
    """Return a configuration that the sampler might suggest.

    Raises:
        ObjectiveError: with the file and line of a mistake in the objective's `suggest`.
    """
    scratch = optuna.create_study(
        sampler=make_sampler(spec.sampler, study_seed=spec.seed, trial_number=0, epochs=spec.epochs)
    )
    with wrap_user_errors(f"{type(objective).__name__}.suggest"):
        return objective.configure(scratch.ask())
