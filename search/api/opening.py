"""Open the services that a `Study` uses, and list the stored studies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import optuna

from hpsearch.search.console import PlainConsole, format_command, show_slow_steps
from hpsearch.search.errors import SearchError
from hpsearch.search.promotion.evidence_update import refresh_evidence
from hpsearch.search.promotion.registry_watch import sync_promotions
from hpsearch.search.report import update_report
from hpsearch.search.services import Services, find_services, resolve_addresses
from hpsearch.search.spec.spec import parse_stored_spec
from hpsearch.search.study.study import StoredStudy, load_parent_study, load_study
from hpsearch.search.study.study_tracking import find_tracking_uri, open_study_tracking
from hpsearch.search.tracking.study_run import log_report
from hpsearch.storage.attributes import RUN_ID, SPEC, STOPPED, DamagedValue
from hpsearch.storage.errors import StorageError, check_encodable
from hpsearch.storage.home import resolve_home
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.credentials import CredentialsWithheldError
from hpsearch.storage.mlflow.health import check_server, describe_error
from hpsearch.storage.records.promotions import read_promotions
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from hpsearch.storage.trials.history import read_progress
from hpsearch.storage.urls import Addresses


def publish_change(services: Services, study: StoredStudy, update: Callable[[Tracking], object]) -> None:
    """Update MLflow and the report after a change of a study; print a warning for each part that failed.

    Args:
        services: services of the study.
        study: the study.
        update: function that is called with a client of the study's tracking server, if the study has an MLflow run.
    """
    try:
        _publish(services, study, update)
    except KeyboardInterrupt:
        again = format_command("report", study.spec.name)
        print_warning(f"the study has changed; MLflow and the report may lack the change, update them with: {again}")
        raise


def _publish(services: Services, study: StoredStudy, update: Callable[[Tracking], object]) -> None:
    tracking: Tracking | None = None
    try:
        if RUN_ID in study.attrs and find_tracking_uri(services, study) is not None:
            client = open_study_tracking(services, study)
            update(client)
            tracking = client
    except Exception as error:  # an unavailable server must not hide that the study has already changed
        print_warning(f"MLflow was not updated ({describe_error(error)}); the study's workers update it later")
    try:
        search = study if study.spec.finalists_of is None else load_parent_study(study)
        report = update_report(services, search)
        if tracking is not None:
            log_report(search, report, tracking)
    except Exception as error:  # likewise
        again = format_command("report", study.spec.name)
        print_warning(f"the report was not updated ({describe_error(error)}); write it with: {again}")


def print_warning(message: str) -> None:
    """Print a warning on stderr."""
    PlainConsole(stderr=True).print(f"warning: {message}")


def sync_mlflow_promotions(services: Services, storage: PostgresStorage, study: StoredStudy | None = None) -> None:
    """Record the promotions that users made in the MLflow UI; do nothing if MLflow does not answer.

    Args:
        services: services of the study.
        storage: storage of the studies.
        study: study whose evidence in MLflow is refreshed too; None refreshes no evidence.
    """
    uri = services.tracking_uri if study is None else find_tracking_uri(services, study)
    if uri is None:
        return
    try:
        check_server(uri)
        tracking = services.open_tracking(uri)
        sync_promotions(storage, tracking)
        if study is not None:
            refresh_evidence(study, tracking)
    except CredentialsWithheldError as error:
        print_warning(str(error))
    except StorageError as error:
        logging.getLogger(__name__).debug("promotions not synchronized: %s", error)


@dataclass(frozen=True)
class StudyRow:
    """Row of the list of studies.

    Attributes:
        name: name of the study. If another program created the study, the other fields have their default values.
        objective, metric: names of the objective and of the (first) metric.
        finished_trials: number of finished trials.
        budget: maximum number of trials.
        used_budget: the used part of each budget, as text.
        complete_trials, pruned_trials, infeasible_trials, failed_trials: numbers of trials by state.
        running_trials: number of running trials.
        best_value, best_number: value and number of the best trial by the first metric; None if no trial is COMPLETE.
        front: number of trials on the Pareto front; 0 in a single-objective study.
        promotions: current promotions, such as ``digits@champion (trial 7)``.
        is_stopped: whether a user stopped the study.
        is_stopped_early: whether the study terminated early.
        is_finalist_study: whether the study retrains the finalists of another study.
        is_refit_study: whether the study refits the winner of another study.
        is_from_hpsearch: whether hpsearch created the study.
        is_damaged: whether an attribute of the study in the database is damaged; then only the name is known.
    """

    name: str
    objective: str = ""
    metric: str = ""
    finished_trials: int = 0
    budget: int = 0
    used_budget: str = ""
    complete_trials: int = 0
    pruned_trials: int = 0
    infeasible_trials: int = 0
    failed_trials: int = 0
    running_trials: int = 0
    best_value: float | None = None
    best_number: int | None = None
    front: int = 0
    promotions: tuple[str, ...] = ()
    is_stopped: bool = False
    is_stopped_early: bool = False
    is_finalist_study: bool = False
    is_refit_study: bool = False
    is_from_hpsearch: bool = True
    is_damaged: bool = False


def open_services(where: Addresses, progress: Callable[[str], None] | None = None) -> tuple[Services, PostgresStorage]:
    """Return the services at the given addresses, and the storage of the studies.

    Args:
        where: the given addresses.
        progress: called with each step of starting the services. None prints steps of more than two seconds on stderr.

    Raises:
        SearchError: there is a tracking URI without a database URL.
        StorageError: a service cannot be used.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with show_slow_steps() as show_step:
        services = find_services(resolve_addresses(where), progress=progress or show_step)
    return services, open_storage(services.storage_url, application_name="hpsearch read")


