"""Implementations of the `Study` methods that consist of several steps."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from mlflow.exceptions import MlflowException

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.references import BUILTIN
from hpsearch.search.api.opening import sync_mlflow_promotions
from hpsearch.search.errors import SearchError
from hpsearch.search.report import write_report
from hpsearch.search.services import Services
from hpsearch.search.study.folders import get_report_path
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.study_tracking import find_tracking_uri, open_study_tracking
from hpsearch.search.study.summary import summarise
from hpsearch.search.tracking.study_run import close_study, log_report
from hpsearch.storage.mlflow.client import RunDeletedError
from hpsearch.storage.mlflow.health import describe_error


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
    if not (isinstance(objective, type) and issubclass(objective, BaseObjective)):
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
