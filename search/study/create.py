"""Create a study or join an existing one with the same spec."""

from __future__ import annotations

import functools
import secrets
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import optuna
import sqlalchemy as sa
from optuna.distributions import BaseDistribution, check_distribution_compatibility
from optuna.samplers import RandomSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.errors import ObjectiveError, wrap_user_errors
from hpsearch.objectives.loading import load_objective, objective_reference, source_hash
from hpsearch.objectives.model_metric_names import MODEL_METRICS
from hpsearch.objectives.objective import Objective, overrides
from hpsearch.search.console import format_command, show_steps
from hpsearch.search.errors import SearchError, as_search_error
from hpsearch.search.freeze_thaw.warm_start import WARM_START_KEY, WarmStartData
from hpsearch.search.services import Services, find_services
from hpsearch.search.spec.resolve import resolve_metric_settings, resolve_spec
from hpsearch.search.spec.spec import StudySpec, parse_parent_name
from hpsearch.search.study.checkpoints import check_checkpoint_url, store_checkpoint_url
from hpsearch.search.study.enqueue import Configurations, check_budget, default_params, make_waiting_trial, read_rows
from hpsearch.search.study.enqueue import enqueue as enqueue_missing
from hpsearch.search.study.population import fit_population
from hpsearch.search.study.preflight import inspect_objective, name_setting_of_metric
from hpsearch.search.study.study import StoredStudy, find_study, load_study, set_metrics
from hpsearch.search.study.trust import read_code
from hpsearch.storage.attributes import (
    FOLDER_NAME,
    LEAKS,
    SOURCE_SHA256,
    SPEC,
    STARTED_AT,
    TRACKING_URI,
    VERSION,
)
from hpsearch.storage.checkpoints.store import CheckpointStore
from hpsearch.storage.database.connect import STARTUP_RETRY_SECONDS
from hpsearch.storage.database.locks import LockLostError, check_lock_held, name_lock
from hpsearch.storage.database.retry import limit_retries, retrying
from hpsearch.storage.errors import StorageError
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from hpsearch.storage.study_storage.studies import set_attrs_in
from hpsearch.storage.trials.budget import create_spending
from hpsearch.storage.trials.lost_attempts import count_running_trials
from hpsearch.storage.urls import Addresses

SAMPLE_SIZE = 50  # random configurations that show a search space with its branches
_FEW_SAMPLES = 5  # if the configurations of earlier trials are known


def make_warm_start_attrs(storage: PostgresStorage, spec: StudySpec, objective: BaseObjective) -> dict[str, Any]:
    """Return the warm start of a new study: system attributes with the trials of earlier studies, for the sampler.

    The attributes are a copy of the current trials, including the reports of running and waiting trials, so that later
    changes of the earlier studies do not affect suggestions.

    Raises:
        SearchError: an earlier study does not exist, has another direction, or has no trial in the search space.
        ObjectiveError: `suggest` failed.
    """
    if spec.warm_start is None:
        return {}
    found = {name: _list_warm_start_trials(_load_earlier_study(storage, spec, name)) for name in spec.warm_start}
    distributions, sampled = sample_search_space(objective)
    for name, trials in found.items():
        if not {key for trial in trials for key in trial.params} & distributions.keys():
            names = ", ".join(sorted(distributions))
            raise SearchError(
                f"--warm-start {name}: the study has none of the parameters of {objective.name} ({names}); "
                "give a study with the same parameters, or remove the option"
            )
    with as_search_error("--warm-start "):
        data = WarmStartData.from_studies(
            found,
            distributions=distributions,
            sampled=sampled,
            direction=StudyDirection[spec.direction.upper()],
            epochs=spec.epochs,
            random=np.random.default_rng(spec.seed),
        )
    return {WARM_START_KEY: data.to_json()}


