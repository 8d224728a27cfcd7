"""A study's report: written here, and logged to its run in MLflow."""

from __future__ import annotations

from pathlib import Path

from mlflow.exceptions import MlflowException

from hpsearch.search.api.telling import notice_promotions
from hpsearch.search.errors import SearchError
from hpsearch.search.publish.study import close_study
from hpsearch.search.report import write_report
from hpsearch.search.services import Services
from hpsearch.search.study.folders import report_path
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import summarise
from hpsearch.search.study.tracking import known_tracking_uri, tracking_of
from hpsearch.storage.attributes import RUN_ID
from hpsearch.storage.mlflow.client import RunDeletedError
from hpsearch.storage.mlflow.health import one_line


def write(services: Services, study: StoredStudy, output: Path | None) -> Path:
    """Write a study's report and return where; by default in the home.

    Raises:
        SearchError: the study holds finalists, or the file cannot be written.
    """
    if (of := study.spec.finalists_of) is not None:
        raise SearchError(f"study {study.spec.name!r} holds {of.what}: look in the report of {of.study!r}")
    notice_promotions(services, study.storage, study)
    path = output or report_path(services, study)
    try:
        return write_report(study, path, dashboard_url=services.dashboard_url)
    except OSError as error:
        raise SearchError(f"--output {path}: cannot be written ({error.strerror}); choose another file") from None


def log(services: Services, study: StoredStudy, report: Path) -> None:
    """Log a report to the study's run in MLflow, and tell that what came of the study; without a server do nothing.

    Raises:
        SearchError: MLflow refused.
        StorageError: MLflow does not answer.
    """
    if known_tracking_uri(services, study) is None:
        return
    tracking = tracking_of(services, study)
    try:
        close_study(study, summarise(study), tracking)
        tracking.log_file(str(study.attrs[RUN_ID]), report)
    except (MlflowException, RunDeletedError) as error:
        raise SearchError(f"the report is written, but MLflow was not told ({one_line(error)})") from None
