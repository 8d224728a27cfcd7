"""Actions behind the methods of `Study` that need more than one call."""

from __future__ import annotations

import inspect
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.exceptions import MlflowException

from hpsearch.objectives.loading import BUILTIN
from hpsearch.objectives.objective import BaseObjective
from hpsearch.search.api.opening import notice_promotions, tell_mlflow
from hpsearch.search.console import command, counted
from hpsearch.search.errors import SearchError
from hpsearch.search.promotion.open_test import Candidate, choose_candidate, open_for
from hpsearch.search.promotion.promote import refresh_evidence
from hpsearch.search.report import write_report
from hpsearch.search.report.show import why_waiting
from hpsearch.search.services import Services
from hpsearch.search.study.checkpoints import open_checkpoints
from hpsearch.search.study.ranking import first_value
from hpsearch.search.study.steering import running_trials
from hpsearch.search.study.study import (
    StoredStudy,
    known_tracking_uri,
    load_study,
    outbox_folder,
    report_path,
    runs_folder,
    tracking_of,
)
from hpsearch.search.study.summary import broken_bounds, summarise
from hpsearch.search.tracking.publish import close_study
from hpsearch.storage.attributes import INFEASIBLE, REASON, RUN_ID, WORKER
from hpsearch.storage.mlflow.client import RunDeletedError, Tracking
from hpsearch.storage.mlflow.health import describe_error
from hpsearch.storage.records.test_openings import AlreadyOpenError, read_opening
from hpsearch.storage.trials.history import finalist_studies, refit_studies


def trials_frame(study: StoredStudy) -> pd.DataFrame:
    """Return a row for each trial: what it was given, what it scored, and why it ended as it did.

    Of several metrics `value` is that of the first, and each has a column, as Optuna names it: ``values_accuracy``.
    Where there are constraints, `out_of_bounds` has those that the trial breaks.
    """
    trials, waiting, spec = study.trials(), why_waiting(study), study.spec
    names = list(spec.ways) if spec.several else []
    params = sorted({name for trial in trials for name in trial.params})
    columns: dict[str, list[Any]] = {
        "number": [trial.number for trial in trials],
        "state": ["INFEASIBLE" if trial.user_attrs.get(INFEASIBLE) else trial.state.name for trial in trials],
        "value": [first_value(trial) for trial in trials],
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
        columns["out_of_bounds"] = ["; ".join(broken_bounds(spec, trial)) for trial in trials]
    return pd.DataFrame(columns)


def reference_of(objective: str | type[BaseObjective]) -> str:
    """Return the reference by which workers load an objective.

    Args:
        objective: a reference, which is returned; or a class of a file or an installed module.

    Raises:
        SearchError: it is neither, or the class is of a notebook's cell or a running script, where no worker finds it.
    """
    if isinstance(objective, str):
        return objective
    if not isinstance(objective, type):
        raise SearchError(f"objective is {objective!r}: give a name, such as 'digits' or 'wine.py', or a class")
    name, module = objective.__name__, objective.__module__
    if module == "__main__" or getattr(sys.modules.get(module), name, None) is not objective:
        file = f"{name.lower()}.py"
        raise SearchError(
            f"class {name} is defined in {module}, where no worker finds it: write it to a file (in a notebook: a "
            f"cell that begins with %%writefile {file}) and give {file!r}"
        )
    reference = f"{module}:{name}"
    if "." in module:
        return {known: short for short, known in BUILTIN.items()}.get(reference, reference)
    return f"{inspect.getsourcefile(objective)}:{name}"  # good from any folder


def write(services: Services, study: StoredStudy, output: Path | None) -> Path:
    """Write a study's report and return where; by default in the home.

    Raises:
        SearchError: the study holds finalists, or the file cannot be written.
    """
    study.require_search("look in the report of {study!r}")
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
        raise SearchError(f"the report is written, but MLflow was not told ({describe_error(error)})") from None


def choose(study: StoredStudy, *, trial: int | None, unconfirmed: bool, refit: bool = False) -> Candidate:
    """Return for whom the test set of a study is to be opened.

    Raises:
        SearchError: it was opened, no finalists have decided, or the trial is none to open it for.
    """
    study.require_search("open the test set of {study!r}")
    try:
        return choose_candidate(study, trial=trial, unconfirmed=unconfirmed, refit=refit)
    except AlreadyOpenError as error:
        raise _opened(study, error) from None


def open_test_set(
    services: Services, study: StoredStudy, *, trial: int | None, unconfirmed: bool, refit: bool = False
) -> dict[str, float]:
    """Open the test set, once in the life of a study; return the scores of the winner's best weights by their metrics.

    Raises:
        SearchError: as `choose`, or the weights are not to be had.
        StorageError: MLflow does not answer.
    """
    candidate = choose(study, trial=trial, unconfirmed=unconfirmed, refit=refit)
    try:
        opening = open_for(study, candidate, tracking_of(services, study))
    except AlreadyOpenError as error:
        raise _opened(study, error) from None

    def tell(tracking: Tracking) -> None:
        close_study(study, summarise(study), tracking)
        refresh_evidence(study, tracking)

    tell_mlflow(services, study, tell)
    return opening.scores or {}


def _opened(study: StoredStudy, error: AlreadyOpenError) -> SearchError:
    name = study.spec.name
    return SearchError(f"study {name!r}: {error}; see it with: {command('show', name)}")


def with_finalists(study: StoredStudy) -> list[StoredStudy]:
    """Return what is deleted with a study, in order: its finalists, the refits of their winners, and it itself.

    The search is the last: without it nobody would know whose the others are.

    Raises:
        SearchError: trials of one of them are running.
    """
    names = [of(study.engine, study.study_id) for of in (finalist_studies, refit_studies)]
    own = [load_study(study.storage, name) for some in names for name in some]
    for each in (study, *own):
        if alive := running_trials(each):
            raise SearchError(
                f"study {each.spec.name!r} has {counted(alive, 'running trial')}: "
                f"stop it first: {command('stop', each.spec.name)}"
            )
    return [*own, study]


def what_goes(study: StoredStudy) -> str:
    """Return what deleting a study takes away, for a question.

    Raises:
        SearchError: trials of it or of its finalists are running.
    """
    what = f"study {study.spec.name} with {counted(summarise(study).finished, 'finished trial')}"
    what += ", its finalists" if len(with_finalists(study)) > 1 else ""
    opened = read_opening(study.engine, study.study_id)
    return what + (", and the record that its test set was opened" if opened else "")


def delete_study(services: Services, study: StoredStudy) -> list[str]:
    """Delete a study with its finalists, checkpoints and files here; return the names of what was deleted.

    Raises:
        SearchError: trials of it or of its finalists are running.
        StorageError: the place for checkpoints does not answer.
    """
    gone = with_finalists(study)
    for each in gone:
        folders = runs_folder(services.home / "runs", each), outbox_folder(services.home, each)
        checkpoints = open_checkpoints(each, services.home, services.checkpoint_url)
        each.storage.delete_study(each.study_id)
        checkpoints.forget()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    return [each.spec.name for each in gone]