def sample_search_space(
    objective: BaseObjective, count: int = SAMPLE_SIZE
) -> tuple[dict[str, BaseDistribution], list[dict[str, Any]]]:
    """Sample random configurations of an objective.

    Returns:
        The distributions of all parameters that occur in the configurations; and the configurations.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    scratch = optuna.create_study(sampler=RandomSampler(0))
    distributions: dict[str, BaseDistribution] = {}
    sampled = []
    for _ in range(count):
        trial = scratch.ask()
        with wrap_user_errors(f"{type(objective).__name__}.suggest"):
            objective.configure(trial)
        distributions |= trial.distributions
        sampled.append(trial.params)
    return distributions, sampled


def check_search_space(study: StoredStudy, objective: BaseObjective) -> None:
    """Check that the parameters of an objective have the same choices and types as in earlier trials of its study.

    New trials would fail one by one, and spend the budget.

    Raises:
        SearchError: they differ.
    """
    known: dict[str, BaseDistribution] = {}
    for trial in study.trials():
        known |= trial.distributions
    if not known:
        return
    with suppress(ObjectiveError):  # `suggest` may fail for some configurations only
        for name, distribution in sample_search_space(objective, _FEW_SAMPLES)[0].items():
            try:
                check_distribution_compatibility(known.get(name, distribution), distribution)
            except ValueError as error:
                raise SearchError(
                    f"the search space of parameter {name!r} differs from that of the trials of study "
                    f"{study.spec.name!r} ({error}); restore the earlier one, or choose another --name; do not make "
                    "choices from a Python set, whose order changes"
                ) from None


def _load_earlier_study(storage: PostgresStorage, spec: StudySpec, name: str) -> StoredStudy:
    with as_search_error(f"--warm-start {name}: ", SearchError):
        study = load_study(storage, name)
        study.require_search("give --warm-start {study} instead")
    if study.spec.direction != spec.direction:
        raise SearchError(
            f"--warm-start {name}: this study is set to {study.spec.direction} {study.spec.metric}, but the new study "
            f"to {spec.direction} {spec.metric}; give a study with the same direction, or remove the option"
        )
    return study


def _list_warm_start_trials(study: StoredStudy) -> list[FrozenTrial]:
    """Return the trials of an earlier study that have a report or have ended, except failed trials."""
    trials = study.trials(TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING, TrialState.WAITING)
    observed = [t for t in trials if t.params and (t.intermediate_values or t.state.is_finished())]
    if not observed:
        raise SearchError(f"--warm-start {study.spec.name}: no trial has reported a value; run the study first")
    return observed


def create_or_join(
    storage: PostgresStorage,
    settings: dict[str, Any],
    objective: BaseObjective,
    *,
    inspect: Callable[[BaseObjective, StudySpec], dict[str, Any]],
    check: Callable[[StudySpec], None] = lambda _: None,
    enqueued: Sequence[FrozenTrial] = (),
) -> tuple[StoredStudy, bool]:
    """Create a study, or join the stored study of the same name if its spec agrees with all `settings`.

    Args:
        storage: storage of the studies.
        settings: the given settings. Other settings come from the stored spec, or for a new study from the objective.
        objective: objective of the study.
        inspect: called before a study is created; returns attributes of the new study, and raises an error if the
            objective cannot be searched.
        check: called before a study is created or joined; raises an error if this machine cannot run the spec.
        enqueued: trials to add. A new study is created with all of them; an existing study gets those that it lacks.

    Returns:
        The study, and whether this call created it.

    Raises:
        SearchError: a setting is invalid, or differs from the stored spec; or the user has to confirm the settings of a
            restored study.
    """
    name, made = str(settings.get("name", objective.name)), list[int]()

    @functools.cache  # retries after lost connections must not repeat the checks
    def make_spec() -> tuple[StudySpec, dict[str, Any]]:
        if (searched := parse_parent_name(name)) is not None:
            raise SearchError(
                f"--name {name!r} is reserved for the finalists or the refit of {searched!r}, which "
                f"{format_command('finalists', searched)} and promote --refit create; choose another --name"
            )
        spec = _fit_sampler(resolve_spec(settings, objective), settings, objective)
        if spec.budget_epochs is not None and spec.budget_epochs < spec.epochs:
            raise SearchError(
                f"--budget-epochs {spec.budget_epochs} is less than one full trial of {spec.epochs} epochs; raise "
                "--budget-epochs, or lower --epochs"
            )
        check(spec)
        inspected = inspect(objective, spec)
        return fit_population(spec, objective), inspected

    def create_or_join_once() -> tuple[StoredStudy, bool]:
        with name_lock(storage.engine, name) as lock:
            if find_study(storage, name) is None:
                study = _create(storage, *make_spec(), objective, enqueued, lock)
                made.append(study.study_id)
                set_metric_names(storage, study.spec)
                return study, True
            study = load_study(storage, name)
            study.require_search("resume it with {resume_command}, or choose another --name")
            resolve_spec(settings, objective, study.spec)
            study.check_restored(objective)  # before the check, which creates the folder of TensorBoard
            check(study.spec)
        check_search_space(study, objective)
        if enqueued:
            enqueue_missing(study, enqueued)
        return study, bool(made)

    with limit_retries(STARTUP_RETRY_SECONDS):  # nothing restarts the database before the search
        return retrying(also=LockLostError)(create_or_join_once)


def _fit_sampler(spec: StudySpec, settings: dict[str, Any], objective: BaseObjective) -> StudySpec:
    """Return the spec of a new study with the sampler adapted to the objective's search space."""
    with as_search_error():
        sampler = spec.sampler.fit_to_objective(objective)
        n_trials = settings.get("n_trials", sampler.max_trials() or spec.n_trials)
        sampler.check_n_trials(n_trials)
    return spec.model_copy(update={"sampler": sampler, "n_trials": n_trials})


