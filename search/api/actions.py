"""Implementations of the `Study` methods that consist of several steps."""

from __future__ import annotations

import inspect
import math
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.exceptions import MlflowException

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.loading import BUILTIN
from hpsearch.search.api.opening import publish_change, sync_mlflow_promotions
from hpsearch.search.console import format_command
from hpsearch.search.errors import SearchError
from hpsearch.search.promotion.evaluate_test import Candidate, choose_candidate, evaluate_on_test_set
from hpsearch.search.promotion.promote import refresh_evidence
from hpsearch.search.report import write_report
from hpsearch.search.report.trials import find_waiting_reasons
from hpsearch.search.services import Services
from hpsearch.search.study.ranking import get_first_value
from hpsearch.search.study.study import StoredStudy, find_tracking_uri, get_report_path, open_study_tracking
from hpsearch.search.study.summary import list_violations, summarise
from hpsearch.search.tracking.study_run import close_study, log_report
from hpsearch.storage.attributes import INFEASIBLE, REASON, WORKER
from hpsearch.storage.mlflow.client import RunDeletedError, Tracking
from hpsearch.storage.mlflow.health import describe_error
from hpsearch.storage.records.test_evaluations import AlreadyEvaluatedError
from hpsearch.storage.trials.history import read_epoch_values


def make_trials_dataframe(study: StoredStudy) -> pd.DataFrame:
    """Return a DataFrame with one row per trial: parameters, value, and the reason why the trial ended or waits.

    In a multi-objective study, the column `value` has the first metric, and each metric has its own column, such as
    ``values_accuracy``. In a study with constraints, the column `out_of_bounds` lists the violated constraints.
    """
    trials, waiting, spec = study.trials(), find_waiting_reasons(study), study.spec
    names = list(spec.direction_by_metric) if spec.is_multi_objective else []
    params = sorted({name for trial in trials for name in trial.params})
    columns: dict[str, list[Any]] = {
        "number": [trial.number for trial in trials],
        "state": ["INFEASIBLE" if trial.user_attrs.get(INFEASIBLE) else trial.state.name for trial in trials],
        "value": [get_first_value(trial) for trial in trials],
    }
    for place, name in enumerate(names):
        columns[f"values_{name}"] = [trial.values[place] if trial.values else math.nan for trial in trials]
    for name in params:
        columns[f"params_{name}"] = [trial.params.get(name, math.nan) for trial in trials]
    columns["epochs"] = [len(trial.intermediate_values) for trial in trials]
    columns["duration"] = [trial.duration for trial in trials]
    columns["worker"] = [trial.user_attrs.get(WORKER, "") for trial in trials]
    columns["reason"] = [waiting.get(trial.number) or trial.user_attrs.get(REASON, "") for trial in trials]
    if spec.constraints:
        columns["out_of_bounds"] = ["; ".join(list_violations(spec, trial)) for trial in trials]
    return pd.DataFrame(columns)


def make_epochs_dataframe(study: StoredStudy) -> pd.DataFrame:
    """Return a DataFrame with one row per trial and reported epoch: number, epoch (from 1), and a value per metric."""
    spec = study.spec
    names = list(spec.direction_by_metric) if spec.is_multi_objective else [spec.metric]
    others = read_epoch_values(study.engine, study.study_id) if spec.is_multi_objective else {}
    rows = [
        (trial.number, step + 1, value, *others.get(trial._trial_id, {}).get(step, [])[1:])
        for trial in study.trials()
        for step, value in sorted(trial.intermediate_values.items())
    ]
    return pd.DataFrame(rows, columns=["number", "epoch", *(f"val_{name}" for name in names)])


def find_objective_reference(objective: str | type[BaseObjective]) -> str:
    """Return the reference by which workers load an objective.

    Args:
        objective: a reference, which the function returns unchanged, or a class in a file or an installed module.

    Raises:
        SearchError: `objective` is neither a reference nor a class, or the class is defined in a notebook or in the
            running script.
    """
    if isinstance(objective, str):
        return objective
    if not isinstance(objective, type):
        raise SearchError(f"objective={objective!r} is invalid; give a name such as 'digits' or 'wine.py', or a class")
    name, module = objective.__name__, objective.__module__
    if module == "__main__" or getattr(sys.modules.get(module), name, None) is not objective:
        file = f"{name.lower()}.py"
        raise SearchError(
            f"class {name} is defined in {module}, from which workers cannot import it; write it to a file (in a "
            f"notebook with %%writefile {file}) and pass {file!r}"
        )
    reference = f"{module}:{name}"
    if "." in module:
        return {known: short for short, known in BUILTIN.items()}.get(reference, reference)
    return f"{inspect.getsourcefile(objective)}:{name}"  # with the path, workers may start in any folder


def write_study_report(services: Services, study: StoredStudy, output: Path | None) -> Path:
    """Write a study's HTML report and return the path of the report.

    Args:
        services: services of the study.
        study: a search.
        output: path of the report; None selects the study's file in the home folder.

    Raises:
        SearchError: the study is a finalist or refit study, or the file cannot be written.
    """
    study.require_search("see the report of {study!r}")
    sync_mlflow_promotions(services, study.storage, study)
    path = output or get_report_path(services, study)
    try:
        return write_report(study, path, dashboard_url=services.dashboard_url)
    except OSError as error:
        raise SearchError(f"--output {path}: cannot be written ({error.strerror}); choose another file") from None


def log_study_report(services: Services, study: StoredStudy, report: Path) -> None:
    """Log a report and the study's results to its MLflow run; do nothing if the study has no tracking server.

    Raises:
        SearchError: MLflow rejected a request.
        StorageError: MLflow does not answer.
    """
    if find_tracking_uri(services, study) is None:
        return
    tracking = open_study_tracking(services, study)
    try:
        close_study(study, summarise(study), tracking)
        log_report(study, report, tracking)
    except (MlflowException, RunDeletedError) as error:
        raise SearchError(f"the report was written, but MLflow was not updated ({describe_error(error)})") from None


def choose_test_candidate(
    study: StoredStudy, *, trial: int | None, unconfirmed: bool, refit: bool = False
) -> Candidate:
    """Return the model to evaluate on the test set.

    Raises:
        SearchError: the test set was already evaluated, the finalists have no winner, or the trial is not eligible.
    """
    study.require_search("evaluate the test set of {study!r}")
    try:
        return choose_candidate(study, trial=trial, unconfirmed=unconfirmed, refit=refit)
    except AlreadyEvaluatedError as error:
        raise _as_search_error(study, error) from None


def evaluate_test_set(
    services: Services, study: StoredStudy, *, trial: int | None, unconfirmed: bool, refit: bool = False
) -> dict[str, float]:
    """Evaluate the winner's best weights on the test set, once per study, and return the score of each metric.

    Raises:
        SearchError: `choose` rejects the trial, or the weights are unavailable.
        StorageError: MLflow does not answer.
    """
    candidate = choose_test_candidate(study, trial=trial, unconfirmed=unconfirmed, refit=refit)
    try:
        evaluation = evaluate_on_test_set(study, candidate, open_study_tracking(services, study))
    except AlreadyEvaluatedError as error:
        raise _as_search_error(study, error) from None

    def update(tracking: Tracking) -> None:
        close_study(study, summarise(study), tracking)
        refresh_evidence(study, tracking)

    publish_change(services, study, update)
    return evaluation.scores or {}


def _as_search_error(study: StoredStudy, error: AlreadyEvaluatedError) -> SearchError:
    name = study.spec.name
    return SearchError(f"study {name!r}: {error}; see the scores with {format_command('show', name)}")