def open_study(
    name: str, where: Addresses, progress: Callable[[str], None] | None = None
) -> tuple[StoredStudy, Services]:
    """Return a stored study and the services at the given addresses.

    Raises:
        SearchError: the study does not exist, or another program created it.
        StorageError: a service cannot be used.
    """
    if not isinstance(name, str) or "\0" in name:
        raise SearchError(f"{name!r} is not the name of a study; give a text, such as 'digits'")
    check_encodable(name, "study")
    if _is_new_home(where):  # the services would be installed only to find no study
        raise SearchError(f"no study {name!r}; the database has no studies yet")
    services, storage = open_services(where, progress)
    return load_study(storage, name), services


def _is_new_home(where: Addresses) -> bool:
    """Return whether the embedded services are meant, and their home folder does not exist yet."""
    found = resolve_addresses(where)
    if found.get("storage_url") or found.get("tracking_uri"):
        return False
    try:
        return not resolve_home(found.get("home")).exists()
    except (OSError, ValueError):  # the start of the services describes the error
        return False


def list_studies(where: Addresses) -> list[StudyRow]:
    """Record the promotions made in the MLflow UI; then return one row per study, sorted by name.

    Raises:
        StorageError: a service cannot be used.
    """
    services, storage = open_services(where)
    sync_mlflow_promotions(services, storage)
    return [_make_row(storage, frozen) for frozen in sorted(storage.get_all_studies(), key=lambda s: s.study_name)]


def _make_row(storage: PostgresStorage, frozen: optuna.study._frozen.FrozenStudy) -> StudyRow:
    values = frozen.user_attrs.values()
    if any(isinstance(value, DamagedValue) for value in values) or not isinstance(
        frozen.user_attrs.get(SPEC, {}), Mapping
    ):
        return StudyRow(frozen.study_name, is_from_hpsearch=False, is_damaged=True)
    try:
        spec, engine = parse_stored_spec(frozen.user_attrs[SPEC]), storage.engine
    except (KeyError, SearchError):  # created by another program, or by another version with other settings
        return StudyRow(frozen.study_name, is_from_hpsearch=False)
    at = read_progress(engine, frozen._study_id, spec.direction)
    current = [promotion for promotion in read_promotions(engine, frozen._study_id) if promotion.ended_at is None]
    return StudyRow(
        name=frozen.study_name,
        objective=spec.objective,
        metric=spec.metric,
        finished_trials=at.finished,
        budget=spec.n_trials,
        used_budget=at.summary,
        complete_trials=at.complete,
        pruned_trials=at.pruned,
        infeasible_trials=at.infeasible,
        failed_trials=at.fail,
        running_trials=len(at.running),
        best_value=at.best_value,
        best_number=at.best_number,
        front=len(StoredStudy(spec, storage, frozen._study_id).front()) if spec.is_multi_objective else 0,
        promotions=tuple(f"{p.model_name}@{p.alias} (trial {p.trial_number})" for p in current),
        is_stopped=bool(frozen.user_attrs.get(STOPPED)),
        is_stopped_early=at.stopped_after is not None,
        is_finalist_study=spec.finalists_of is not None and spec.refit is None,
        is_refit_study=spec.refit is not None,
    )