def _create(
    storage: PostgresStorage,
    spec: StudySpec,
    inspected: dict[str, Any],
    objective: BaseObjective,
    enqueued: Sequence[FrozenTrial],
    lock: sa.Connection,
) -> StoredStudy:
    """Create the study with its attributes and first trials, in one transaction."""
    warm_start, trials = make_warm_start_attrs(storage, spec, objective), _make_first_trials(spec, objective, enqueued)
    folder, release = f"{spec.name}-{secrets.token_hex(8)}", version("hpsearch")
    attrs: dict[str, Any] = {
        SOURCE_SHA256: source_hash(objective),
        FOLDER_NAME: folder,
        VERSION: release,
        SPEC: spec.model_dump(),
        LEAKS: {},
        **inspected,
    }

    def write_budget_and_warm_start(connection: sa.Connection, study_id: int) -> None:
        if spec.has_epoch_or_time_budget:
            create_spending(connection, study_id, epochs=spec.budget_epochs, seconds=spec.budget_seconds)
        set_attrs_in(connection, study_id, warm_start, kind="system")

    check_lock_held(lock)
    directions = get_study_directions(spec)
    study_id = storage.create_filled_study(
        directions, spec.name, user_attrs=attrs, trials=trials, also=write_budget_and_warm_start
    )
    return StoredStudy(spec, storage, study_id)


def _make_first_trials(spec: StudySpec, objective: BaseObjective, enqueued: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the first trials of a new study: the objective's default configuration, then the enqueued trials.

    The default configuration is not added for a sampler such as `grid`, which lists all its configurations.
    """
    if enqueued:
        check_budget(spec, len(enqueued))
    default = default_params(objective) if spec.default_first and not spec.sampler.is_indexed_by_trial else None
    if default is None:
        return list(enqueued)
    others = [trial for trial in enqueued if trial.system_attrs["fixed_params"] != default]
    check_budget(spec, 1 + len(others))
    return [make_waiting_trial(default, "default"), *others]


def set_metric_names(storage: PostgresStorage, spec: StudySpec) -> None:
    """Store the metric names of the study, which the Optuna dashboard shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.load_study(study_name=spec.name, storage=storage).set_metric_names(list(spec.direction_by_metric))


def get_study_directions(spec: StudySpec) -> list[optuna.study.StudyDirection]:
    """Return the directions of the metrics that a study optimizes, as Optuna's type."""
    return [optuna.study.StudyDirection[direction.upper()] for direction in spec.direction_by_metric.values()]


class BegunSearch(NamedTuple):
    """A study that is ready for workers, whether it is new, and its objective as this process has loaded it."""

    services: Services
    study: StoredStudy
    is_new: bool
    objective: BaseObjective


def begin_search(
    settings: dict[str, Any],
    where: Addresses,
    console: Console,
    enqueue: Configurations | None = None,
    *,
    tracking_required: bool = False,
    check: Callable[[StudySpec], None] = lambda _: None,
    inspect: Callable[[BaseObjective, StudySpec], dict[str, Any]] = inspect_objective,
) -> BegunSearch:
    """Create or join the study that `settings` describe, and prepare it for workers.

    Args:
        settings: the given settings, already checked by `check_settings`.
        where: addresses of the services.
        console: console for progress lines.
        enqueue: configurations to run before sampled configurations.
        tracking_required: whether the tracking server must be available.
        check: called before a study is created or joined; raises an error if this machine cannot run the spec.
        inspect: called before a study is created; see `create_or_join`.

    Raises:
        SearchError: a setting is invalid or differs from the stored spec.
        ObjectiveError: the objective cannot be searched.
        StorageError: a service is unavailable.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    checkpoint_url = where.get("checkpoint_url")
    if checkpoint_url is not None:
        CheckpointStore(checkpoint_url).check()
    with show_steps(console) as show:
        show("loading the objective")
        settings, objective = load_for_search(settings)
        is_empty = isinstance(enqueue, Sequence | Mapping) and not enqueue
        enqueued = [] if enqueue is None or is_empty else read_rows(enqueue, objective)
        services = find_services(where, both=True, tracking_required=tracking_required, progress=show)
        show("opening the study; a new one first checks the objective, and loads its data")
        storage = open_storage(services.storage_url, application_name="hpsearch run")
        study, created = create_or_join(storage, settings, objective, check=check, inspect=inspect, enqueued=enqueued)
        check_checkpoint_url(study, objective, services.home, checkpoint_url)  # the workers check it too
        study.set_attr(TRACKING_URI, services.open_tracking().uri)
        with suppress(StorageError):  # without the record, the code is accepted until it changes
            study.trust_code(read_code(study.spec.objective))  # the caller has named the objective
        start_timeout(study)
        if checkpoint_url is not None:
            store_checkpoint_url(study, checkpoint_url)
    return BegunSearch(services, study, created, objective)


def start_timeout(study: StoredStudy) -> None:
    """Start the study's timeout, unless the timeout has already started and trials are running."""
    if STARTED_AT not in study.attrs or not count_running_trials(study.engine, study.study_id):
        study.set_attr(STARTED_AT, time.time())


def load_for_search(settings: dict[str, Any]) -> tuple[dict[str, Any], BaseObjective]:
    """Load the objective that `settings` name.

    Returns:
        The settings, with a reference by which workers can load the objective; and the objective.

    Raises:
        ObjectiveError: the objective does not exist, or cannot be imported.
    """
    reference = objective_reference(str(settings["objective"]))
    objective = load_objective(reference)
    settings = {**settings, "objective": reference}
    # Other settings are missing, because they may come from a stored study.
    spec = StudySpec.model_construct(**resolve_metric_settings(settings, objective))
    with name_setting_of_metric(objective, spec):
        set_metrics(objective, spec)
    _check_directions(objective, spec)
    return settings, objective


def _check_directions(objective: BaseObjective, spec: StudySpec) -> None:
    """Reject a direction that contradicts the known direction of a metric, such as ``maximize`` for accuracy."""
    from hpsearch.objectives.training.evaluation.metrics import DIRECTIONS

    known: dict[str, str] = {name: measured.direction for name, measured in MODEL_METRICS.items()}
    if isinstance(objective, Objective) and not overrides(objective, "metrics"):
        known |= DIRECTIONS
    for name, direction in spec.direction_by_metric.items():
        if known.get(name, direction) != direction:
            raise SearchError(f"--directions {name}={direction} is the wrong direction; give {name}={known[name]}")
